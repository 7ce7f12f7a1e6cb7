"""Tokens/s that eval.plan predicts before a training against those measured after it.

    python scripts/bench/plan.py target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      "chats=[CHATS.json]" prompts=PROMPTS.jsonl "widths=[0,256]" draft_vocab_size=2048

Every drafter is planned with random weights, then trained, and all of them are measured in one
interleaved run as chains of fixed length. Each one's tokens/s and best draft length are predicted
from the planned costs and from the acceptance of the others alone: the drafter itself is left out.
With `replan=true` the costs are also measured again right before the evaluation, and the errors of
both plans are printed: the first one's include any change of the machine's speed in between.
As a control, they are also predicted from the mean acceptance of the others. The tokens/s are
compared at the measured length, the lengths by the speed that the planned one loses in the sweep.
A call with the same `work` and settings continues; the minutes of each part are printed.
"""

import dataclasses
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import eval.plan.job
from decoding.drafters.build import choose_drafter
from decoding.errors import UserError
from eval.config import BenchmarkConfig
from eval.plan.acceptance import choose_curves
from eval.plan.candidates import Candidate, candidates, drafted_tokens, shape_of_width
from eval.plan.config import PlanConfig
from eval.plan.costs import FILE, CostFile
from eval.plan.curves import CHAIN, collect
from eval.statistics.schema import Row, read_rows
from jobs.config import TargetConfig, plain
from scripts.bench import common
from scripts.bench.plan_errors import compare, predict_without, summary, summary_lines
from scripts.usage import run_script
from training.models.build import target_config

SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size"),
)
BEFORE = "planned before the trainings"
AGAIN = "planned again before the evaluation"


@dataclass
class Options(common.BenchOptions):
    target: str = "embedded:target"  # model folder
    dtype: str = "float32"  # of target and drafters while decoding
    chats: list[str] = field(default_factory=lambda: ["embedded:chats"])  # ShareGPT files
    # ShareGPT files that are never trained on, for the choice of layers and the held-out losses
    held_out_chats: list[str] = field(default_factory=lambda: ["embedded:held_out_chats"])
    held_out_prompts: str = "embedded:held_out_chats"  # held-out prompts of the trainings
    prompts: str = "embedded:prompts"  # prompts that are decoded after the trainings
    depths: list[int] = field(default_factory=lambda: [1, 2, 4])  # layers of the pruned models
    widths: list[int] = field(default_factory=lambda: [0, 128])  # their hidden sizes; 0: target's
    # kinds of heads
    heads: list[str] = field(default_factory=lambda: ["recurrent", "medusa", "eagle3", "dflash"])
    draft_vocab_size: int = 0  # tokens that drafters propose; 0: all
    steps: int = 80  # of each training
    tokens_per_step: int = 2048  # of each training
    max_length: int = 512  # tokens of a row
    lr: float = 3e-3  # peak learning rate of models
    head_lr: float = 3e-3  # of heads
    temperature: float = 0.0  # of decoding
    lengths: list[int] = field(default_factory=lambda: [1, 2, 3, 4])  # draft lengths of the sweep
    context: int = 192  # tokens of a row while costs are planned
    cost_seconds: float = 20.0  # of the plan, for each drafter
    replan: bool = False  # measure the costs again right before the evaluation, too
    max_prompts: int = 28  # decoded, of which the sweep has 8
    max_new_tokens: int = 64  # of an answer
    work: str = "runs/bench/plan"  # folder of trained drafters and measurements
    name: str = "plan"  # name of the results file


def plan_settings(chosen: Options) -> PlanConfig:
    """Return the configuration of the plan."""
    return PlanConfig(
        job="eval.plan",
        output_dir=f"{chosen.work}/eval.plan",
        target=TargetConfig(path=chosen.target, dtype=chosen.dtype, device=chosen.device),
        depths=chosen.depths,
        widths=chosen.widths,
        heads=chosen.heads,
        draft_vocab_size=chosen.draft_vocab_size,
        max_draft_tokens=max(chosen.lengths),
        context=chosen.context,
        temperature=chosen.temperature,
        cost_seconds=chosen.cost_seconds,
        training_tokens=chosen.steps * chosen.tokens_per_step,
        acceptance=f"{chosen.work}/acceptance.jsonl",
        runs=[],
    )


def run_job(job: str, folder: Path, overrides: Sequence[str]) -> None:
    """Run a job in a process of its own, which ends at once if it is finished."""
    command = [sys.executable, "-m", job, f"output_dir={folder}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{job} failed in {folder}: {done.stderr.strip()[-600:]}")


def train(chosen: Options, one: Candidate, target: Any, folder: Path) -> Path:
    """Train a drafter and return its folder."""
    shared = [
        f"target.path={chosen.target}",
        f"target.device={chosen.device}",
        f"threads={chosen.threads}",
        f"data.chats=[{','.join(chosen.chats)}]",
        f"data.held_out_chats=[{','.join(chosen.held_out_chats)}]",
        "data.texts=[]",
        "data.held_out_texts=[]",
        f"data.max_length={chosen.max_length}",
    ]
    drafted = drafted_tokens(plan_settings(chosen), target.vocab_size)
    loop = [
        f"loop.max_steps={chosen.steps}",
        f"loop.tokens_per_step={chosen.tokens_per_step}",
        f"loop.micro_batch_tokens={chosen.tokens_per_step}",
        "loop.eval_every=0",
        "loop.checkpoint_every=0",
        "loop.dtype=auto",
        "loop.optimizer.warmup_steps=10",
        f"held_out.prompts={chosen.held_out_prompts}",
        "held_out.max_prompts=8",
        "held_out.costs=none",
        "doctor=false",
    ]
    if one.kind != CHAIN:
        options = [f"head={one.kind}", f"loop.optimizer.lr={chosen.head_lr}"]
        if one.draft_vocab_size:
            options.append(f"head.draft_vocab_size={drafted}")
        run_job("heads.train", folder, [*options, *shared, *loop])
        return folder / "drafter"
    shape = vars(shape_of_width(one.layers, one.hidden_size, target))
    sizes = [f"student.{name}={shape[name]}" for name in SIZES]
    cut = ["importance.sequences=32", "importance.choice=early_exit", *sizes]
    cut.append(f"importance.cache_dir={folder.parent / 'importance'}")
    run_job("distill.prune", folder / "pruned", ["student=shallow", *cut, *shared])
    start = ["student.init=folder", f"student.path={folder / 'pruned' / 'student'}"]
    start += [f"student.draft_vocab_size={drafted}", f"loop.optimizer.lr={chosen.lr}"]
    run_job("distill.train", folder, ["student=shallow", *start, *shared, *loop])
    return folder / "drafter"


def plan_again(config: PlanConfig, evaluation: Path) -> Path:
    """Measure a plan's costs again, in a folder beside its own; return this folder.

    evaluation: folder of the evaluation. Until it is finished the costs are always measured anew,
    as those of an interrupted call are not from right before it. Raises UserError for an evaluation
    that finished without them.
    """
    folder = Path(f"{config.output_dir}.again")
    done = (evaluation / "results.jsonl").is_file()
    if done and not (folder / FILE).is_file():
        raise UserError(
            f"{evaluation} was measured without a second plan before it, expected none with "
            f"replan=true. Delete this folder to evaluate again, or set another work=."
        )
    if not done:
        shutil.rmtree(folder, ignore_errors=True)
    eval.plan.job.run(dataclasses.replace(config, output_dir=str(folder)))
    return folder


def measure(chosen: Options, trained: Sequence[tuple[Candidate, Path]], folder: Path) -> list[Row]:
    """Measure all drafters as fixed chains in one interleaved run; return the main rows."""
    entries = []
    for one, path in trained:
        fixed = one.fixed_options(choose_drafter(path).kind)
        entries.append({"use": str(path), "name": one.name, "stopping": "fixed", **fixed})
    return common.evaluate_drafters(
        folder,
        threads=chosen.threads,
        target=TargetConfig(path=chosen.target, dtype=chosen.dtype, device=chosen.device),
        benchmark=BenchmarkConfig(path=chosen.prompts, too_long="skip", spread=True, render="auto"),
        drafters=entries,
        prompt_lookup_control=False,
        temperatures=[chosen.temperature],
        sweep=chosen.lengths,
        sweep_prompts=8,
        max_prompts=chosen.max_prompts,
        max_new_tokens=chosen.max_new_tokens,
        require_lossless=False,
    )


def main() -> None:
    """Plan, train, measure and compare; print the minutes of each part."""
    chosen = common.read_options(Options)
    began, minutes = time.monotonic(), dict[str, float]()

    def part(name: str) -> None:
        nonlocal began
        minutes[name] = round((time.monotonic() - began) / 60, 1)
        print(f"  {name}: {minutes[name]} minutes", file=sys.stderr, flush=True)
        began = time.monotonic()

    work, config = Path(chosen.work), plan_settings(chosen)
    eval.plan.job.run(config)
    part("plan")
    target: Any = target_config(config.target)
    found = candidates(config, target)
    trained = []
    for one in found:
        folder = work / one.name.replace(", ", "_").replace(" ", "_")
        trained.append((one, train(chosen, one, target, folder)))
        part(f"training {one.name}")
    plans = {BEFORE: Path(config.output_dir)}
    if chosen.replan:
        plans[AGAIN] = plan_again(config, work / "eval.run")
        part("second plan")
    rows = measure(chosen, trained, work / "eval.run")
    part("evaluation")
    curves = choose_curves(collect([str(work / "eval.run")])[0])
    sweep = [row for row in read_rows(work / "eval.run" / "results.jsonl") if row.part == "sweep"]
    results = dict[str, dict[str, Any]]()
    for name, folder in plans.items():
        costs = CostFile(config, target, folder)
        planned = [(one, known) for one in found if (known := costs.find(one)) is not None]
        figures = [
            compare(
                predict_without(config, planned, curves, row.drafter, chosen.lengths), row, sweep
            )
            for row in rows
        ]
        results[name] = {
            **summary(figures),
            "rows": figures,
            "costs": {one.name: dataclasses.asdict(known.costs) for one, known in planned},
        }
        print(f"\n{name}:")
        print(common.table(list(figures[0]), [list(one.values()) for one in figures]))
    common.save(
        chosen.name,
        chosen,
        {
            **results[BEFORE],
            **({"planned_again": results[AGAIN]} if chosen.replan else {}),
            "minutes": minutes,
            "all_minutes": round(sum(minutes.values()), 1),
            "curves": [dataclasses.asdict(one) for one in curves],
            "settings": plain(config),
        },
        show=False,
    )
    for name, found_errors in results.items():
        print("\n".join([f"\n{name}:", *summary_lines(found_errors)]))
    print(f"in {sum(minutes.values()):.0f} minutes")


if __name__ == "__main__":
    run_script(main)

"""Ways to prune, compared by cost, and by acceptance and block efficiency after distillation.

    python scripts/bench/pruning.py target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      chats=[CHATS.json] prompts=PROMPTS.jsonl

Sides: `importance` (the layers that a probe finds), `l0` (learned masks), `even` (first, last and
evenly spaced layers), `random` (the same shape from scratch). All are distilled on the same rows
for the same number of steps. The cost of pruning is reported as measured, and as computed for the
published settings (LLaMA-7B to 5 layers, width 2560: 0.419 B tokens of mask training; 1,024
sequences of 4,096 tokens and all probes).

Parts such as `seeds=[0] layers=[4]` may run in separate calls: with the same settings and `work`,
the figures include all earlier parts.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from decoding.engine import load
from decoding.loop import decode
from decoding.rounds.settings import Settings
from distill.config import PruneConfig
from distill.dry_run import importance_flops
from distill.prune.job import plan_stage_shapes
from distill.shapes import student_config
from jobs.config import TargetConfig
from jobs.paths import resolve, resolve_model
from scripts.bench import common
from scripts.bench.part_journal import PartJournal, paired_figures
from scripts.bench.students import StudentOptions, Students, prune_config
from scripts.usage import run_script
from training.config import DataConfig, LoopConfig, StudentConfig
from training.data.readers import read_prompts
from training.drafter_folder import write_model
from training.models.build import target_config
from training.models.shapes import forward_flops, parameter_counts
from training.optimizer_config import OptimizerConfig

# side -> mode of distill.prune
SIDES = {"importance": "importance", "l0": "l0", "even": "importance", "random": "random"}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_WIDE = StudentConfig(num_hidden_layers=5, hidden_size=2560, num_attention_heads=32, head_dim=128)
_MASK_TOKENS = 3200 * 32 * 4096


@dataclass
class Options(StudentOptions):
    max_prompts: int = 24  # number of prompts
    num_draft_tokens: int = 4  # draft length
    layers: list[int] = field(default_factory=lambda: [4, 2, 1])  # numbers of layers to keep
    sides: list[str] = field(default_factory=lambda: [*SIDES])  # ways to prune
    steps: int = 200  # steps of distillation after every cut
    mask_steps: int = 200  # steps of mask training before it
    sequences: int = 1024  # rows that are scored
    dtype: str = "bfloat16"  # dtype of training; master weights are float32
    mask_weights_lr: float = 1e-4  # learning rate of the weights while masks are learned
    name: str = "pruning"  # name of the results file


def measure(
    chosen: Options, students: Students, side: str, layers: int, seed: int, work: Path
) -> dict[str, Any]:
    """Prune and distil, then measure held-out acceptance, block efficiency and the cost."""
    config = prune_config(chosen, StudentConfig(num_hidden_layers=layers), seed, work)
    config.mode = SIDES[side]
    config.importance.choice = "even" if side == "even" else "probe"
    optimizer = OptimizerConfig(lr=chosen.mask_weights_lr)
    config.loop = dataclasses.replace(config.loop, max_steps=chosen.mask_steps, optimizer=optimizer)
    context = students.context(config)
    student, notes = students.cut(context)
    spent = {"seconds": sum_by_work(context.seconds), "flops": sum_by_work(context.flops)}
    before = context.acceptance(student)["acceptance"]
    after = students.distil(f"{side} {layers} {seed}", context, student)
    with tempfile.TemporaryDirectory() as folder:
        write_model(student, resolve_model(chosen.target), Path(folder), torch.float32)
        greedy, sampled = block_efficiencies(chosen, Path(folder), seed)
    return {
        "layers": notes["layers"],
        "masks": notes.get("masks"),  # l0: distance from the sparsity, and clarity of the choice
        "acceptance_before": before,
        "acceptance": after["acceptance"],
        "greedy_acceptance": after["greedy_acceptance"],
        "tau_greedy": greedy,
        "tau_sampled": sampled,
        "pruning": spent,
    }


def block_efficiencies(chosen: Options, drafter: Path, seed: int) -> list[float]:
    """Return the block efficiency over all prompts, greedy and at temperature 1."""
    engine = load(resolve_model(chosen.target), drafter, device=chosen.device)
    asked = read_prompts(resolve(chosen.prompts))[: chosen.max_prompts]
    prompts = [ids for _, ids in common.fitting_prompts(engine, asked, chosen.max_new_tokens)]
    found = []
    for temperature in (0.0, 1.0):
        settings = Settings(
            max_new_tokens=chosen.max_new_tokens,
            temperature=temperature,
            num_draft_tokens=chosen.num_draft_tokens,
            seed=seed,
            stop_token_ids=engine.stop_token_ids,
            stopping="fixed",
        )
        made = decode(engine.target, engine.drafter, prompts, settings)
        found.append(sum(len(one.tokens) for one in made) / sum(one.rounds for one in made))
    return found


def count_published_flops() -> dict[str, float]:
    """Return the operations of mask training and of importance at the published settings.

    LLaMA-7B is cut to 796 M parameters. Importance is counted for one cut and for the recipe's two.
    The short distillation between the two is a separate figure, since it trains the student.
    """
    llama = target_config(TargetConfig(path="nowhere/llama_7b", config=_LLAMA))
    between, data = LoopConfig(max_steps=300, tokens_per_step=16384), DataConfig(max_length=4096)
    # 32 -> 12 -> 5 layers
    config = PruneConfig(student=_WIDE, largest_cut=0.625, data=data, between=between)
    masks = 6.0 * parameter_counts(llama)["all"] * _MASK_TOKENS
    once = importance_flops(config, llama, llama, student_config(_WIDE, llama))
    shapes = plan_stage_shapes(config, llama)
    pairs = zip([llama, *shapes], shapes, strict=False)
    staged = sum(importance_flops(config, source, llama, shape) for source, shape in pairs)
    a_token = sum(6.0 * parameter_counts(s)["all"] + forward_flops(llama) for s in shapes[:-1])
    return {
        "l0": masks,
        "importance": once,
        "ratio": masks / once,
        "importance_in_stages": staged,
        "ratio_in_stages": masks / staged,
        "distillation_between": a_token * between.max_steps * between.tokens_per_step,
    }


def main() -> None:
    """Measure every side, and write the results after each."""
    chosen = common.read_options(Options, sides=SIDES)
    journal, students = PartJournal(chosen.work, chosen, ("seeds", "layers", "sides")), Students()
    parts = [
        {"side": side, "layers": layers, "seed": seed}
        for seed in chosen.seeds
        for layers in chosen.layers
        for side in chosen.sides
    ]
    for part in parts:
        found = journal.figures(part, measure, chosen, students, **part, work=journal.folder)
        print(
            f"  {part['layers']} layers, {part['side']}, seed {part['seed']}: acceptance "
            f"{found['acceptance']:.4f} (before {found['acceptance_before']:.4f}), tau "
            f"{found['tau_greedy']:.3f} greedy {found['tau_sampled']:.3f} sampled, "
            f"{sum(found['pruning']['seconds'].values()):.0f} s to prune",
            file=sys.stderr,
        )
        common.save(chosen.name, chosen, collect_figures(journal), show=False)
    common.save(chosen.name, chosen, collect_figures(journal))


def collect_figures(journal: PartJournal) -> dict[str, Any]:
    """Return the differences of importance from every other side, the costs and the runs."""
    runs: dict[str, dict[str, dict[str, Any]]] = {}  # layers -> side -> seed -> figures
    for part, found in journal.all():
        of_side = runs.setdefault(str(part["layers"]), {}).setdefault(part["side"], {})
        of_side[str(part["seed"])] = found
    keys = ("acceptance", "tau_greedy", "tau_sampled")
    over = {
        layers: {
            side: paired_figures(by_side["importance"], theirs, keys)
            for side, theirs in by_side.items()
            if side != "importance" and "importance" in by_side
        }
        for layers, by_side in runs.items()
    }
    return {
        "importance_over": over,
        "cost": least_costs(journal),
        "published_flops": count_published_flops(),
        "revisions": journal.revisions(),
        "runs": runs,
    }


def sum_by_work(accounts: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of the costs by kind of work; all candidates of a probe are one kind."""
    found: dict[str, float] = {}
    for name, value in accounts.items():
        kind = "probes" if name.startswith("probe") else name
        found[kind] = found.get(kind, 0.0) + value
    return found


def least_costs(journal: PartJournal) -> dict[str, dict[str, dict[str, float]]]:
    """Return side -> "work, to N layers" -> unit (seconds, flops) -> the least value of any run.

    The least is taken because other processes can only slow a run down. Scores and the order of
    layers are computed once per seed and reused by its other cuts.
    """
    spent: dict[str, dict[str, dict[str, float]]] = {}
    for part, found in journal.all():
        for unit, of_works in found["pruning"].items():
            for work, value in of_works.items():
                name = f"{work}, to {part['layers']} layers"
                least = spent.setdefault(part["side"], {}).setdefault(name, {})
                least[unit] = min(value, least.get(unit, value))
    return spent


if __name__ == "__main__":
    run_script(main)

"""Ways to prune, side by side: held-out acceptance and block efficiency after equal distillation,
and what each way costs.

    python scripts/bench/pruning.py target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      chats=[CHATS.json] prompts=PROMPTS.jsonl

Sides: `importance` (the layers that a probe finds), `l0` (learned masks), `even` (first, last and
evenly spaced layers), `random` (the same shape from scratch). All are distilled on the same rows
for as many steps; what a side spends before that is told beside it, as run and at the published
settings (LLaMA-7B to 5 layers, width 2560: 0.419 B tokens of mask training; 1,024 sequences of
4,096 tokens and all probes).

Pieces such as `seeds=[0] layers=[4]` may be run one by one: with the same settings and `work`, the
figures are of all that was run so far.
"""

import dataclasses
import logging
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from decoding.engine import encode, load
from decoding.errors import UserError
from decoding.loop import decode
from decoding.rounds.settings import Settings
from distill.config import PruneConfig
from distill.dry_run import importance_flops
from distill.prune.job import stage_shapes
from distill.shapes import student_config
from jobs.config import TargetConfig
from jobs.paths import resolve
from scripts.bench.common import options, save
from scripts.bench.kept import Kept, paired
from scripts.bench.students import Students, configured
from training.config import DataConfig, LoopConfig, StudentConfig
from training.data.readers import read_prompts
from training.drafter_folder import write_model
from training.models.build import target_config
from training.models.shapes import forward_flops, parameter_counts
from training.optimizer_config import OptimizerConfig

# side -> mode of distill.prune
SIDES = {
    "importance": "importance",
    "l0": "l0",
    "even": "importance",
    "random": "random",
}
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
_BATCH = 16  # prompts decoded together


@dataclass
class Options:
    target: str = "embedded:target"  # model folder
    # to distil on, and to score by
    chats: list[str] = field(default_factory=lambda: ["embedded:chats"])
    # for acceptance; never trained on
    held_out_chats: list[str] = field(default_factory=lambda: ["embedded:held_out_chats"])
    prompts: str = "embedded:prompts"  # evaluation prompts, for block efficiency
    max_prompts: int = 24  # of them
    max_new_tokens: int = 64  # of each
    num_draft_tokens: int = 4  # draft length
    layers: list[int] = field(default_factory=lambda: [4, 2, 1])  # layers left
    sides: list[str] = field(default_factory=lambda: [*SIDES])  # what is compared
    max_length: int = 256  # tokens a row
    tokens_per_step: int = 4096  # tokens a step, of all training
    steps: int = 200  # of distillation behind every cut
    mask_steps: int = 200  # of l0's training before it
    probe_steps: int = 10  # of a candidate's distillation
    sequences: int = 1024  # rows that are scored
    dtype: str = "bfloat16"  # of teacher and students while they train; master weights are float32
    lr: float = 3e-3  # peak learning rate of distillation
    mask_weights_lr: float = 1e-4  # of the weights while masks are learned
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])  # a run of every side each
    threads: int = 2  # CPU threads
    device: str = "cpu"  # cpu | cuda
    cache_mb: int = 2000  # memory for the target's states on the training text
    # folder of finished parts, scores and layer orders: the same settings go on from it
    work: str = "runs/bench"
    name: str = "pruning"  # of the results file


def run(
    chosen: Options, students: Students, side: str, layers: int, seed: int, work: Path
) -> dict[str, Any]:
    """Prune, distil, and look: acceptance on held-out text, block efficiency by real decoding, and
    what the pruning took.
    """
    config = configured(chosen, StudentConfig(num_hidden_layers=layers), seed, work)
    config.mode = SIDES[side]
    config.importance.choice = "even" if side == "even" else "probe"
    config.loop = dataclasses.replace(
        config.loop,
        max_steps=chosen.mask_steps,
        optimizer=OptimizerConfig(lr=chosen.mask_weights_lr),
    )
    bench = students.bench(config)
    student, notes = students.cut(bench)
    spent = {"seconds": by_work(bench.seconds), "flops": by_work(bench.flops)}
    before = bench.acceptance(student)["acceptance"]
    after = students.distil(f"{side} {layers} {seed}", bench, student)
    with tempfile.TemporaryDirectory() as place:
        write_model(student, resolve(chosen.target), Path(place), torch.float32)
        taus = block_efficiency(chosen, Path(place), seed)
    return {
        "layers": notes["layers"],
        # of l0: how far each kind ended from its sparsity, and how clear its choice is
        "masks": notes.get("masks"),
        "acceptance_before": before,
        "acceptance": after["acceptance"],
        "greedy_acceptance": after["greedy_acceptance"],
        "tau_greedy": taus[0.0],
        "tau_sampled": taus[1.0],
        "pruning": spent,
    }


def block_efficiency(chosen: Options, drafter: Path, seed: int) -> dict[float, float]:
    """Tokens a target forward, over all prompts, by real speculative decoding; by temperature."""
    engine = load(resolve(chosen.target), drafter, device=chosen.device)
    prompts = read_prompts(resolve(chosen.prompts))[: chosen.max_prompts]
    asked = [encode(engine, [{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
    fitting = [ids for ids in asked if len(ids) + chosen.max_new_tokens < engine.target.max_length]
    found = {}
    for temperature in (0.0, 1.0):
        settings = Settings(
            max_new_tokens=chosen.max_new_tokens,
            temperature=temperature,
            num_draft_tokens=chosen.num_draft_tokens,
            seed=seed,
            stop_token_ids=engine.stop_token_ids,
            stopping="fixed",
        )
        done = [
            answer
            for start in range(0, len(fitting), _BATCH)
            for answer in decode(
                engine.target,
                engine.drafter,
                fitting[start : start + _BATCH],
                settings,
                request_ids=range(start, min(start + _BATCH, len(fitting))),
            )
        ]
        found[temperature] = sum(len(one.tokens) for one in done) / sum(one.rounds for one in done)
    return found


def published() -> dict[str, float]:
    """Operations of both modes at the published settings, LLaMA-7B to 796 M: importance in one cut,
    and as the recipe does it in two.

    The recipe's short distillation between its cuts is told apart: it trains the student, and is no
    part of choosing it.
    """
    llama = target_config(TargetConfig(path="nowhere/llama_7b", config=_LLAMA))
    between = LoopConfig(max_steps=300, tokens_per_step=16384)
    config = PruneConfig(
        student=_WIDE,
        largest_cut=0.625,
        data=DataConfig(max_length=4096),
        between=between,  # 32 -> 12 -> 5 layers
    )
    masks = 6.0 * parameter_counts(llama)["all"] * _MASK_TOKENS
    once = importance_flops(config, llama, llama, student_config(_WIDE, llama))
    shapes = stage_shapes(config, llama)
    staged = sum(
        importance_flops(config, source, llama, shape)
        for source, shape in zip([llama, *shapes], shapes, strict=False)
    )
    a_token = sum(
        6.0 * parameter_counts(shape)["all"] + forward_flops(llama) for shape in shapes[:-1]
    )
    return {
        "l0": masks,
        "importance": once,
        "ratio": masks / once,
        "importance_in_stages": staged,
        "ratio_in_stages": masks / staged,
        "distillation_between": a_token * between.max_steps * between.tokens_per_step,
    }


def main() -> None:
    chosen = options(Options)
    unknown = sorted({*chosen.sides} - {*SIDES})
    if unknown:
        sys.exit(f"error: sides has '{unknown[0]}', expected some of {', '.join(SIDES)}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    kept, students = Kept(chosen.work, chosen, ("seeds", "layers", "sides")), Students()
    for seed in chosen.seeds:
        for layers in chosen.layers:
            for side in chosen.sides:
                part = {"side": side, "layers": layers, "seed": seed}
                found = kept.figures(part, run, chosen, students, **part, work=kept.folder)
                print(
                    f"  {layers} layers, {side}, seed {seed}: acceptance {found['acceptance']:.4f} "
                    f"(before {found['acceptance_before']:.4f}), tau {found['tau_greedy']:.3f} "
                    f"greedy {found['tau_sampled']:.3f} sampled, "
                    f"{sum(found['pruning']['seconds'].values()):.0f} s to prune",
                    file=sys.stderr,
                )
                save(chosen.name, chosen, figures(kept), show=False)
    save(chosen.name, chosen, figures(kept))


def figures(kept: Kept) -> dict[str, Any]:
    """Importance over every other side (paired over seeds), what choosing cost, the costs at
    published settings, and the runs.
    """
    runs: dict[str, dict[str, dict[str, Any]]] = {}  # layers -> side -> seed -> what was found
    for part, found in kept.all():
        runs.setdefault(str(part["layers"]), {}).setdefault(part["side"], {})[str(part["seed"])] = (
            found
        )
    over = {
        layers: {
            side: {
                key: paired(
                    *(
                        {seed: one[key] for seed, one in of.items()}
                        for of in (by_side["importance"], theirs)
                    )
                )
                for key in ("acceptance", "tau_greedy", "tau_sampled")
            }
            for side, theirs in by_side.items()
            if side != "importance" and "importance" in by_side
        }
        for layers, by_side in runs.items()
    }
    return {
        "importance_over": over,
        "cost": costs(kept),
        "published_flops": published(),
        "revisions": kept.revisions(),
        "runs": runs,
    }


def by_work(accounts: dict[str, float]) -> dict[str, float]:
    """The sums by kind of work: all candidates of a probe are one."""
    found: dict[str, float] = {}
    for name, value in accounts.items():
        kind = "probes" if name.startswith("probe") else name
        found[kind] = found.get(kind, 0.0) + value
    return found


def costs(kept: Kept) -> dict[str, dict[str, dict[str, float]]]:
    """side -> work -> its least seconds and operations of the runs that did it: scores and the
    layers' order serve all cuts of a seed.

    The least, as a run beside other work takes longer, and none takes less than it must.
    """
    spent: dict[str, dict[str, dict[str, list[float]]]] = {}
    for part, found in kept.all():
        for what, of_works in found["pruning"].items():
            for work, value in of_works.items():
                lists = spent.setdefault(part["side"], {}).setdefault(
                    f"{work}, to {part['layers']} layers", {}
                )
                lists.setdefault(what, []).append(value)
    return {
        side: {
            work: {what: min(values) for what, values in of.items()} for work, of in works.items()
        }
        for side, works in spent.items()
    }


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")

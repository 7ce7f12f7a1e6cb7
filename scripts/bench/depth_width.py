"""Shallow and wide against deep and narrow, at equal bytes read a step and equal distillation: the claim of "Decoding Speculative Decoding".

    python scripts/bench/depth_width.py target=$SHALLOW_DRAFT_DATA/models/chat24m chats=[CHATS.json] held_out_prompts=A.jsonl prompts=B.jsonl \\
      "shapes=['2:384:6:6:1024','4:288:4:4:768','6:224:4:4:704','12:192:3:3:384']"

Every shape is pruned from the target by importance and distilled on the same rows for as many steps, once a seed; then all are decoded with in
one interleaved run for each backend and execution. Bytes are those of the layers and the head, and may differ by 3 %.
"""

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import distill.prune
import distill.train
import eval.run
from decoding.errors import UserError
from distill.config import ImportanceConfig, PruneConfig, TrainConfig
from distill.shapes import student_config
from eval.config import BenchmarkConfig, EvalConfig
from eval.schema import read_rows
from scripts.bench.common import options, save
from training.config import DataConfig, HeldOutConfig, LoopConfig, OptimizerConfig, StudentConfig, TargetConfig
from training.models import target_config
from training.shapes import bytes_a_step, parameter_counts

TOLERANCE = 0.03  # of bytes a step
EXECUTIONS = ("native eager", "native compiled", "hf eager")


@dataclass
class Options:
    target: str = "embedded:target"  # model folder
    chats: list[str] = field(default_factory=lambda: ["embedded:chats"])  # to distil on, and to score by
    held_out_chats: list[str] = field(default_factory=lambda: ["embedded:held_out_chats"])  # for the choice of layers
    held_out_prompts: str = "embedded:held_out_chats"  # for acceptance while distilling
    prompts: str = "embedded:prompts"  # that are decoded
    max_prompts: int = 30  # of them
    max_new_tokens: int = 64  # of each
    # LAYERS:HIDDEN:HEADS:KV_HEADS:INTERMEDIATE of each student; the first one's bytes are what the others are held to.
    shapes: list[str] = field(default_factory=lambda: ["1:192:3:1:512", "2:128:2:1:448"])
    executions: list[str] = field(
        default_factory=lambda: [*EXECUTIONS]
    )  # backends and executions of target and drafters
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # 0 is greedy
    sweep: list[int] = field(default_factory=lambda: [1, 2, 3, 4])  # draft lengths
    max_length: int = 256  # tokens a row
    tokens_per_step: int = 4096  # tokens a step
    steps: int = 400  # of distillation
    sequences: int = 512  # rows that are scored
    lr: float = 3e-3  # peak learning rate
    dtype: str = "float32"  # of training
    seeds: int = 3  # runs of every shape
    work: str = ""  # folder of the runs, kept and gone on from; empty: a temporary one
    threads: int = 2  # CPU threads
    device: str = "cpu"  # cpu | cuda
    name: str = "depth_width"  # of the results file


def shape_of(text: str) -> StudentConfig:
    """A shape as an option names it. Raises UserError for another form."""
    parts = text.split(":")
    if len(parts) != 5 or not all(part.isdigit() for part in parts):
        raise UserError(f"shape '{text}' is not LAYERS:HIDDEN:HEADS:KV_HEADS:INTERMEDIATE, such as 2:384:6:6:1024")
    layers, hidden, heads, groups, inner = map(int, parts)
    return StudentConfig(
        name=f"{layers}x{hidden}",
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
    )


def equal_bytes(chosen: Options) -> dict[str, int]:
    """Bytes a step of every shape. Raises UserError where one differs from the first by more than TOLERANCE."""
    target = target_config(TargetConfig(path=chosen.target))
    found = {text: bytes_a_step(student_config(shape_of(text), target)) for text in chosen.shapes}
    first = found[chosen.shapes[0]]
    for text, size in found.items():
        if abs(size / first - 1) > TOLERANCE:
            raise UserError(
                f"shape {text} reads {size / 1e6:.2f} MB a step, {chosen.shapes[0]} reads {first / 1e6:.2f} MB: they may differ by {TOLERANCE:.0%}"
            )
    return found


def distilled(chosen: Options, shape: StudentConfig, seed: int, work: Path) -> tuple[Path, float]:
    """A drafter of one shape, pruned and distilled, and its held-out acceptance."""
    target, place = TargetConfig(path=chosen.target, device=chosen.device), work / f"{shape.name}_seed{seed}"
    data = DataConfig(
        chats=chosen.chats, held_out_chats=chosen.held_out_chats, max_length=chosen.max_length, max_bad=0.1
    )
    loop = LoopConfig(
        max_steps=chosen.steps,
        tokens_per_step=chosen.tokens_per_step,
        micro_batch_tokens=chosen.tokens_per_step,
        eval_every=0,
        checkpoint_every=0,
        dtype=chosen.dtype,
        optimizer=OptimizerConfig(lr=chosen.lr),
    )
    scores = ImportanceConfig(sequences=chosen.sequences, cache_dir=str(work / "scores"), probe_steps=10)
    student = distill.prune.run(
        PruneConfig(
            job="distill.prune",
            output_dir=str(place / "pruned"),
            seed=seed,
            target=target,
            drafter=shape,
            data=data,
            importance=scores,
            between=loop,
        )
    )
    from_folder = StudentConfig(
        name=shape.name, init="folder", path=str(student), num_hidden_layers=shape.num_hidden_layers
    )
    drafter = distill.train.run(
        TrainConfig(
            job="distill.train",
            output_dir=str(place / "distilled"),
            seed=seed,
            target=target,
            drafter=from_folder,
            data=data,
            held_out=HeldOutConfig(prompts=chosen.held_out_prompts, max_new_tokens=min(96, chosen.max_length // 2)),
            loop=loop,
        )
    )
    metrics = json.loads((drafter.parent / "manifest.json").read_text())["metrics"]
    return drafter, float(metrics["acceptance"])


def measured(chosen: Options, drafters: dict[str, Path], execution: str, seed: int, work: Path) -> list[dict[str, Any]]:
    """All drafters in one interleaved run on one backend and execution."""
    backend, how = execution.split()
    folder = work / f"eval_{execution.replace(' ', '_')}_seed{seed}"
    target = TargetConfig(
        path=chosen.target, device=chosen.device, backend=backend, execution=how if backend == "native" else ""
    )
    eval.run.run(
        EvalConfig(
            job="eval.run",
            output_dir=str(folder),
            seed=seed,
            threads=chosen.threads,
            target=target,
            benchmark=BenchmarkConfig(path=chosen.prompts, too_long="skip"),
            drafters=[{"use": str(path), "name": name, "stopping": "fixed"} for name, path in drafters.items()],
            temperatures=chosen.temperatures,
            sweep=chosen.sweep,
            max_prompts=chosen.max_prompts,
            max_new_tokens=chosen.max_new_tokens,
        )
    )
    keys = (
        "drafter",
        "temperature",
        "num_draft_tokens",
        "alpha",
        "tau",
        "t_draft_ms",
        "cost_ratio",
        "speedup",
        "speedup_low",
        "speedup_high",
    )
    rows = [row for row in read_rows(folder / "results.jsonl") if row.part == "main" and row.drafter in drafters]
    return [{key: getattr(row, key) for key in keys} for row in rows]


def main() -> None:
    chosen = options(Options)
    unknown = sorted({*chosen.executions} - {*EXECUTIONS})
    if unknown:
        sys.exit(f"error: executions has '{unknown[0]}', expected some of {', '.join(EXECUTIONS)}")
    sizes = equal_bytes(chosen)
    target = target_config(TargetConfig(path=chosen.target))
    shapes = {shape_of(text).name: shape_of(text) for text in chosen.shapes}
    acceptance: dict[str, list[float]] = {name: [] for name in shapes}
    rows: dict[str, list[list[dict[str, Any]]]] = {execution: [] for execution in chosen.executions}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(chosen.work or temporary)
        for seed in range(chosen.seeds):
            drafters = {}
            for name, shape in shapes.items():
                drafters[name], alpha = distilled(chosen, shape, seed, work)
                acceptance[name].append(alpha)
            for execution in chosen.executions:
                rows[execution].append(measured(chosen, drafters, execution, seed, work))
    figures = {
        "bytes_a_step": sizes,
        "parameters": {name: parameter_counts(student_config(shape, target))["all"] for name, shape in shapes.items()},
        "acceptance": acceptance,
        "mean_speedup": {execution: mean_speedups(of) for execution, of in rows.items()},
        "rows": rows,
    }
    save(chosen.name, chosen, figures, show=False)
    print(json.dumps({key: figures[key] for key in ("acceptance", "mean_speedup")}, indent=1))


def mean_speedups(by_seed: list[list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Mean over seeds of each drafter's measured speedup and t_draft, by temperature."""
    found: dict[str, dict[str, float]] = {}
    for key in sorted({(row["drafter"], row["temperature"]) for rows in by_seed for row in rows}):
        mine = [row for rows in by_seed for row in rows if (row["drafter"], row["temperature"]) == key]
        found[f"{key[0]}, T={key[1]:g}"] = {
            name: statistics.mean(row[name] for row in mine) for name in ("speedup", "t_draft_ms", "cost_ratio", "tau")
        }
    return found


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")

"""Shallow and wide against deep and narrow, at equal bytes read a step and equal distillation: the
claim of "Decoding Speculative Decoding".

    python scripts/bench/depth_width.py target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      chats=[CHATS.json] held_out_prompts=A.jsonl prompts=B.jsonl \\
      "shapes=['2:384:6:6:1024','4:288:4:4:832','6:224:4:4:704','12:192:3:3:384']"

Every shape is pruned from the target by importance and distilled on the same rows for as many
steps, once a seed; then all are decoded with in one interleaved run for each backend and execution.
Bytes are those of the layers and the head; the most and the fewest may differ by 3 %. Speedups are
those over prompts whose greedy text does not loop, as in every verdict (`headline_speedup`); those
over all prompts stand beside. Compiled is inductor's code on a CPU too, where it needs a C++
compiler.

Pieces such as `seeds=[0]` or `executions=["hf eager"]` (none with `executions=[]`: students alone)
may be run one by one: with the same settings and `work`, the figures are of all that was run so
far.
"""

import hashlib
import json
import logging
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import eval.run
from decoding import devices
from decoding.errors import UserError
from decoding.models.text.tokenizer import load_tokenizer
from distill.acceptance import HeldOutAcceptance
from distill.config import TrainConfig
from distill.shapes import student_config
from eval.config import BenchmarkConfig, EvalConfig
from eval.statistics.schema import read_rows
from jobs.config import TargetConfig, plain
from jobs.drafters import CONTROL
from jobs.paths import resolve
from scripts.bench.common import options, save
from scripts.bench.kept import Kept, paired
from scripts.bench.students import Students, configured
from training.config import DataConfig, HeldOutConfig, StudentConfig
from training.data.packing import Sample
from training.drafter_folder import write_model
from training.held_out import target_answers
from training.models.build import target_config
from training.models.shapes import bytes_a_step, parameter_counts

TOLERANCE = 0.03  # of bytes a step
# options that students do not hang on
DECODING = (
    "prompts",
    "max_prompts",
    "max_new_tokens",
    "temperatures",
    "sweep",
    "repeats",
)
EXECUTIONS = ("native eager", "native compiled", "hf eager", "hf compiled")
COMPARED = ("headline_speedup", "speedup", "tau", "t_draft_ms")


@dataclass
class Options:
    target: str = "embedded:target"  # model folder
    # to distil on, and to score by
    chats: list[str] = field(default_factory=lambda: ["embedded:chats"])
    # for the choice of layers
    held_out_chats: list[str] = field(default_factory=lambda: ["embedded:held_out_chats"])
    held_out_prompts: str = "embedded:held_out_chats"  # for acceptance while distilling
    prompts: str = "embedded:prompts"  # that are decoded
    max_prompts: int = 30  # of them
    max_new_tokens: int = 64  # of each
    # LAYERS:HIDDEN:HEADS:KV_HEADS:INTERMEDIATE of each student; the first one is what the others
    # are compared with.
    shapes: list[str] = field(default_factory=lambda: ["1:192:3:1:512", "2:128:2:1:448"])
    # backends and executions of target and drafters
    executions: list[str] = field(default_factory=lambda: [*EXECUTIONS])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # 0 is greedy
    sweep: list[int] = field(default_factory=lambda: [1, 2, 3, 4])  # draft lengths
    repeats: int = 1  # times that every generation is run; the fastest counts
    max_length: int = 256  # tokens a row
    tokens_per_step: int = 4096  # tokens a step
    steps: int = 400  # of distillation
    probe_steps: int = 10  # of a candidate's distillation, where layers are chosen
    sequences: int = 512  # rows that are scored
    lr: float = 3e-3  # peak learning rate
    dtype: str = "float32"  # of training
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])  # a run of every shape each
    # folder of students, evaluations and finished parts: the same settings go on from it
    work: str = "runs/bench"
    cache_mb: int = 2000  # memory for the target's states on the training text
    threads: int = 2  # CPU threads
    device: str = "cpu"  # cpu | cuda
    name: str = "depth_width"  # of the results file


def shape_of(text: str) -> StudentConfig:
    """A shape as an option names it. Raises UserError for another form."""
    parts = text.split(":")
    if len(parts) != 5 or not all(part.isdigit() for part in parts):
        raise UserError(
            f"shape '{text}' is not LAYERS:HIDDEN:HEADS:KV_HEADS:INTERMEDIATE, such as "
            f"2:384:6:6:1024"
        )
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
    """Bytes a step of every shape. Raises UserError where two differ by more than TOLERANCE."""
    target = target_config(TargetConfig(path=chosen.target))
    names = [shape_of(text).name for text in chosen.shapes]
    if len({*names}) < len(names):
        raise UserError(
            f"shapes are told apart by layers and hidden size, found {', '.join(names)}: give each "
            f"pair once"
        )
    found = {text: bytes_a_step(student_config(shape_of(text), target)) for text in chosen.shapes}
    most, least = max(found, key=lambda text: found[text]), min(found, key=lambda text: found[text])
    if found[most] > (1 + TOLERANCE) * found[least]:
        raise UserError(
            f"shape {most} reads {found[most] / 1e6:.2f} MB a step, {least} reads "
            f"{found[least] / 1e6:.2f} MB: they may differ by {TOLERANCE:.0%}"
        )
    return found


class Answers:
    """The target's answers to the held-out prompts, made once a seed."""

    def __init__(self, chosen: Options) -> None:
        self._chosen, self._seed, self._samples = chosen, -1, list[Sample]()

    def of(self, seed: int) -> list[Sample]:
        """The answers drawn with this seed."""
        chosen = self._chosen
        if seed != self._seed:
            folder = resolve(chosen.target)
            asked = TrainConfig(
                seed=seed,
                target=TargetConfig(path=chosen.target, device=chosen.device),
                data=DataConfig(max_length=chosen.max_length),
                held_out=HeldOutConfig(
                    prompts=chosen.held_out_prompts, max_new_tokens=min(96, chosen.max_length // 2)
                ),
            )
            self._samples, self._seed = target_answers(folder, load_tokenizer(folder), asked), seed
        return self._samples


def distilled(
    chosen: Options,
    students: Students,
    answers: Answers,
    shape: StudentConfig,
    seed: int,
    folder: Path,
    work: Path,
) -> dict[str, Any]:
    """Prune to one shape, distil, write the drafter to `folder`; its acceptance on held-out text
    and on the target's own answers.
    """
    bench = students.bench(configured(chosen, shape, seed, work))
    student, notes = students.cut(bench)
    on_text = students.distil(f"{shape.name} {seed}", bench, student)
    on_answers = HeldOutAcceptance(
        student, bench.teacher, answers.of(seed), chosen.max_length, 1.0
    )()
    write_model(student, resolve(chosen.target), folder, torch.float32)
    return {
        "layers": notes["layers"],
        "acceptance": on_answers["acceptance"],
        "greedy_acceptance": on_answers["greedy_acceptance"],
        "acceptance_on_text": on_text["acceptance"],
    }


def decoding(chosen: Options) -> dict[str, Any]:
    """What the students are decoded with."""
    return {key: value for key, value in plain(chosen).items() if key in DECODING}


def measured(
    chosen: Options, drafters: dict[str, Path], execution: str, seed: int, work: Path
) -> dict[str, Any]:
    """Rows of all drafters in one interleaved run on one backend and execution."""
    backend, how = execution.split()
    how_decoded = hashlib.sha256(json.dumps(decoding(chosen)).encode()).hexdigest()[:8]
    folder = work / f"eval_{execution.replace(' ', '_')}_seed{seed}_{how_decoded}"
    target = TargetConfig(path=chosen.target, device=chosen.device, backend=backend, execution=how)
    eval.run.run(
        EvalConfig(
            job="eval.run",
            output_dir=str(folder),
            seed=seed,
            threads=chosen.threads,
            target=target,
            benchmark=BenchmarkConfig(path=chosen.prompts, too_long="skip"),
            drafters=[
                {"use": str(path), "name": name, "stopping": "fixed"}
                for name, path in drafters.items()
            ],
            temperatures=chosen.temperatures,
            sweep=chosen.sweep,
            max_prompts=chosen.max_prompts,
            max_new_tokens=chosen.max_new_tokens,
            repeats=chosen.repeats,
            require_lossless=False,  # the rows say it; an error would lose the others' figures
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
        "headline_prompts",
        "headline_speedup",
        "headline_speedup_low",
        "headline_speedup_high",
        "distinct_4",
        "overhead",
        "lossless",
        "baseline_tokens_per_second",
        "t_target_ms",
    )
    compared = (*drafters, CONTROL)
    rows = [
        row
        for row in read_rows(folder / "results.jsonl")
        if row.part == "main" and row.drafter in compared
    ]
    return {"rows": [{key: getattr(row, key) for key in keys} for row in rows]}


def main() -> None:
    chosen = options(Options)
    unknown = sorted({*chosen.executions} - {*EXECUTIONS})
    if unknown:
        sys.exit(f"error: executions has '{unknown[0]}', expected some of {', '.join(EXECUTIONS)}")
    sizes = equal_bytes(chosen)
    devices.CPU_COMPILER = "inductor"  # what is timed as compiled is compiled
    logging.getLogger("transformers").setLevel(logging.ERROR)
    kept = Kept(chosen.work, chosen, ("seeds", "executions", *DECODING))
    students, answers = Students(), Answers(chosen)
    shapes = {shape_of(text).name: shape_of(text) for text in chosen.shapes}
    for seed in chosen.seeds:
        drafters = {name: kept.folder / f"{name}_seed{seed}" for name in shapes}
        for name, shape in shapes.items():
            told = (chosen, students, answers, shape, seed, drafters[name], kept.folder)
            kept.figures({"shape": name, "seed": seed}, distilled, *told)
            save(chosen.name, chosen, figures(chosen, sizes, kept), show=False)
        for execution in chosen.executions:
            given = (chosen, drafters, execution, seed, kept.folder)
            part = {"execution": execution, "seed": seed, **decoding(chosen)}
            kept.figures(part, measured, *given)
            save(chosen.name, chosen, figures(chosen, sizes, kept), show=False)
    found = figures(chosen, sizes, kept)
    print(json.dumps({key: found[key] for key in ("acceptance", "over_first", "means")}, indent=1))


def figures(chosen: Options, sizes: dict[str, int], kept: Kept) -> dict[str, Any]:
    """Acceptance by shape and seed, every shape over the first (paired over seeds), and all
    measured speeds.
    """
    target = target_config(TargetConfig(path=chosen.target))
    shapes = {shape_of(text).name: shape_of(text) for text in chosen.shapes}
    acceptance: dict[str, dict[str, float]] = {name: {} for name in shapes}
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for part, found in kept.all():
        if "shape" in part:
            acceptance[part["shape"]][str(part["seed"])] = found["acceptance"]
        elif decoding(chosen).items() <= part.items():
            rows.setdefault(part["execution"], {})[str(part["seed"])] = found["rows"]
    first, *others = shapes
    return {
        "bytes_a_step": sizes,
        "parameters": {
            name: parameter_counts(student_config(shape, target))["all"]
            for name, shape in shapes.items()
        },
        "acceptance": acceptance,
        "over_first": {
            "acceptance": {name: paired(acceptance[name], acceptance[first]) for name in others},
            **{
                figure: {
                    execution: {name: over_first(figure, first, name, by_seed) for name in others}
                    for execution, by_seed in rows.items()
                }
                for figure in COMPARED
            },
        },
        "means": {execution: means([*by_seed.values()]) for execution, by_seed in rows.items()},
        "revisions": kept.revisions(),
        "rows": rows,
        "parts": [{**part, **found} for part, found in kept.all() if "shape" in part],
    }


def over_first(
    figure: str, first: str, name: str, by_seed: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """A shape's measured figure less the first one's, paired over seeds, by temperature."""

    def found(drafter: str, temperature: float) -> dict[str, float]:
        return {
            seed: row[figure]
            for seed, rows in by_seed.items()
            for row in rows
            if (row["drafter"], row["temperature"]) == (drafter, temperature)
            and row[figure] is not None
        }

    temperatures = sorted({row["temperature"] for rows in by_seed.values() for row in rows})
    return {f"T={t:g}": paired(found(name, t), found(first, t)) for t in temperatures}


def means(by_seed: list[list[dict[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """Means over seeds of what was measured of each drafter, by temperature; None of what no seed
    has.
    """
    every = [row for rows in by_seed for row in rows]
    found: dict[str, dict[str, float | None]] = {}
    for drafter, temperature in sorted({(row["drafter"], row["temperature"]) for row in every}):
        mine = [
            row for row in every if (row["drafter"], row["temperature"]) == (drafter, temperature)
        ]
        known = {
            name: [row[name] for row in mine if row[name] is not None]
            for name in (*COMPARED, "cost_ratio")
        }
        found[f"{drafter}, T={temperature:g}"] = {
            name: statistics.mean(values) if values else None for name, values in known.items()
        }
    return found


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")

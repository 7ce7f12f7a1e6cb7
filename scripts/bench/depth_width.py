"""Shallow and wide against deep and narrow drafters, at equal bytes per step and distillation.

    python scripts/bench/depth_width.py target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      chats=[CHATS.json] held_out_prompts=A.jsonl prompts=B.jsonl \\
      "shapes=['2:384:6:6:1024','4:288:4:4:832','6:224:4:4:704','12:192:3:3:384']"

The claim is that of "Decoding Speculative Decoding" (arXiv 2402.01528). Every shape is pruned from
the target by importance and distilled on the same rows for the same number of steps, once per seed.
All drafters then decode in one interleaved run for each backend and execution. Bytes are those of
the layers and the head, and may differ by 3 %. Speedups are given for prompts whose greedy text
does not loop (`headline_speedup`), and for all prompts. Compiled executions use inductor on a CPU
too, which needs a C++ compiler.

Parts such as `seeds=[0]` or `executions=["hf eager"]` (`executions=[]`: students alone) may run in
separate calls: with the same settings and `work`, the figures include all earlier parts.
"""

import functools
import hashlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from decoding import devices
from decoding.errors import UserError
from decoding.models.text.tokenizer import load_tokenizer
from distill.acceptance import HeldOutAcceptance
from distill.config import TrainConfig
from distill.shapes import student_config
from eval.config import BenchmarkConfig
from jobs.config import TargetConfig, plain
from jobs.drafters import CONTROL
from jobs.paths import resolve_model
from scripts.bench import common
from scripts.bench.part_journal import Difference, PartJournal, paired
from scripts.bench.students import StudentOptions, Students, prune_config
from scripts.usage import run_script
from training.config import DataConfig, HeldOutConfig, StudentConfig
from training.data.packing import Sample
from training.drafter_folder import write_model
from training.held_out.answers import target_answers
from training.models.build import target_config
from training.models.shapes import bytes_a_step, parameter_counts

TOLERANCE = 0.03  # largest difference of bytes per step
# options of decoding, which students do not depend on
DECODING = ("prompts", "max_prompts", "max_new_tokens", "temperatures", "sweep", "repeats")
EXECUTIONS = ("native eager", "native compiled", "hf eager", "hf compiled")
COMPARED = ("headline_speedup", "speedup", "tau", "t_draft_ms")


@dataclass
class Options(StudentOptions):
    held_out_prompts: str = "embedded:held_out_chats"  # prompts for acceptance after distillation
    # LAYERS:HIDDEN:HEADS:KV_HEADS:INTERMEDIATE of each student; the others are compared with the
    # first
    shapes: list[str] = field(default_factory=lambda: ["1:192:3:1:512", "2:128:2:1:448"])
    # backends and executions of target and drafters
    executions: list[str] = field(default_factory=lambda: [*EXECUTIONS])
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # 0 is greedy
    sweep: list[int] = field(default_factory=lambda: [1, 2, 3, 4])  # draft lengths
    repeats: int = 1  # runs of every generation, of which the fastest counts
    name: str = "depth_width"  # name of the results file


def parse_shape(text: str) -> StudentConfig:
    """Parse LAYERS:HIDDEN:HEADS:KV_HEADS:INTERMEDIATE. Raises UserError for another form."""
    parts = text.split(":")
    if len(parts) != 5 or not all(part.isdigit() for part in parts):
        raise UserError(
            f"shape '{text}' is not LAYERS:HIDDEN:HEADS:KV_HEADS:INTERMEDIATE. Expected "
            f"five whole numbers, such as 2:384:6:6:1024."
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


def check_equal_bytes(chosen: Options) -> dict[str, int]:
    """Return the bytes that a step of every shape reads.

    Raises UserError if two shapes differ by more than TOLERANCE, or have the same name.
    """
    target = target_config(TargetConfig(path=chosen.target))
    names = [parse_shape(text).name for text in chosen.shapes]
    if len({*names}) < len(names):
        raise UserError(
            f"shapes need different layers or hidden sizes, found {', '.join(names)}. Name each "
            f"combination once."
        )
    found = {
        text: bytes_a_step(student_config(parse_shape(text), target)) for text in chosen.shapes
    }
    most, least = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
    if found[most] > (1 + TOLERANCE) * found[least]:
        raise UserError(
            f"shape {most} reads {found[most] / 1e6:.2f} MB per step, {least} reads "
            f"{found[least] / 1e6:.2f} MB, but they may differ by {TOLERANCE:.0%}. Change one."
        )
    return found


def make_answers(chosen: Options) -> Callable[[int], list[Sample]]:
    """Return a function from a seed to the target's answers to the held-out prompts."""
    folder, tokens = resolve_model(chosen.target), min(96, chosen.max_length // 2)

    @functools.lru_cache(maxsize=1)
    def answers(seed: int) -> list[Sample]:
        config = TrainConfig(
            seed=seed,
            target=TargetConfig(path=chosen.target, device=chosen.device),
            data=DataConfig(max_length=chosen.max_length),
            held_out=HeldOutConfig(prompts=chosen.held_out_prompts, max_new_tokens=tokens),
        )
        return target_answers(folder, load_tokenizer(folder), config)

    return answers


def distil_student(
    chosen: Options,
    students: Students,
    answers: Callable[[int], list[Sample]],
    shape: StudentConfig,
    seed: int,
    folder: Path,
    work: Path,
) -> dict[str, Any]:
    """Prune to one shape, distil, write the drafter to `folder`, and measure its acceptance."""
    context = students.context(prune_config(chosen, shape, seed, work))
    student, notes = students.cut(context)
    on_text = students.distil(f"{shape.name} {seed}", context, student)
    teacher, length = context.teacher, chosen.max_length
    on_answers = HeldOutAcceptance(student, teacher, answers(seed), length, 1.0)()
    write_model(student, resolve_model(chosen.target), folder, torch.float32)
    return {
        "layers": notes["layers"],
        "acceptance": on_answers["acceptance"],
        "greedy_acceptance": on_answers["greedy_acceptance"],
        "acceptance_on_text": on_text["acceptance"],
    }


def decoding_options(chosen: Options) -> dict[str, Any]:
    """Return the options that affect decoding alone."""
    return {key: value for key, value in plain(chosen).items() if key in DECODING}


def measure_speeds(
    chosen: Options, drafters: dict[str, Path], execution: str, seed: int, work: Path
) -> dict[str, Any]:
    """Measure all drafters in one interleaved run. execution: one of EXECUTIONS."""
    backend, how = execution.split()
    text = json.dumps(decoding_options(chosen))
    settings = hashlib.sha256(text.encode()).hexdigest()[:8]
    rows = common.evaluate_drafters(
        work / f"eval_{execution.replace(' ', '_')}_seed{seed}_{settings}",
        seed=seed,
        threads=chosen.threads,
        target=TargetConfig(
            path=chosen.target, device=chosen.device, backend=backend, execution=how
        ),
        benchmark=BenchmarkConfig(path=chosen.prompts, too_long="skip"),
        drafters=[
            {"use": str(path), "name": name, "stopping": "fixed"} for name, path in drafters.items()
        ],
        temperatures=chosen.temperatures,
        sweep=chosen.sweep,
        max_prompts=chosen.max_prompts,
        max_new_tokens=chosen.max_new_tokens,
        repeats=chosen.repeats,
        require_lossless=False,  # the rows report it; an error would lose the other figures
    )
    return {"rows": common.row_figures([r for r in rows if r.drafter in (*drafters, CONTROL)])}


def main() -> None:
    """Distil every student and measure its speeds, and write the results after each part."""
    chosen = common.read_options(Options, executions=EXECUTIONS)
    sizes = check_equal_bytes(chosen)
    devices.CPU_COMPILER = "inductor"  # a compiled execution is compiled on a CPU too
    journal = PartJournal(chosen.work, chosen, ("seeds", "executions", *DECODING))
    students, answers, folder = Students(), make_answers(chosen), journal.folder
    shapes = list(map(parse_shape, chosen.shapes))

    def keep(part: dict[str, Any], measure: Any, *given: Any) -> None:
        journal.figures(part, measure, chosen, *given, folder)
        common.save(chosen.name, chosen, collect_figures(chosen, sizes, journal), show=False)

    for seed in chosen.seeds:
        drafters = {shape.name: folder / f"{shape.name}_seed{seed}" for shape in shapes}
        for shape in shapes:
            given = (students, answers, shape, seed, drafters[shape.name])
            keep({"shape": shape.name, "seed": seed}, distil_student, *given)
        for execution in chosen.executions:
            part = {"execution": execution, "seed": seed, **decoding_options(chosen)}
            keep(part, measure_speeds, drafters, execution, seed)
    found = collect_figures(chosen, sizes, journal)
    print(json.dumps({key: found[key] for key in ("acceptance", "over_first", "means")}, indent=1))


# seed -> rows of results
BySeed = dict[str, list[dict[str, Any]]]


def collect_figures(chosen: Options, sizes: dict[str, int], journal: PartJournal) -> dict[str, Any]:
    """Return acceptance, every shape's differences from the first one, and the speeds."""
    target = target_config(TargetConfig(path=chosen.target))
    shapes = {shape.name: shape for shape in map(parse_shape, chosen.shapes)}
    acceptance: dict[str, dict[str, float]] = {name: {} for name in shapes}
    rows: dict[str, BySeed] = {}  # by execution
    for part, found in journal.all():
        if "shape" in part:
            acceptance[part["shape"]][str(part["seed"])] = found["acceptance"]
        elif decoding_options(chosen).items() <= part.items():
            rows.setdefault(part["execution"], {})[str(part["seed"])] = found["rows"]
    first, *others = shapes
    over: dict[str, Any] = {
        figure: {
            execution: {name: differences_to_first(figure, first, name, by_seed) for name in others}
            for execution, by_seed in rows.items()
        }
        for figure in COMPARED
    }
    over["acceptance"] = {name: paired(acceptance[name], acceptance[first]) for name in others}
    counts = {n: parameter_counts(student_config(shape, target)) for n, shape in shapes.items()}
    return {
        "bytes_a_step": sizes,
        "parameters": {name: count["all"] for name, count in counts.items()},
        "acceptance": acceptance,
        "over_first": over,
        "means": {execution: mean_figures(by_seed) for execution, by_seed in rows.items()},
        "revisions": journal.revisions(),
        "rows": rows,
        "parts": [{**part, **found} for part, found in journal.all() if "shape" in part],
    }


def figure_by_condition(figure: str, by_seed: BySeed) -> dict[tuple[str, float], dict[str, float]]:
    """Return (drafter, temperature) -> seed -> the figure; seeds without it are left out."""
    found: dict[tuple[str, float], dict[str, float]] = {}
    for seed, rows in by_seed.items():
        for row in rows:
            values = found.setdefault((row["drafter"], row["temperature"]), {})
            if row[figure] is not None:
                values[seed] = row[figure]
    return found


def differences_to_first(
    figure: str, first: str, name: str, by_seed: BySeed
) -> dict[str, Difference]:
    """Return a shape's difference from the first one at each temperature, paired over seeds."""
    found = figure_by_condition(figure, by_seed)
    temperatures = sorted({temperature for _, temperature in found})
    return {
        f"T={t:g}": paired(found.get((name, t), {}), found.get((first, t), {}))
        for t in temperatures
    }


def mean_figures(by_seed: BySeed) -> dict[str, dict[str, float | None]]:
    """Return means over seeds by drafter and temperature; None where no seed has the figure."""
    found: dict[str, dict[str, float | None]] = {}
    for figure in (*COMPARED, "cost_ratio"):
        for (drafter, temperature), values in sorted(figure_by_condition(figure, by_seed).items()):
            mean = statistics.mean(values.values()) if values else None
            found.setdefault(f"{drafter}, T={temperature:g}", {})[figure] = mean
    return found


if __name__ == "__main__":
    run_script(main)

"""Shared parts of the benchmarks: options, sides in turn, timed training, results and tables."""

import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf

import eval.run
from decoding.costs.machine_limits import SLOW_YARDSTICK
from decoding.engine import Engine, encode
from decoding.errors import UserError
from decoding.models.text.tokenizer import load_tokenizer
from eval.config import EvalConfig
from eval.statistics.schema import Row, read_rows
from jobs.config import ParallelConfig, plain, typed
from jobs.files import write_text
from jobs.malloc import keep_memory
from jobs.paths import resolve, resolve_model
from jobs.run_folder import git_revision, hardware, versions
from scripts.bench.padded import SAME_LOSS, agree
from scripts.options import describe_options
from scripts.usage import show_usage
from training.config import LoopConfig
from training.data.packing import PackedData, Sample
from training.data.readers import Prompt, read_chats, read_prompts
from training.data.samples import Account, ChatRules, chat_samples
from training.loop import fit
from training.optimizer_config import OptimizerConfig
from training.parallel.strategy import Parallel

Schema = TypeVar("Schema")
RESULTS = Path(__file__).resolve().parent / "results"
# columns of a measured row that the results files keep
ROW_KEYS = tuple(
    "drafter temperature num_draft_tokens prompts alpha tau t_draft_ms cost_ratio speedup "
    "speedup_low speedup_high headline_prompts headline_speedup headline_speedup_low "
    "headline_speedup_high distinct_4 overhead lossless cpu_share baseline_tokens_per_second "
    "t_target_ms".split()
)


@dataclass
class BenchOptions:
    """Options of every benchmark."""

    threads: int = 2  # CPU threads
    device: str = "cpu"  # cpu | cuda | cuda:N


# ------------------------------------------------------------------------------------ command line
def read_options(schema: type[Schema], **choices: Collection[str]) -> Schema:
    """Read the command line's `key=value` pairs, and set the threads and malloc of all sides.

    `--help` prints the usage and exits, as does an error. choices: option -> its allowed values.
    """
    show_usage(describe_options(sys.modules[schema.__module__].__doc__, schema))
    keep_memory()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    given = OmegaConf.from_cli()
    assert isinstance(given, DictConfig)
    try:
        chosen = typed(OmegaConf.merge(OmegaConf.create(plain(schema())), given), schema)  # type: ignore[arg-type]
    except UserError as error:
        sys.exit(f"error: {error}")
    for key, allowed in choices.items():
        value = getattr(chosen, key)
        several = isinstance(value, list)
        for unknown in sorted({*value} - {*allowed} if several else {value} - {*allowed}):
            verb, some = ("has", "some") if several else ("is", "one")
            sys.exit(f"error: {key} {verb} '{unknown}', expected {some} of {', '.join(allowed)}")
    torch.set_num_threads(int(getattr(chosen, "threads")))  # noqa: B009
    return chosen


# ------------------------------------------------------------------------------------- measurement
def take_turns(
    sides: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Measure all sides in every round, in rotated order, so that drift affects them alike.

    Returns side -> one figure per round. warm_up: rounds that run first and do not count.
    """
    names = list(sides)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            value = sides[name]()
            if number >= 0:
                figures[name].append(value)
        print(f"  round {number + 1}/{rounds}", file=sys.stderr, flush=True)
    return figures


def medians(figures: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of every side."""
    return {name: statistics.median(values) for name, values in figures.items()}


def ratio(figures: Mapping[str, Sequence[float]], over: str, under: str) -> dict[str, float]:
    """Return the median, lowest and highest of the rounds' ratios of one side to another."""
    ratios = [a / b for a, b in zip(figures[over], figures[under], strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def measure_seconds(function: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def check_losses(ours: float, theirs: float) -> None:
    """Exit if two sides compute different losses on the same chats."""
    if not agree(ours, theirs):
        sys.exit(
            f"error: on the same chats one side's loss is {ours:.4f} and the other's {theirs:.4f}, "
            f"expected a relative difference of at most {SAME_LOSS}. Do not compare their speeds."
        )


class StepRecorder:
    """Tracker that records the figures of every training step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def rewind(self, step: int) -> None:
        self.steps.clear()

    def log(self, step: int, values: dict[str, Any]) -> None:
        if "tokens_per_second" in values:
            self.steps.append(values)

    def seconds(self) -> list[float]:
        """Return the seconds of every step."""
        tokens = [0, *(step["tokens"] for step in self.steps)]
        return [
            (after - before) / step["tokens_per_second"]
            for before, after, step in zip(tokens, tokens[1:], self.steps, strict=False)
        ]

    def rate(self, count: str = "tokens") -> float:
        """Return the tokens/s of all steps after the first. count: the figure that is counted."""
        counted = self.steps[-1][count] - self.steps[0][count]
        return float(counted / sum(self.seconds()[1:]))


def train_steps(
    title: str,
    objective: Any,
    trained: Any,
    data: PackedData,
    loop: LoopConfig,
    device: str,
    recorder: StepRecorder | None = None,
    evaluate: Callable[[], dict[str, float]] = lambda: {"score": 0.0},
) -> None:
    """Train in place with training/loop.py in a temporary run folder."""
    with tempfile.TemporaryDirectory() as folder:
        parallel = Parallel(ParallelConfig(), device)
        fit(title, objective, trained, data, loop, parallel, Path(folder), recorder, evaluate)


def loop_config(
    steps: int, tokens: int, dtype: str, optimizer: OptimizerConfig, **more: Any
) -> LoopConfig:
    """Return a loop without evaluations and checkpoints, one micro-batch of `tokens` per step.

    more: further fields of LoopConfig, which override these.
    """
    fixed = {"micro_batch_tokens": tokens, "eval_every": 0, "checkpoint_every": 0}
    given = {**fixed, **more}
    return LoopConfig(
        max_steps=steps, tokens_per_step=tokens, dtype=dtype, optimizer=optimizer, **given
    )


def fitting_prompts(
    engine: Engine, prompts: str | Sequence[Prompt], max_new_tokens: int
) -> list[tuple[Prompt, list[int]]]:
    """Return the prompts whose first turn and answer fit the context, each with the turn's ids.

    prompts: an evaluation file, or the prompts themselves.
    """
    found = read_prompts(resolve(prompts)) if isinstance(prompts, str) else prompts
    asked = [(one, encode(engine, [{"role": "user", "content": one.turns[0]}])) for one in found]
    most = engine.target.max_length - max_new_tokens
    return [(one, ids) for one, ids in asked if len(ids) < most]


def read_chat_samples(
    target: str, files: Sequence[str], max_length: int
) -> tuple[list[Sample], Account]:
    """Return the chats of ShareGPT files as samples with supervised answers, and their account."""
    chats, _ = read_chats([resolve(file) for file in files])
    tokenizer = load_tokenizer(resolve_model(target))
    samples, account = chat_samples(tokenizer, chats, ChatRules("auto", max_length, "answers"))
    print(account.line("chats"), file=sys.stderr)
    return list(samples), account


def evaluate_drafters(folder: Path, **fields: Any) -> list[Row]:
    """Run eval.run in `folder` with these fields of EvalConfig; return its main part's rows."""
    eval.run.run(EvalConfig(job="eval.run", output_dir=str(folder), **fields))
    return [row for row in read_rows(folder / "results.jsonl") if row.part == "main"]


def row_figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the columns of measured rows that the results files keep."""
    return [{key: getattr(row, key) for key in ROW_KEYS} for row in rows]


# ----------------------------------------------------------------------------------------- results
def goal(found: Any, met: bool) -> dict[str, Any]:
    """Return the record of a goal: the figure, and whether it meets the goal."""
    return {"found": found, "met": met}


def add_warnings(shares: Mapping[str, float]) -> dict[str, Any]:
    """Add a warning for every share above 1: its limit was measured on a busy machine."""
    warnings = [
        f"{name} is {share:.2f}: {SLOW_YARDSTICK}" for name, share in shares.items() if share > 1
    ]
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return {**shares, "warnings": warnings} if warnings else dict(shares)


def save(name: str, chosen: Any, figures: dict[str, Any], show: bool = True) -> None:
    """Write results/<name>.json with command and machine, and print the figures if `show`."""
    record = {
        "benchmark": name,
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "options": plain(chosen),
        "hardware": hardware(),
        "versions": versions(),
        "git_revision": git_revision(),
        "figures": figures,
    }
    # paths of this machine mean nothing elsewhere
    text = json.dumps(record, indent=1).replace(f"{RESULTS.parents[2]}/", "")
    data = os.environ.get("SHALLOW_DRAFT_DATA")
    write_result(f"{name}.json", text.replace(data, "$SHALLOW_DRAFT_DATA") if data else text)
    if show:
        print(json.dumps(figures, indent=1))


def save_text(name: str, text: str) -> None:
    """Write results/<name>.md and print it."""
    write_result(f"{name}.md", text)
    print(text)


def write_result(name: str, text: str) -> None:
    """Write a text and a final newline into a file of the results folder."""
    RESULTS.mkdir(exist_ok=True)
    write_text(RESULTS / name, text + "\n")


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table; numbers have three decimals, and None is an empty cell."""
    lines = [[*titles], ["---"] * len(titles), *[[_cell(value) for value in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def interval(value: float | None, low: float | None, high: float | None) -> str:
    """Format a value with its interval, `1.310 [1.200, 1.440]`, or alone if it has none."""
    if value is None:
        return ""
    known = low is not None and high is not None
    return f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if known else "")

"""Rows of results.jsonl and the facts from which they are made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from decoding.errors import UserError
from eval.measure.records import Condition
from eval.statistics.engine_row import EngineRow
from jobs.files import write_text
from jobs.run_files import WRONG, reason_of


@dataclass(frozen=True)
class DrafterFacts:
    """Facts about a drafter and its use that rows state."""

    name: str
    layers: int
    parameters: int
    one_pass: bool  # a proposal costs the same whatever its length
    stopping: str = "fixed"  # the policy that ends a draft early
    schedule: str = "serial"
    length_rule: str = "predicted"  # the rule that sets its draft length: see eval.measure.lengths
    verify: str | None = None  # its rule where temperature > 0; None: that of the run
    dtype: str = ""  # of its model; empty: it has none
    # cap on the lengths that its stopping rule sets (length_rule "cap"), else None
    length_cap: int | None = None
    draft_vocab_size: int = 0  # tokens that it can propose; 0: all
    # temperature at which the confidences were calibrated that end its drafts; None: it has none,
    # or the temperature is not known
    calibrated_at: float | None = None
    draft_shape: str = "chain"  # or "tree"
    # draft length -> maximum number of nodes of a tree; empty: it drafts chains
    tree_nodes: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PartTimes:
    """Medians of a round's parts, timed back to back in this process at the run's shapes."""

    t_draft_ms: float  # one draft step (one proposal for a one-pass drafter)
    t_target_ms: dict[int, float]  # n new tokens -> one target forward
    context: int  # committed tokens in the caches while timing
    # beams that a step starts from -> its time; empty: all steps take t_draft_ms
    t_draft_by_beams_ms: dict[int, float] = field(default_factory=dict)
    # share of the time in which the timing had its processors
    cpu_share: float = 1.0

    def at(self, beams: float) -> PartTimes:
        """Return the times for a (mean) number of beams, interpolated between those timed."""
        if not self.t_draft_by_beams_ms:
            return self
        timed = sorted(self.t_draft_by_beams_ms)
        step_ms = float(np.interp(beams, timed, [self.t_draft_by_beams_ms[n] for n in timed]))
        return replace(self, t_draft_ms=step_ms)


@dataclass(frozen=True)
class RunFacts:
    """Facts that all rows of a run share."""

    target: str
    target_layers: int
    target_parameters: int
    benchmark: str
    verify: str  # the rule where temperature > 0
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    allowed: str  # function that restricts the tokens; empty: any token
    max_new_tokens: int
    backend: str
    dtype: str
    device: str
    threads: int
    hardware: str
    seed: int
    bootstrap_resamples: int
    shards: int = 1
    shards_per_device: int = 1
    examples_hash: str = ""


@dataclass(frozen=True)
class Category:
    """Figures of a row on the prompts of one category."""

    category: str
    prompts: int
    alpha: float | None
    tau: float | None
    speedup: float
    speedup_low: float | None
    speedup_high: float | None

    @property
    def loses(self) -> bool:
        """Whether the 95 % interval of the speedup lies below 1."""
        return self.speedup_high is not None and self.speedup_high < 1


@dataclass(frozen=True)
class RoundBudget:
    """Bytes and operations that a batch's mean round needs, and shares of the machine's limits."""

    megabytes: float  # weights, and keys and values of the committed tokens
    megaflop: float  # a multiplication and an addition are two
    bandwidth_share: float | None  # of plain reading; None: not measured
    operations_share: float | None  # of a plain product; None: not measured


@dataclass(frozen=True)
class Row:
    """One line of results.jsonl. Times in ms, rates in tokens/s without prefill, ratios plain."""

    part: str  # main | sweep
    target: str
    target_layers: int
    target_parameters: int
    drafter: str
    drafter_layers: int
    drafter_parameters: int
    benchmark: str
    prompts: int
    tokens: int  # emitted by the drafter's runs
    rounds: int
    batch_size: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    allowed: str
    max_new_tokens: int
    # maximum of a round: a given or chosen length, or the cap of a rule that sets the lengths
    num_draft_tokens: int
    length_rule: str  # the rule that set it: see eval.measure.lengths
    schedule: str
    stopping: str
    verify: str  # the verification rule of the row
    lossless: str  # see eval.statistics.lossless
    lossless_detail: str
    alpha: float | None
    alpha_by_depth: list[float | None]
    tested_by_depth: list[int]
    accepted_by_depth: list[int]
    tau: float | None
    drafted: float  # tokens per round of one row
    t_draft_ms: float  # with beams: at the mean number of this row
    t_target_ms: dict[int, float]
    V: dict[int, float]
    cost_ratio: float
    draft_ms_per_round: float
    target_ms_per_round: float
    round_ms: float
    overhead: float
    # overlapped schedules: share of the shorter lane that the longer one hides; virtual clock: 1
    overlap: float | None
    baseline_round_ms: float
    prefill_ms: float  # mean of a batch, drafter's prefill included
    baseline_prefill_ms: float
    tokens_per_second: float
    baseline_tokens_per_second: float
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    speedup_with_prefill: float
    predicted_speedup: float | None  # None: no closed form for this schedule
    # overlapped schedules at batch size 1: the prediction of eval.statistics.pearl_trace
    replayed_speedup: float | None
    headline_prompts: int  # prompts that do not loop: distinct-4 of the target's text >= 0.5
    headline_alpha: float | None
    headline_tau: float | None
    headline_speedup: float | None
    headline_speedup_low: float | None
    headline_speedup_high: float | None
    distinct_4: float  # mean over prompts, of the baseline's text
    # share of wall time in which decoding had its processors (see decoding.costs.contention);
    # well below 1 on a CPU: other processes used the machine
    cpu_share: float
    slower_prompts: int  # units on which the drafter loses
    worst_prompt: str
    worst_speedup: float
    categories: list[Category]
    best_gamma: int  # by the formula, on the prompts of this row; it sets nothing
    best_gamma_speedup: float  # predicted there
    helps: bool
    verdict: str
    backend: str
    dtype: str
    device: str
    threads: int
    context: int
    seed: int
    hardware: str
    drafter_dtype: str = ""  # of its model; empty: it has none
    # verification rule of the run and its baseline; `verify` may be another rule, of the drafter
    run_verify: str = ""
    budget: RoundBudget | None = None  # None: the shape of a model is unknown
    baseline_budget: RoundBudget | None = None  # of an autoregressive step
    # limits of this machine for plain reading and a plain product; None: not measured
    reading_gigabytes_per_second: float | None = None
    product_gigaflop_per_second: float | None = None
    max_seconds: float = 0.0  # bound on the measurement; 0: none
    # seconds of measurement if the minimum of prompts took longer than max_seconds, else 0
    overrun_seconds: float = 0.0
    draft_vocab_size: int = 0  # tokens that the drafter can propose; 0: all
    prompts_asked: int = 0  # number that `prompts` would be without the bound; 0: no bound
    engine: str = "ours"
    unreliable: str = ""  # why predicted_speedup is unreliable, as a clause; empty: it is reliable
    # temperature at which the drafter's confidences were calibrated; None: none, or not known
    calibrated_at: float | None = None
    # probability of the tokens that both vocabularies share, under the target and the drafter, on
    # the target's text (see eval.measure.coverage); None: the drafter has the target's tokenizer
    shared_target_mass: float | None = None
    shared_drafter_mass: float | None = None
    # answers whose number or program was checked, and how many are right: with the drafter, and of
    # the target alone (see eval.tasks)
    answers_checked: int = 0
    answers_right: int = 0
    baseline_answers_right: int = 0
    draft_shape: str = "chain"  # of the drafter's proposals: chain | tree
    # milliseconds of a mean round by part, which sum up to it, of the drafter and of its baseline:
    # propose, forward, verify, rest; empty: not measured (overlapped schedules, GPUs)
    parts_ms: dict[str, float] = field(default_factory=dict)
    baseline_parts_ms: dict[str, float] = field(default_factory=dict)
    # processes that shared the prompts, and how many of them ran on one processor or GPU
    shards: int = 1
    shards_per_device: int = 1
    tree_nodes: int = 0  # maximum number of nodes of its tree; 0: a chain, or not recorded
    # hash of the worked examples before each prompt; empty: none, or not recorded
    examples_hash: str = ""

    @property
    def condition(self) -> Condition:
        """Condition that the row shares with its baseline."""
        return Condition(self.temperature, self.batch_size)

    @property
    def shared_verify(self) -> str:
        """Verification rule of the run, shared by all rows under one condition."""
        return self.run_verify or self.verify

    @property
    def condition_label(self) -> str:
        """Condition that the rows of one table share, such as `temperature 1, token verification`.

        Names the batch size if it is not 1.
        """
        rule = f"temperature {self.temperature:g}, {self.shared_verify} verification"
        batch = f", batch {self.batch_size}" if self.batch_size > 1 else ""
        return ("greedy" if self.temperature == 0 else rule) + batch


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the main part, or all rows if the run has no main part."""
    return [row for row in rows if row.part == "main"] or list(rows)


def flat(record: Row | EngineRow | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row or record that fit into a cell: strings, numbers and None."""
    fields = record if isinstance(record, Mapping) else vars(record)
    return {
        key: value for key, value in fields.items() if isinstance(value, str | int | float | None)
    }


def write_rows(path: Path, rows: Iterable[Row | EngineRow]) -> None:
    """Write results.jsonl, under a temporary name until it is complete."""
    write_text(path, "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows))


def read_all_rows(path: Path) -> tuple[list[Row], list[EngineRow]]:
    """Read results.jsonl: the rows of drafters in our loop, and those of engines.

    Raises UserError for rows of another version, damaged rows, and a file without rows.
    """
    content = path.read_bytes()
    rows: list[Row] = []
    of_engines: list[EngineRow] = []
    try:
        for values in map(json.loads, content.decode().splitlines()):
            if "method" in values:
                of_engines.append(EngineRow(**values))
            else:
                rows.append(_row(values))
    except WRONG as error:
        raise UserError(
            f"{path} does not hold rows of this version of eval.run ({reason_of(error, content)}). "
            f"Evaluate again, with another output_dir=."
        ) from error
    if not rows and not of_engines:
        raise UserError(f"{path} has no rows. Evaluate again, with another output_dir=.")
    return rows, of_engines


def read_rows(path: Path) -> list[Row]:
    """Read the rows of drafters in our loop.

    Raises UserError as `read_all_rows` does, and for a file with rows of other engines alone.
    """
    rows, of_engines = read_all_rows(path)
    if not rows:
        names = ", ".join(dict.fromkeys(row.engine for row in of_engines))
        raise UserError(
            f"{path} has only rows of {names}, expected rows of our own loop. Evaluate again with "
            f"engine=[ours,...] and another output_dir=."
        )
    return rows


def _row(values: dict[str, Any]) -> Row:
    if unknown := values.keys() - {one.name for one in dataclasses.fields(Row)}:
        raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")
    needed = {
        one.name
        for one in dataclasses.fields(Row)
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    }
    if missing := needed - values.keys():
        raise ValueError(f"a row lacks the fields {', '.join(sorted(missing))}")
    for key in ("t_target_ms", "V"):  # JSON has no integer keys
        values[key] = {int(n): value for n, value in values[key].items()}
    values["categories"] = [Category(**part) for part in values["categories"]]
    for key in ("budget", "baseline_budget"):
        values[key] = RoundBudget(**values[key]) if values.get(key) else None
    return Row(**values)

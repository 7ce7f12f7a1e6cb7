"""Raw records of batches that engines decoded, lines of engine_records.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval.engines.plan import EngineArm, Trial
from eval.measure.records import Condition


@dataclass(frozen=True)
class EngineRecord:
    """One turn of a batch decoded by one arm; lists have an entry for each prompt of the batch."""

    engine: str
    method: str
    drafter: str
    num_draft_tokens: int
    rule: str
    ignore_eos: bool
    temperature: float
    batch_size: int
    unit: int  # prompts decoded together share it; the bootstrap resamples units
    turn: int
    sample: int
    prompt_ids: list[str]
    outputs: list[list[int]]  # tokens
    seconds: float  # of the batch, prefill included; of several repeats the median
    first_token_seconds: list[float | None]
    # counts of the batch; None: not reported
    rounds: int | None
    drafted: int | None
    accepted: int | None
    tested_by_depth: list[int] | None
    accepted_by_depth: list[int] | None
    # index of the first token that differs from the target's own; None: equal, or not compared
    differs_at: list[int | None]
    gaps: list[float | None]  # there, the target's best score minus the second best

    @property
    def condition(self) -> Condition:
        return Condition(self.temperature, self.batch_size)

    @property
    def trial(self) -> Trial:
        arm = EngineArm(self.engine, self.method, self.drafter, self.num_draft_tokens)
        return Trial(arm, self.rule, self.ignore_eos)

    @property
    def generations(self) -> list[Compared]:
        """The generations of the batch, as `eval.statistics.lossless.judge` takes them."""
        rows = zip(self.prompt_ids, self.outputs, self.differs_at, self.gaps, strict=True)
        return [Compared(self.temperature, *row) for row in rows]


@dataclass(frozen=True)
class Compared:
    """One generation and its difference from the target's own."""

    temperature: float
    prompt_id: str
    tokens: list[int]
    differs_at: int | None
    gap: float | None


def record_from(values: dict[str, Any]) -> EngineRecord:
    """Return the record of a line; raise TypeError for other or missing fields."""
    return EngineRecord(**values)


def of_trial(
    records: Sequence[EngineRecord], condition: Condition, trial: Trial
) -> list[EngineRecord]:
    """Return the records of one trial under one condition."""
    return [r for r in records if r.condition == condition and r.trial == trial]

"""Rows of results.jsonl that were measured in engines."""

from __future__ import annotations

from dataclasses import dataclass

from eval.measure.records import Condition


@dataclass(frozen=True)
class EngineRow:
    """One line of results.jsonl of a drafter in an engine, or of the engine alone.

    Rates are in tokens/s with prefill, unlike those of a Row, as not every engine reports when its
    prefill ends. None: the engine does not report it.
    """

    engine: str  # ours: our own loop, interleaved with the engines, at a fixed draft length
    backend: str  # the engine and its version
    method: str  # autoregressive | draft_model | ngram, or of a head: medusa | eagle3 | dflash
    target: str
    target_layers: int
    target_parameters: int
    drafter: str
    drafter_layers: int
    drafter_parameters: int
    drafter_dtype: str
    benchmark: str
    prompts: int
    tokens: int
    batch_size: int
    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    num_draft_tokens: int
    schedule: str
    verify: str  # greedy; where temperature > 0 the engine's rule: token | point_mass
    lossless: str  # against our own autoregressive decoding
    lossless_detail: str
    rounds: int | None
    drafted: int | None
    accepted: int | None
    alpha: float | None
    alpha_by_depth: list[float | None] | None
    tested_by_depth: list[int] | None
    accepted_by_depth: list[int] | None
    tau: float | None
    tokens_per_second: float
    baseline_tokens_per_second: float  # of the same engine without a drafter
    speedup: float
    speedup_low: float | None
    speedup_high: float | None
    over_ours: float  # tokens/s over those of our own autoregressive decoding
    over_ours_low: float | None
    over_ours_high: float | None
    first_token_ms: float | None
    # whether the engine accepts as often as our loop: see eval.engines.agreement. Both decode to
    # max_new_tokens for it, past stop tokens.
    agreement: str
    agreement_detail: str
    checked_alpha_by_depth: list[float | None] | None  # of the engine, in this comparison
    ours_alpha_by_depth: list[float | None] | None
    dtype: str
    device: str
    threads: int
    seed: int
    hardware: str
    # parts of a round, which no other engine reports
    t_draft_ms: float | None = None
    t_target_ms: dict[int, float] | None = None
    V: dict[int, float] | None = None
    cost_ratio: float | None = None
    overhead: float | None = None
    predicted_speedup: float | None = None
    context: int | None = None

    @property
    def condition(self) -> Condition:
        """Condition that the row shares with its baselines."""
        return Condition(self.temperature, self.batch_size)

"""Equality of a drafter's outputs with the target's, by comparison or by proof.

Greedy decoding and coupled sampling give the same tokens with and without a drafter. Token
verification gives the same *distribution*, so single outputs differ and are not compared;
decoding's tests check its law. Floating point makes one exception: a forward over n tokens rounds
differently from n forwards over one, so the choice may flip where the two best tokens are (nearly)
tied. Such ties are counted separately from real differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decoding.interfaces import EXACT, rounds_coarsely
from decoding.rounds.ties import TIE_GAP
from decoding.sampling.rule_names import is_lossy

TOKENS_PER_TIE = 10_000  # more frequent ties are not accepted as rounding

EQUAL, TIES, BY_RULE, HALF, DIFFERS = "equal", "ties", "by rule", "half precision", "differs"
LOSSY = "lossy"  # a rule that changes the distribution
OTHER = "another model"  # a drafter that decodes alone


class Compared(Protocol):
    """A generation that was compared with the target's own, such as a Record."""

    @property
    def temperature(self) -> float: ...
    @property
    def prompt_id(self) -> str: ...
    @property
    def tokens(self) -> list[int]: ...
    @property
    def differs_at(self) -> int | None: ...
    @property
    def gap(self) -> float | None: ...


@dataclass(frozen=True)
class Equality:
    """Result of `judge`: one of the words defined above, and a sentence with the counts."""

    word: str
    detail: str


def is_compared(temperature: float, verify: str) -> bool:
    """Return whether outputs are compared: greedy and coupled ones are deterministic."""
    return temperature == 0 or verify == "coupled"


def judge(records: Sequence[Compared], *, verify: str, dtype: str, backend: str) -> Equality:
    """Judge whether a drafter's outputs under one condition equal the target's.

    records: at least one. verify: the rule at temperatures above 0. dtype: the target's precision.
    backend: as in `Target`, or an engine's name and version. Our fused step gives a token the same
    bits in any forward, so in bfloat16 equal outputs are no coincidence there, and any difference
    is a fault.
    """
    if is_lossy(verify) and records[0].temperature > 0:
        return Equality(LOSSY, f"verify={verify} does not keep the target's distribution")
    if not is_compared(records[0].temperature, verify):
        return Equality(
            BY_RULE,
            f"verify={verify} keeps the distribution; single outputs are random and not compared",
        )
    different = [record for record in records if record.differs_at is not None]
    gaps = [record.gap for record in different if record.gap is not None]
    tokens = sum(len(record.tokens) for record in records)
    some = f"{len(different)} of {len(records)} generations differ"
    if gaps:
        some += f"; gap between the two best tokens there: {min(gaps):.1e} to {max(gaps):.1e}"
    if rounds_coarsely(dtype, backend):
        found = some if different else f"no difference in {len(records)} generations"
        return Equality(HALF, f"{found}; {dtype} rounds too coarsely to promise equality")
    if not different:
        return Equality(
            EQUAL, f"all {len(records)} generations equal the target's own, token by token"
        )
    only_ties = dtype in EXACT and len(gaps) == len(different) and max(gaps) < TIE_GAP
    if only_ties and len(different) <= max(1, tokens // TOKENS_PER_TIE):
        return Equality(TIES, f"{some}, which is rounding: below {TIE_GAP:g} in {tokens} tokens")
    worst = different[0]
    return Equality(DIFFERS, f"{some}; first: prompt {worst.prompt_id!r}, token {worst.differs_at}")

"""When to stop drafting inside a round: one policy a request, asked after every drawn token. The
policies are in decoding/stopping/policies.py.

A token once drawn is kept and tested. Dropping it because of what the policy saw would bias the
output (Leviathan et al. 2023 need x ~ q given everything that earlier tests saw); stopping *after*
it does not. Policies remember their own request only, so a row's output hangs neither on its
neighbours nor on what was decoded before.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Sign:
    """What a drawn token's distribution tells: the token's own probability, and the entropy in nats
    where a policy reads it.
    """

    confidence: float
    entropy: float = math.nan


# Of a token that was looked up: no distribution stands behind it.
UNKNOWN = Sign(confidence=0.5, entropy=math.log(2))


def cut(drafted: list[int], policy: "Stopping") -> list[int]:
    """The beginning of a looked-up continuation that a policy keeps."""
    for depth in range(1, len(drafted)):
        if not policy.more(depth, UNKNOWN):
            return drafted[:depth]
    if drafted:
        policy.more(len(drafted), UNKNOWN)  # it counts the last token too
    return drafted


@dataclass(frozen=True)
class RoundCosts:
    """Measured milliseconds of a round's parts, as `cost_ratio` weighs them."""

    # of a step, with what is done for each step beside the model (draws, a tree's nodes); of beams,
    # of the widest
    t_draft_ms: float
    # of n = 1, 2, ... new tokens; further ones on the line through the last two
    t_target_ms: tuple[float, ...]
    overhead_ms: float = 0.0  # the rest of a round that drafts
    plain_overhead_ms: float | None = None  # the rest of one that does not; None: the same
    # Of the batch that was timed. One row's draft makes the round of all its rows dear, so rows of
    # a batch decide before the round, by what they have seen, and are of one mind, instead of each
    # by what it draws.
    rows: int = 1
    # (beams that a step starts from, its milliseconds), narrowest first; steps between two widths
    # lie on the line through them. Empty: all alike.
    t_draft_by_beams_ms: tuple[tuple[int, float], ...] = ()
    # that a search has, of which the rest was measured; None: as many as these costs say, or all
    # are alike
    beams: int | None = None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "RoundCosts":
        """From `dataclasses.asdict` by way of JSON."""
        by_beams = tuple((beams, ms) for beams, ms in entry.get("t_draft_by_beams_ms", ()))
        return cls(
            **{**entry, "t_target_ms": tuple(entry["t_target_ms"]), "t_draft_by_beams_ms": by_beams}
        )

    @property
    def plain_ms(self) -> float:
        """A round that does not draft."""
        return self.target_ms(1) + (
            self.overhead_ms if self.plain_overhead_ms is None else self.plain_overhead_ms
        )

    def step_ms(self, beams: float) -> float:
        """A draft step that starts from so many beams."""
        known = self.t_draft_by_beams_ms
        if not known:
            return self.t_draft_ms
        # In Python: it is asked several times a round, and numpy takes longer over one number than
        # over a thousand.
        for (fewer, less_ms), (more, more_ms) in pairwise(known):
            if beams < more:
                return less_ms + (more_ms - less_ms) * max(beams - fewer, 0) / (more - fewer)
        return known[-1][1]

    def steps_ms(self, steps: int, beams: int | None = None) -> float:
        """So many draft steps: the first starts from the tip alone, the others from so many beams
        (None: from the most).
        """
        return self.step_ms(1) + (steps - 1) * (
            self.t_draft_ms if beams is None else self.step_ms(beams)
        )

    def dearer(self, ms: float) -> "RoundCosts":
        """With so much more a draft step."""
        by_beams = tuple((beams, step_ms + ms) for beams, step_ms in self.t_draft_by_beams_ms)
        return replace(self, t_draft_ms=self.t_draft_ms + ms, t_draft_by_beams_ms=by_beams)

    def round_ms(self, steps: int, nodes: int) -> float:
        """A round of so many draft steps that has so many nodes verified."""
        return self.drafted_ms(self.steps_ms(steps), nodes) if steps else self.plain_ms

    def drafted_ms(self, draft_ms: float, nodes: int) -> float:
        """A round whose draft took so long, and that has so many nodes verified."""
        return draft_ms + self.target_ms(nodes + 1) + self.overhead_ms

    def target_ms(self, n: int) -> float:
        """t_target(n)."""
        known = self.t_target_ms
        if n <= len(known):
            return known[n - 1]
        slope = known[-1] - known[-2] if len(known) > 1 else 0.0
        return known[-1] + max(slope, 0.0) * (n - len(known))


class Tries:
    """When a row that gave up drafting tries again: of a batch at rounds to which all its rows come
    together, though none asks another.
    """

    EVERY = 16  # rounds

    def __init__(self, costs: RoundCosts) -> None:
        self._every = self.EVERY if costs.rows > 1 else 1
        self._round, self._idle = -1, False

    def __call__(self, pays: bool) -> bool:
        """Whether the row drafts in the round that begins. pays: what it expects."""
        self._round += 1
        self._idle = not pays or (self._idle and self._round % self._every != 0)
        return not self._idle


class Stopping(Protocol):
    """A policy that ends the drafting of its row before the budget is spent."""

    # Policies that read are *eager* on a GPU: each drafted token waits for the device. "nothing",
    # "confidence" or "entropy": what `more` looks at; anything but nothing waits for the device
    reads: str

    def limit(self, budget: int) -> int:
        """The most tokens to draft in the round that begins, at most `budget`."""
        ...

    def more(self, depth: int, sign: Sign | None) -> bool:
        """After `depth` drawn tokens, the last with this sign: draft another?"""
        ...

    def update(self, drafted: int, accepted: int) -> None:
        """Learn from a verified round."""
        ...


class Fixed:
    """Draft exactly the budget."""

    reads = "nothing"

    def limit(self, budget: int) -> int:
        return budget

    def more(self, depth: int, sign: Sign | None) -> bool:
        return True

    def update(self, drafted: int, accepted: int) -> None:
        """Nothing to learn."""

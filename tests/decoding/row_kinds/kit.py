"""What the rows of the laws consist of, and what several kinds of drafters share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decoding.interfaces import Drafter, RoundCosts, Target
from heads.eagle.model import EagleHead
from recurrent_drafting.head import RecurrentHead
from tests.support.tiny_targets import TableTarget


@dataclass(frozen=True)
class Kit:
    """The models, heads and texts from which a row builds its drafter."""

    target: Target
    twin: Target  # the same model with a separate cache
    draft_model: Target  # the target with noise in its weights
    answers: Sequence[Sequence[int]]  # the target's continuations
    head: RecurrentHead | None = None  # None: a row that needs one makes a random head
    texts: Sequence[Sequence[int]] = ()  # the target's texts, to which other heads are fitted
    eagle: EagleHead | None = None  # None: fitted to the texts, or a random head without texts


@dataclass(frozen=True)
class DrafterRow:
    """A drafter, its verification rules, and its variants for the laws."""

    name: str
    make: Callable[[Kit], Drafter]
    rules: tuple[str, ...]
    perfect: Callable[[Kit], Drafter] | None = None  # builds a drafter with q = p
    # rules that never reject the perfect drafter; None: all of `rules`
    perfect_rules: tuple[str, ...] | None = None
    # builds a drafter that is never accepted; None: `make` does so from an adversarial kit
    adversarial: Callable[[Kit], Drafter] | None = None
    table: Callable[[], Drafter] | None = None  # builds a drafter for the 5-symbol target
    gamma: int | None = None  # minimum draft length that uses all parts of the drafter
    late: int = 0  # rounds before the first one with a draft
    slow: bool = False  # a variant of another row, which the laws test only in the long suite


def draft_table() -> TableTarget:
    """Return a draft model for the 5-symbol target, with logits unrelated to the target's."""
    return TableTarget(torch.randn(5, 5, 5, generator=torch.Generator().manual_seed(7)) * 1.5)


# Costs for the rows that decide from them. A step from one beam costs as much as a token of a
# chain, and each further beam costs about as much as it gains.
COSTS = RoundCosts(0.2, (1.0, 1.05, 1.1, 1.15, 1.2), t_draft_by_frontier_ms=((1, 0.2), (6, 0.45)))

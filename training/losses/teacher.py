"""The teacher's distribution p in the rows of a chunk, and its computation from hidden states.

`TeacherRows` is all that a loss reads of the teacher (training/losses/soft.py), so any function
from rows [start, end) to `TeacherRows` can be a teacher.

If the drafter proposes from a shortlist of the vocabulary, p holds its true probabilities there,
which sum to less than 1. Several rows may share one distribution (all heads that predict a token
do), which is computed once.

Shapes: C rows of a chunk, G teacher width, N rows, P positions of the teacher, T target vocabulary,
V vocabulary that the drafter proposes.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from training.losses.chunked import widen


class TeacherRows(NamedTuple):
    """The teacher's distribution p in the rows of a chunk; probabilities may be 0."""

    p_CV: Tensor
    mass_C: Tensor  # sum p: 1 over a full vocabulary
    negentropy_C: Tensor  # sum p log p

    def select(self, index_C: Tensor) -> "TeacherRows":
        """Return the distributions of these rows."""
        return TeacherRows(*(part.index_select(0, index_C) for part in self))


class Teacher:
    """The teacher's distribution, computed on demand from its hidden states."""

    def __init__(
        self,
        hidden_PG: Tensor,
        weight_TG: Tensor,
        temperature: float = 1.0,
        shortlist_V: Tensor | None = None,
    ) -> None:
        """Store the teacher's hidden states and output weights.

        temperature: divides the teacher's logits. shortlist_V: the rising ids that the drafter
        proposes; None: the full vocabulary.
        """
        self.hidden_PG, self.weight_TG = hidden_PG, weight_TG
        self.temperature, self.shortlist_V = temperature, shortlist_V

    def at(self, start: int, end: int) -> TeacherRows:
        """Return the distributions at positions [start, end)."""
        logits_CT = widen(F.linear(self.hidden_PG[start:end], self.weight_TG))
        if self.temperature != 1:
            logits_CT.div_(self.temperature)
        log_p_CV = F.log_softmax(logits_CT, dim=-1)
        del logits_CT  # its memory is free for p
        if self.shortlist_V is not None:
            log_p_CV = log_p_CV.index_select(1, self.shortlist_V)
        p_CV = log_p_CV.exp()
        return TeacherRows(p_CV, p_CV.sum(dim=-1), log_p_CV.mul_(p_CV).sum(dim=-1))

    def shared(self, targets_N: Tensor, places: np.ndarray) -> Callable[[int, int], TeacherRows]:
        """Return a function from rows [start, end) to the distributions at their positions.

        targets_N: the position of each row. places: the same on the host. All positions between the
        first and the last of a chunk are computed, so rows of a chunk should have close positions.
        """

        def rows(start: int, end: int) -> TeacherRows:
            first, last = int(places[start:end].min()), int(places[start:end].max())
            return self.at(first, last + 1).select(targets_N[start:end] - first)

        return rows

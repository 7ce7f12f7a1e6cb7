"""Rejection at a node whose children were sampled from few candidates, in host numbers.

A rejected child changes p and q at the candidates and, together, at all other tokens: the *tail*,
which counts as one more symbol. A child sampled from the tail is tested twice
(decoding/drafters/trees/sampled_children.py proves that this is exact). The residual is not
normalised.

Shapes: K candidates, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class TailRejection:
    """The residual of p and q at one node, updated by each rejected child."""

    # the candidates, and the token sampled from the tail if q has a tail
    ids: list[int]
    # p of the candidates, then of the tail
    p: list[float]
    # unnormalised q of the next child, at the candidates, then the tail (0 if there is none)
    q: list[float]
    # p / q of the token sampled from the tail, both as shares of their tails
    within_tail: float
    rejected: bool = False
    # the tail was accepted but its sampled token was not, so another token of the tail follows
    rejected_in_tail: bool = False

    def acceptance_probability(self, token: int) -> float:
        """Return this token's acceptance probability, given that earlier siblings were rejected."""
        # The second copy of a token was not sampled, and the first was rejected before.
        place = self.ids.index(token)
        return self._ratio_at(place) * (min(self.within_tail, 1.0) if self._is_tail(place) else 1.0)

    def reject(self, token: int, uniform: float) -> bool:
        """Record that this uniform rejected the token; return whether more is left to test."""
        place = self.ids.index(token)
        if self._is_tail(place) and uniform < self._ratio_at(place):
            self.rejected_in_tail = True
            return False
        total, shares = sum(self.p), sum(self.q)
        if shares > 0:
            self.p = [max(p - total * q / shares, 0.0) for p, q in zip(self.p, self.q, strict=True)]
        self.q[place] = 0.0
        self.rejected = True
        return True

    def _is_tail(self, place: int) -> bool:
        return place == len(self.p) - 1

    def _ratio_at(self, place: int) -> float:
        """Return min(1, p / q) of the candidate or tail at this place; 0 without p or q."""
        total, q = sum(self.p), self.q[place]
        return min((self.p[place] / total) / (q / sum(self.q)), 1.0) if total > 0 and q > 0 else 0.0


def tail_ratio(p: float, p_of_tail: float, q: float, q_of_tail: float) -> float:
    """Return (p / p_of_tail) / (q / q_of_tail) of a token of the tail, 0 if p or q is 0."""
    # the products of two probabilities may underflow
    return (p / p_of_tail) / (q / q_of_tail) if q > 0 and p_of_tail > 0 else 0.0


def verify_children(
    children: list[int],
    tokens: list[int],
    p_V: Tensor,
    ids_K: Tensor,
    q_K: Tensor,
    tail_V: Tensor | None,
    uniform: Callable[[int], float],
) -> tuple[int | None, Tensor]:
    """Return the first accepted child, and the weights (V,) of the next token if there is none.

    Whole-vocabulary work is done once when the walk reaches the node and once where it ends. ids_K,
    q_K, tail_V: the values of `TopRows.at`. uniform: maps a child to the number that tests it.
    """
    candidates_K = ids_K if tail_V is None else ids_K[:-1]
    others_V = p_V.index_fill(0, candidates_K, 0.0)
    others, candidate_p = others_V.sum().item(), p_V[ids_K].tolist()
    q = [max(share, 0.0) for share in q_K.tolist()]
    within_tail = 0.0
    if tail_V is None:
        q.append(0.0)
    else:
        within_tail = tail_ratio(
            candidate_p.pop(), others, tail_V[ids_K[-1]].item(), tail_V.sum().item()
        )
    rejection = TailRejection(ids_K.tolist(), [*candidate_p, others], q, within_tail)
    for child in children:
        number = uniform(child)
        if number < rejection.acceptance_probability(tokens[child]):
            return child, p_V
        if not rejection.reject(tokens[child], number):
            break
    if rejection.rejected_in_tail and tail_V is not None:
        surplus_V = (others_V / others - tail_V / tail_V.sum()).clamp_(min=0)
        # p = q up to rounding leaves nothing
        return None, surplus_V if surplus_V.sum() > 0 else others_V
    if not rejection.rejected or sum(rejection.p) <= 0:
        return None, p_V
    weights_V = others_V * (rejection.p[-1] / others if others > 0 else 0.0)
    left_K = torch.tensor(rejection.p[:-1], dtype=weights_V.dtype)
    return None, weights_V.index_copy_(0, candidates_K, left_K)

"""A node whose children were drawn from few candidates, in host numbers: what each failed child
leaves of p and of q.

Failures change p at the candidates and, all together, at the tokens that are none: the *tail*, one
more symbol. Where a child was drawn from the tail it is tested twice (why that is exact stands in
decoding/drafters/trees/sampled_children.py). What is left is not normalised.

Shapes: K candidates, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class TailRejection:
    """A node where a walk stands, and its tests in their order."""

    ids: list[int]  # the candidates', and that of the token drawn from the tail, if q has one
    p: list[float]  # of the candidates, and of the tail
    q: list[float]  # that the next child is drawn from, in proportion; of the tail 0 if it has none
    # what p has of the tail's drawn token over what q has of it, both as shares of their tails
    within_tail: float
    rejected: bool = False
    # the tail passed, and its drawn token did not: another token of the tail follows
    rejected_in_tail: bool = False

    def acceptance_probability(self, token: int) -> float:
        """Of a child with this token to pass, given that those before it have failed."""
        # A token that is there twice was not drawn the second time, and has failed before.
        place = self.ids.index(token)
        return self._ratio_at(place) * (min(self.within_tail, 1.0) if self._is_tail(place) else 1.0)

    def reject(self, token: int, uniform: float) -> bool:
        """The child did not pass by this uniform. Whether there is anything left to test."""
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
        """min(1, p / q) of a symbol."""
        total, q = sum(self.p), self.q[place]
        return min((self.p[place] / total) / (q / sum(self.q)), 1.0) if total > 0 and q > 0 else 0.0


def tail_ratio(p: float, p_of_tail: float, q: float, q_of_tail: float) -> float:
    """(p / p_of_tail) / (q / q_of_tail), of a token of the tail; 0 where one of the two has none of
    it.
    """
    # products of the two may underflow
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
    """The first child that passes, and weights (V,) of the token that follows if none does: what is
    done for every token is done once where a walk comes by, and once where it ends. ids_K, q_K,
    tail_V: a row of `TopRows`; uniform: of a child's test.
    """
    candidates_K = ids_K if tail_V is None else ids_K[:-1]
    others_V = p_V.index_fill(0, candidates_K, 0.0)
    others, own, q = (
        others_V.sum().item(),
        p_V[ids_K].tolist(),
        [max(share, 0.0) for share in q_K.tolist()],
    )
    within_tail = 0.0
    if tail_V is None:
        q.append(0.0)
    else:
        within_tail = tail_ratio(own.pop(), others, tail_V[ids_K[-1]].item(), tail_V.sum().item())
    rejection = TailRejection(ids_K.tolist(), [*own, others], q, within_tail)
    for child in children:
        number = uniform(child)
        if number < rejection.acceptance_probability(tokens[child]):
            return child, p_V
        if not rejection.reject(tokens[child], number):
            break
    if rejection.rejected_in_tail and tail_V is not None:
        surplus_V = (others_V / others - tail_V / tail_V.sum()).clamp_(min=0)
        # nothing is left where p = q up to rounding
        return None, surplus_V if surplus_V.sum() > 0 else others_V
    if not rejection.rejected or sum(rejection.p) <= 0:
        return None, p_V
    weights_V = others_V * (rejection.p[-1] / others if others > 0 else 0.0)
    return None, weights_V.index_copy_(
        0, candidates_K, torch.tensor(rejection.p[:-1], dtype=weights_V.dtype)
    )

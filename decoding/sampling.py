"""From logits to the probabilities that are sampled: temperature -> top-k -> top-p -> min-p -> softmax.

Row functions: each row of the last dimension is warped on its own. Ties are broken by token id (the lower one stays), so
equal logits give equal choices on every device. A warper that is off costs nothing.

Shapes: R rows (any leading dimensions), V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.errors import UserError

NUCLEUS_GUESS = 128  # sorting this many is enough for most rows; a fuller sort follows where it is not


@dataclass(frozen=True)
class Warper:
    """Sampling settings. temperature 0 means greedy, top_k 0, top_p 1 and min_p 0 mean off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature is {self.temperature}, expected 0 (greedy) or more.")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}, expected 0 (off) or more.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, expected more than 0 and at most 1 (off).")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}, expected 0 (off) to 1.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def probs(self, logits_RV: Tensor) -> Tensor:
        """Warped probabilities, (R, V), float32 or the float64 of the logits. Not for temperature 0."""
        if logits_RV.dtype != torch.float64:
            logits_RV = logits_RV.float()
        if self.temperature != 1:
            logits_RV = logits_RV / self.temperature
        if 0 < self.top_k < logits_RV.shape[-1]:
            logits_RV = logits_RV.masked_fill(~top_k_mask(logits_RV, self.top_k), float("-inf"))
        probs_RV = logits_RV.softmax(-1)
        if self.top_p < 1:
            probs_RV = _renormalised(probs_RV * top_p_mask(probs_RV, self.top_p))
        if self.min_p > 0:
            probs_RV = _renormalised(probs_RV * (probs_RV >= self.min_p * probs_RV.amax(-1, keepdim=True)))
        return probs_RV


def _renormalised(probs_RV: Tensor) -> Tensor:
    return probs_RV / probs_RV.sum(-1, keepdim=True)


def keep_best(scores_RV: Tensor, threshold_R1: Tensor, count_R1: Tensor) -> Tensor:
    """Mask of the `count` best scores, given the smallest of them; of ties at that threshold the lowest ids stay."""
    above = scores_RV > threshold_R1
    tied = scores_RV == threshold_R1
    room_R1 = count_R1 - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room_R1))


def top_k_mask(logits_RV: Tensor, k: int) -> Tensor:
    """The k highest logits of each row."""
    threshold_R1 = logits_RV.topk(k, dim=-1).values[..., -1:]
    return keep_best(logits_RV, threshold_R1, torch.full_like(threshold_R1, k))


def top_p_mask(probs_RV: Tensor, p: float) -> Tensor:
    """The smallest set of likeliest tokens whose probabilities reach p (Holtzman et al. 2019): at least one token."""
    V = probs_RV.shape[-1]
    width = min(V, NUCLEUS_GUESS)
    best_RK = probs_RV.topk(width, dim=-1).values
    reached_RK = best_RK.cumsum(-1)
    if width < V and bool((reached_RK[..., -1] < p).any()):
        best_RK = probs_RV.sort(dim=-1, descending=True).values
        reached_RK = best_RK.cumsum(-1)
    count_R1 = (reached_RK < p).sum(-1, keepdim=True).add_(1).clamp_(max=best_RK.shape[-1])
    return keep_best(probs_RV, best_RK.gather(-1, count_R1 - 1), count_R1)


def draw(weights_RV: Tensor, uniforms_R: list[float]) -> Tensor:
    """One token a row, (R,), from weights that need not sum to one, by inverting the cumulative sum.

    uniforms_R: numbers in [2^-53, 1 - 2^-53]. In float64 their product with the total stays below the total, so the
    first sum above it belongs to a token of positive weight.
    """
    cumulative_RV = weights_RV.cumsum(-1, dtype=torch.float64)
    points_R1 = torch.tensor(uniforms_R, dtype=torch.float64, device=weights_RV.device)[:, None] * cumulative_RV[:, -1:]
    return torch.searchsorted(cumulative_RV, points_R1, right=True).squeeze(-1)

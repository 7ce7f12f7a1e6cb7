"""From logits to sampling probabilities: temperature -> top-k -> top-p -> min-p -> softmax.

Row functions: each row of the last dimension is warped separately. Ties are broken by token id (the
lower one stays), so equal logits give equal choices on every device. A warper that is off costs
nothing.

Shapes: R rows (any leading dimensions), V vocabulary, K most likely tokens, P nodes, M samples.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.values import check_values

# independent samples for each distinct child of a node, since repeated tokens are skipped
SAMPLES_PER_CHILD = 16
# sizes of partial sorts, tried in turn before a full sort (40x the cost of 128)
PARTIAL_SORT_SIZES = (128, 1024)


@dataclass(frozen=True)
class Warper:
    """Sampling settings. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        check_values(vars(self))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether any warper removes tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def is_shared(self) -> bool:
        """Whether all rows of a batch have these settings, here always."""
        return True

    def probs(self, logits_RV: Tensor) -> Tensor:
        """Return the warped probabilities (R, V), float32 or the logits' float64.

        The temperature must not be 0.
        """
        if not self.truncates:
            return self._tempered(logits_RV).softmax(-1)
        probs_RK, ids_RK = self.survivors(logits_RV)
        dense_RV = torch.zeros(logits_RV.shape, dtype=probs_RK.dtype, device=probs_RK.device)
        return dense_RV.scatter_(-1, ids_RK, probs_RK)

    def survivors(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Return warped probabilities and ids (R, K) of the tokens that remain, likeliest first.

        Shorter rows are padded with 0. The survivors are a prefix of the row sorted by probability,
        then by lower id. A partial sort finds the prefix unless it is long or ends between equal
        logits, whose order a partial sort leaves undefined.
        """
        logits_RV = self._tempered(logits_RV)
        V = logits_RV.shape[-1]
        for guess in PARTIAL_SORT_SIZES:
            guess = max(guess, self.top_k + 1)
            # On a GPU a full sort costs less than waiting for the result of a partial one.
            if guess < V and not devices.runs_ahead(logits_RV.device):
                found = self._survivors_among(logits_RV, *logits_RV.topk(guess, dim=-1))
                if found is not None:
                    return found
        found = self._survivors_among(
            logits_RV, *logits_RV.sort(dim=-1, descending=True, stable=True)
        )
        assert found is not None, "a full stable sort decides every row"
        return found

    def of_likeliest(self, logits_RK: Tensor) -> Tensor:
        """Return unnormalised warped probabilities of each row's K highest logits, highest first.

        All other tokens are ignored. Drafts need not match the target's warpers exactly, so this
        takes a few operations of fixed shape: the token that brings the sum to top_p keeps only its
        share below top_p, and min_p subtracts its threshold from all tokens.
        """
        kept_RK = self._tempered(logits_RK)[..., : self.top_k or None]
        probs_RK = F.pad(kept_RK.softmax(-1), (0, logits_RK.shape[-1] - kept_RK.shape[-1]))
        if self.top_p < 1:
            sums_RK = probs_RK.cumsum(-1).clamp_(max=self.top_p)
            probs_RK = sums_RK - F.pad(sums_RK[..., :-1], (1, 0))
        if self.min_p > 0:
            probs_RK = torch.sub(probs_RK, probs_RK[..., :1], alpha=self.min_p).clamp_(min=0)
        return probs_RK

    def _tempered(self, logits_RV: Tensor) -> Tensor:
        if self.temperature == 1:
            return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
        if logits_RV.dtype in (torch.float32, torch.float64):
            return logits_RV / self.temperature
        # makes 16-bit logits float32 in the same operation
        return logits_RV / _single(self.temperature, logits_RV.device)

    def _survivors_among(
        self, logits_RV: Tensor, sorted_RK: Tensor, ids_RK: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return `survivors` from the K highest logits, or None if K < V is too few to decide."""
        K, partial = sorted_RK.shape[-1], sorted_RK.shape[-1] < logits_RV.shape[-1]
        if 0 < self.top_k < K:
            counts_R1 = torch.full_like(ids_RK[..., :1], self.top_k)
            probs_RK = sorted_RK[..., : self.top_k].softmax(-1)
        else:
            counts_R1 = torch.full_like(ids_RK[..., :1], K)
            probs_RK = (sorted_RK - logits_RV.logsumexp(-1, keepdim=True)).exp_()
        if self.top_p < 1:
            reached_R1 = (probs_RK.cumsum(-1) < self.top_p).sum(-1, keepdim=True) + 1
            counts_R1 = torch.minimum(counts_R1, reached_R1)
        if self.min_p > 0:
            above_R1 = (probs_RK >= self.min_p * probs_RK[..., :1]).sum(-1, keepdim=True)
            counts_R1 = torch.minimum(counts_R1, above_R1)
        # asynchronous devices: padding with zeros costs less than reading the longest row
        ahead = devices.runs_ahead(ids_RK.device)
        longest = probs_RK.shape[-1] if ahead else int(counts_R1.max())
        if partial and longest >= K:
            return None
        if partial:
            last_R1, next_R1 = (sorted_RK.gather(-1, counts_R1 - back) for back in (1, 0))
            if (last_R1 == next_R1).any():
                return None
        probs_RK = probs_RK[..., :longest]
        if counts_R1.numel() > 1 or ahead:
            probs_RK = probs_RK * (torch.arange(longest, device=ids_RK.device) < counts_R1)
        return probs_RK / probs_RK.sum(-1, keepdim=True), ids_RK[..., :longest]


@lru_cache
def _single(value: float, device: torch.device) -> Tensor:
    """Return a float32 tensor of one element, which promotes the dtype unlike a Python number."""
    with torch.inference_mode(False):
        return torch.full((1,), value, dtype=torch.float32, device=device)


def draw(weights_RV: Tensor, uniforms_R: Any) -> Tensor:
    """Sample one token per row (R,) from unnormalised weights by inverting the cumulative sum.

    uniforms_R: host numbers in [2^-53, 1 - 2^-53]. In float64 their product with the total stays
    below the total, so the first sum above it belongs to a token of positive weight.
    """
    uniforms = devices.tensor(uniforms_R, weights_RV.device, torch.float64)
    return draw_at(weights_RV, uniforms[:, None])


def draw_at(weights_RV: Tensor, uniforms_R1: Tensor) -> Tensor:
    """Sample like `draw`, with float64 uniforms on the device."""
    return draw_from(weights_RV.cumsum(-1, dtype=torch.float64), uniforms_R1)


def draw_from(cumulative_RV: Tensor, uniforms_R1: Tensor) -> Tensor:
    """Sample like `draw_at` from cumulative sums; return V for a row without weight."""
    points_R1 = uniforms_R1 * cumulative_RV[..., -1:]
    return torch.searchsorted(cumulative_RV, points_R1, right=True).squeeze(-1)


def residual_or_p(residual_RV: Tensor, p_RV: Tensor) -> Tensor:
    """Return the residual, or p in rows whose residual is zero.

    p = q up to rounding there, so the rejection had probability zero, and p itself is right.
    """
    return torch.where(residual_RV.sum(-1, keepdim=True) > 0, residual_RV, p_RV)


def draw_different(probs_BPV: Tensor, uniforms_BPM: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` distinct tokens of M independent samples at each of P nodes.

    Returns tokens and probabilities (B, P, count). The tokens are sampled without replacement, in
    this order: the first sample that differs from all earlier ones follows q without them, however
    many samples it took. If the M samples contain fewer distinct tokens, the last places hold
    repeated tokens with probability 0, which count as not sampled. Whether a place is filled does
    not change the distribution of its token.
    """
    ends_BPV = probs_BPV.cumsum(-1, dtype=torch.float64)
    tokens_BPM = torch.searchsorted(ends_BPV, uniforms_BPM * ends_BPV[..., -1:], right=True)
    tokens_BPM.clamp_(max=probs_BPV.shape[-1] - 1)  # NaN samples past the end
    M = tokens_BPM.shape[-1]
    again_BPM = (tokens_BPM[..., None] == tokens_BPM[..., None, :]).tril_(-1).any(-1)
    places_M = torch.arange(M, device=again_BPM.device)
    order_BPK = (again_BPM * M + places_M).topk(count, largest=False).indices
    tokens_BPK = tokens_BPM.gather(-1, order_BPK)
    repeats_BPK = again_BPM.gather(-1, order_BPK)
    return tokens_BPK, probs_BPV.gather(-1, tokens_BPK).masked_fill_(repeats_BPK, 0.0)

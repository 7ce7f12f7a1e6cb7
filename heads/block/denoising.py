"""Denoising of blocks: a draft in several passes, each of which fills slots for the next ones.

A masked diffusion model drafts (SpecDiff, Christopher et al. 2024, arXiv 2408.05636). The first
pass predicts all slots from masks. Before each further pass the slots with the surest predictions
are filled with their likeliest tokens, and the pass predicts the others. A slot's distribution is
that of the last pass in which it was masked.

The filled tokens are always the likeliest, whatever tokens are drafted in the end. So all
distributions depend on the text alone, and not on sampled tokens, in whatever order slots are
filled: tokens sampled from them are tested by p / q, and likeliest ones as point masses.

Shapes: M blocks, K drafted tokens, H hidden size, V drafted vocabulary, X any dimensions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from decoding import devices
from decoding.errors import UserError
from decoding.values import is_int
from heads.block.shape import BlockConfig
from training.heads.masks import MASKED

# maps the tokens of filled slots, MASKED in the others (None: all are), to states (M, K, H)
Run = Callable[[Tensor | None], Tensor]
# maps states (M, K, H) to the ids (M, K) of the likeliest tokens, and their log probabilities
Fill = Callable[[Tensor], tuple[Tensor, Tensor]]


def denoise(steps: int, run: Run, fill: Fill) -> Tensor:
    """Return the states (M, K, H) that predict each slot, after `steps` passes."""
    hidden_MKH = run(None)
    K = hidden_MKH.shape[1]
    filled_MK = torch.full(hidden_MKH.shape[:2], MASKED, device=hidden_MKH.device)
    for step in range(1, steps):
        tokens_MK, chances_MK = fill(hidden_MKH)
        # slots that are filled already come first
        chances_MK = chances_MK.masked_fill(filled_MK != MASKED, torch.inf)
        ranks_MK = chances_MK.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        filled_MK = torch.where(
            (filled_MK == MASKED) & (ranks_MK < K * step // steps), tokens_MK, filled_MK
        )
        masked_MK1 = (filled_MK == MASKED)[:, :, None]
        hidden_MKH = torch.where(masked_MK1, run(filled_MK), hidden_MKH)
    return hidden_MKH


def find_surest(logits_XV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index (X) of each largest logit, and its log probability."""
    best_X = devices.argmax(logits_XV)
    largest_X = logits_XV.gather(-1, best_X[..., None]).squeeze(-1)
    return best_X, largest_X - logits_XV.logsumexp(-1)


def choose_steps(name: str, config: BlockConfig, given: int | None) -> int:
    """Return the number of passes of a draft: the given one, else the head's.

    Raises UserError for a number that a head of this shape does not allow. name: the drafter's.
    """
    trained, most = config.denoising_steps, config.num_drafts
    if given is None:
        return trained or 1
    if not trained and given != 1:
        raise UserError(
            f"drafter '{name}': denoising_steps is {given}, but its head was trained on masks "
            f"alone; expected 1. Train one with head=specdiff to draft in several passes."
        )
    if not is_int(given) or not 1 <= given <= most:
        raise UserError(
            f"drafter '{name}': denoising_steps is {given!r}, expected 1 to {most}, the number of "
            f"tokens of its blocks."
        )
    return given

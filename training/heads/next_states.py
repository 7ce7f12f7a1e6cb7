"""What heads learn that predict the target's next states: these states, from states with noise.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077) adds to the loss of tokens the smooth L1 distance of each
predicted state from the target's. A draft reads predicted states, which are not quite the target's,
so in training the states have uniform noise. Its width is published as 0.2 x 512 / L for a text of
L tokens: short texts have much of it.

Shapes: N predictions, H hidden size, P positions, C channels, R rows, T tokens of a row, F = R T.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.sampling import noise
from training.data.packing import PackedBatch
from training.losses.chunked import widen

_LENGTH = 512  # tokens of a text whose noise has the width that is set
_PURPOSE = 5  # part of the keys, which differs from that of on-policy rows


def smooth_l1_rows(found_NH: Tensor, wanted_NH: Tensor) -> Tensor:
    """Return each row's mean of the smooth L1 distance over channels.

    It is d^2 / 2 for a difference d below 1, and d - 1/2 for others.
    """
    found_NH, wanted_NH = widen(found_NH), widen(wanted_NH)
    return F.smooth_l1_loss(found_NH, wanted_NH, reduction="none").mean(dim=-1)


def state_noise(
    batch: PackedBatch, kept_P: Tensor, like_PC: Tensor, width: float, key: tuple[int, ...]
) -> Tensor:
    """Return uniform noise [P, C] for the states at kept_P, in the dtype of like_PC.

    It depends on the key, on the samples of each row, and on the position, but not on the rows of
    the batch, so ranks and resumed runs have the same. width: between the extremes of the noise in
    a text of 512 tokens.
    """
    rows, length = batch.ids_RT.shape
    parts = []
    for row in batch.rows:
        generator = torch.Generator(like_PC.device)
        generator.manual_seed(noise.key(*key, _PURPOSE, *row))
        shape = (length, like_PC.shape[1])
        parts.append(torch.rand(shape, generator=generator, device=like_PC.device))
    uniform_FC = torch.cat(parts)
    (lengths_F,) = devices.copy_arrays_to_device((_text_lengths(batch),), like_PC.device)
    scale_P1 = width * _LENGTH / lengths_F[kept_P, None].clamp_min(1)
    return ((uniform_FC[kept_P] - 0.5) * scale_P1).to(like_PC.dtype)


def _text_lengths(batch: PackedBatch) -> np.ndarray:
    """Return the number of tokens of each place's document [F], of any number outside documents."""
    documents_RT = batch.host.documents_RT
    return np.concatenate([np.bincount(row_T)[row_T] for row_T in documents_RT])

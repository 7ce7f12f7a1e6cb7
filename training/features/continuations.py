"""Greedy continuations by the target at every position of a text, as labels for distillation.

Cheng et al. 2024 (arXiv 2403.09919) let the target continue each text greedily from every position
of the answers, and train the head on the resulting tokens instead of the text's. In training the
head then reads and predicts the same kind of text as in drafting: the first token after h is the
target's choice. The published code does not do this.

All positions of a row continue together, one token per forward. Each attends to the text up to its
position and to its continuation.

Shapes: C channels of all layers that are read, H hidden size, K tokens of a continuation, M
positions.
"""

from typing import Any

import torch
from torch import Tensor

from training.data.packing import PackedBatch
from training.features.cached_text import CachedText
from training.features.taps import Layers
from training.losses.heads import chunked_argmax


@torch.no_grad()
def continue_greedily(
    target: Any, row: PackedBatch, places_M: Tensor, count: int, layers: Layers
) -> tuple[Tensor, Tensor]:
    """Return the target's states [M, C] at positions of a row, and its greedy continuations [M, K].

    target: a Hugging Face causal LM built with packed attention. row: a batch of one row. count: K.
    layers: the layers whose states are returned.
    """
    text, lm_head_VH = CachedText(target, row, layers), target.get_output_embeddings().weight
    tokens = [chunked_argmax(text.final_TH[places_M], lm_head_VH)]
    positions_1M, bias_11ML = row.positions_RT[:, places_M], text.bias_11TT[:, :, places_M]
    alone_11MM = torch.full_like(bias_11ML[..., :1], float("-inf")).repeat(1, 1, 1, len(places_M))
    alone_11MM.diagonal(dim1=-2, dim2=-1).zero_()  # each attends only to its continuation
    for ahead in range(1, count):
        bias_11ML = torch.cat((bias_11ML, alone_11MM), dim=-1)
        read_MH = text.read(tokens[-1][None], positions_1M + ahead, bias_11ML)[0]
        tokens.append(chunked_argmax(read_MH, lm_head_VH))
    return text.states_TC[places_M], torch.stack(tokens, dim=1)

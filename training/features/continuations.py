"""Greedy continuations by the target at every position of a text, as labels for distillation.

Cheng et al. 2024 (arXiv 2403.09919) let the target continue each text greedily from every position
of the answers, and train the head on the resulting tokens instead of the text's. In training the
head then reads and predicts the same kind of text as in drafting: the first token after h is the
target's choice. The published code does not do this.

All positions of a row continue together, one token per forward. Each attends to the text up to its
position and to its continuation.

Shapes: C channels of all layers that are read, H hidden size, K tokens of a continuation, M
positions, T tokens of the row.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from training.data.packing import PackedBatch
from training.features.taps import Layers, read_layers
from training.losses.heads import chunked_argmax
from training.models.attention import document_mask


@torch.no_grad()
def continue_greedily(
    target: Any, row: PackedBatch, places_M: Tensor, count: int, layers: Layers
) -> tuple[Tensor, Tensor]:
    """Return the target's states [M, C] at positions of a row, and its greedy continuations [M, K].

    target: a Hugging Face causal LM built with packed attention. row: a batch of one row. count: K.
    layers: the layers whose states are returned.
    """
    cache, lm_head_VH = DynamicCache(), target.get_output_embeddings().weight

    def read(ids_1N: Tensor, positions_1N: Tensor, bias_11NL: Tensor) -> Tensor:
        given = {
            "position_ids": positions_1N,
            "attention_bias": bias_11NL,
            "past_key_values": cache,
            "use_cache": True,
        }
        states_1NH: Tensor = target.model(ids_1N, **given).last_hidden_state
        return states_1NH

    bias_11TT = document_mask(row.documents_RT, target.dtype)
    last = target.config.num_hidden_layers
    final = () if last in layers else (last,)
    states_1TC = read_layers(
        target, layers + final, lambda: read(row.ids_RT, row.positions_RT, bias_11TT)
    )
    states_MC, H = states_1TC[0][places_M], lm_head_VH.shape[1]
    first = (layers + final).index(last) * H
    tokens = [chunked_argmax(states_MC[:, first : first + H], lm_head_VH)]
    positions_1M, bias_11ML = row.positions_RT[:, places_M], bias_11TT[:, :, places_M]
    alone_11MM = torch.full_like(bias_11ML[..., :1], float("-inf")).repeat(1, 1, 1, len(places_M))
    alone_11MM.diagonal(dim1=-2, dim2=-1).zero_()  # each attends only to its continuation
    for ahead in range(1, count):
        bias_11ML = torch.cat((bias_11ML, alone_11MM), dim=-1)
        read_MH = read(tokens[-1][None], positions_1M + ahead, bias_11ML)[0]
        tokens.append(chunked_argmax(read_MH, lm_head_VH))
    return states_MC[:, : len(layers) * H], torch.stack(tokens, dim=1)

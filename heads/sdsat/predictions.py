"""Predictions of SDSAT's slots in training (training/heads/predicting.py), without Hydra imports.

Training runs the forward with which the target drafts, for many drafts of a row at once: the tip
and its slots attend to the text before the tip, to themselves and to earlier rows of their draft.
The text's keys and values follow from its hidden states, which are read once. Gradients reach the
slots through the target's frozen layers, each of which runs once, as ranks may share its weights.

Shapes: R rows, T tokens of a row, A drafts of a row, S rows of a draft, N = A S, M drafts, P
positions, K drafted tokens, C hidden size, Q query heads, H key/value heads, D head size.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.models.native.attention import grouped_attention
from decoding.models.native.linear import rms_norm
from decoding.models.native.weights import Layer, NativeConfig
from heads.drafts_in_rows import DraftsInRows, slot_mask
from heads.layers import Rope, rope_at, rope_tables
from heads.sdsat.model import SdsatHead
from training.data.packing import PackedBatch
from training.features.states import TargetStates
from training.heads.positions import Positions
from training.heads.predicting import (
    Choose,
    DraftStarts,
    PredictingHead,
    choose_likeliest,
    spread,
)
from training.parallel.fsdp import run_part


class SdsatPredictions(PredictingHead):
    """Predictions of slots in training."""

    label, reads_context, target_depths, runs_target = "slot", True, 1, True

    def outputs(self, head: SdsatHead, states: TargetStates) -> tuple[Tensor]:
        """Return the target's lm_head."""
        return (states.lm_head,)

    def features(
        self,
        head: SdsatHead,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        """Return the inputs (N, C) of the lm_head."""
        tips_M = where.kept_P[where.drafts_M] + 1
        text_RTC, depths = spread(batch, where.kept_P, states_PC), len(where.counts_K)
        found_MKC = predict(head, states, batch, text_RTC, tips_M, where.tokens_MK[:, 0], depths)
        return found_MKC[where.draft_N, where.head_N]

    def draft(
        self,
        head: SdsatHead,
        states: TargetStates,
        tips: DraftStarts,
        count: int,
        choose: Choose = choose_likeliest,
    ) -> Tensor:
        """Return the chain after each tip, given the text: see `PredictingHead.draft`."""
        text = tips.context
        assert text is not None, "slots attend to the text"
        found_MKC = predict(
            head, states, text.batch, text.spread(), text.tips_M, tips.tokens_M, count
        )
        chosen = [choose(found_MKC[:, k], states.lm_head, k) for k in range(count)]
        return torch.stack(chosen, dim=1)


def predict(
    head: SdsatHead,
    states: TargetStates,
    batch: PackedBatch,
    text_RTC: Tensor,
    tips_M: Tensor,
    tokens_M: Tensor,
    count: int,
) -> Tensor:
    """Return the states (M, K, C) after the target's final norm at each tip and its slots.

    text_RTC: the target's states of the text that enter its layers after the first. tips_M: the
    tips' places in the flattened batch. tokens_M: the tips' ids. count: K.
    """
    model = states.target.model
    config = NativeConfig.from_dict(states.target.config.to_dict())
    longest = batch.ids_RT.shape[1] + count
    tables = rope_tables(config.rope, config.head_dim, config.max_positions, longest, head.slots)
    inputs = (states.embed(batch.ids_RT), *text_RTC.split(config.hidden_size, -1))
    text_rope, is_slot = rope_at(tables, batch.positions_RT), partial(_is_slot, count)
    shared = config.num_heads // config.num_kv_heads
    drafts = DraftsInRows(batch, tips_M, tokens_M)
    chunks: list[_Chunk] = []
    rows: list[Tensor] = []  # of each chunk, (R, N, C)
    for tips_Ra, positions_RaK, visible_RaT in drafts.chunks(count):
        mask = slot_mask(visible_RaT, count, causal=True, shared=shared)
        chunks.append(_Chunk(rope_at(tables, positions_RaK.flatten(1)), mask))
        rows.append(_inputs(head, states.embed(tips_Ra), count).flatten(1, 2))

    def run(index: int, layer: Any, *rows: Tensor) -> list[Tensor]:
        native = native_layer(layer, config)
        with torch.no_grad():
            text = native.project(config, inputs[index], *text_rope)[1:]
        changed = head.change(native, index, is_slot)
        pairs = zip(rows, chunks, strict=True)
        return [_run(changed, config, x_RNC, text, chunk) for x_RNC, chunk in pairs]

    for index, layer in enumerate(model.layers):
        rows = run_part(layer, partial(run, index), *rows)
    found_MKC = drafts.join([x_RNC.unflatten(1, (-1, count)) for x_RNC in rows])
    normed_MKC = run_part(model.norm, partial(_norm, config.norm_eps), found_MKC)
    assert isinstance(normed_MKC, Tensor)
    return normed_MKC


class _Chunk(NamedTuple):
    """Places of the rows of some drafts, and what they see."""

    rope: Rope
    mask: Tensor  # see `slot_mask`


def _norm(norm_eps: float, norm: Any, x_MKC: Tensor) -> Tensor:
    return rms_norm(x_MKC, norm.weight, norm_eps)


def _is_slot(count: int, x_RNI: Tensor) -> Tensor:
    """Return which rows (N,) of drafts of `count` tokens are slots: all but each draft's first."""
    return torch.arange(x_RNI.shape[1], device=x_RNI.device) % count > 0


def _inputs(head: SdsatHead, tips_RaC: Tensor, count: int) -> Tensor:
    """Return the embeddings (R, a, K, C) of tips and of the first slots."""
    slots_SC = head.slots[: count - 1]
    slots_RaSC = slots_SC.expand(*tips_RaC.shape[:2], *slots_SC.shape)
    return torch.cat((tips_RaC[:, :, None], slots_RaSC), 2)


def _run(
    layer: Layer,
    config: NativeConfig,
    x_RNC: Tensor,
    text: tuple[Tensor, Tensor],
    chunk: _Chunk,
) -> Tensor:
    """Return the output (R, N, C) of a layer at the rows of drafts.

    text: the keys and values (R, T, H, D) of the text.
    """
    queries, *own = layer.project(config, x_RNC, *chunk.rope)
    keys, values = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(text, own, strict=True))
    # PyTorch's own, as the native backend's attention in parts has no gradient
    mixed_RNQD = grouped_attention(
        queries, keys, values, chunk.mask, F.scaled_dot_product_attention
    )
    x_RNC = x_RNC + layer.out(mixed_RNQD.flatten(2))
    return x_RNC + layer.feed_forward(config, x_RNC)


def native_layer(layer: Any, config: NativeConfig) -> Layer:
    """Return a Hugging Face decoder layer in the native backend's form, with the same weights."""
    attention, mlp, head_norms = layer.self_attn, layer.mlp, None
    if config.family == "qwen3":
        queries = attention.q_norm.weight.expand(config.num_heads, -1)
        keys = attention.k_norm.weight.expand(config.num_kv_heads, -1)
        head_norms = torch.cat((queries, keys))
    return Layer(
        layer.input_layernorm.weight,
        Joined(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms,
        attention.o_proj,
        layer.post_attention_layernorm.weight,
        Joined(mlp.gate_proj, mlp.up_proj),
        mlp.down_proj,
    )


class Joined:
    """Linear layers of one input, whose outputs are concatenated."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __call__(self, x_NI: Tensor) -> Tensor:
        return torch.cat([part(x_NI) for part in self.parts], -1)

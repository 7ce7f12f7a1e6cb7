"""The backbone of block drafters: one pass over a block of masks gives a state for every depth.

The target's states of the text at some layers are joined and mapped to one context vector c for
each token, or to one for each token and layer (heads/block/fusion.py). A block begins with the
embedding of the tip and continues with that of a mask token, at the positions after the text. In
each decoder layer the block attends to keys and values of c, and to those of the block itself. The
layers' keys and values of c are the only thing that depends on the text, so a drafter stores them
and never computes them again (DFlash, arXiv 2602.06036).

With the layout `fill_in` slot j predicts the token at its own position, and slot 0, the tip, none.
With `anchor_first` every slot predicts the token after it, as a language model does. Inside a block
attention is `bidirectional` or `causal`. Embedding and output layer are the target's, which the
head does not hold.

Shapes: B rows of text, T tokens of a text, A blocks of a row, S slots of a block, K drafted tokens,
N = A S, H hidden size, Q query heads, G key/value heads, D head size, X channels of all taps.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoding.models.native.attention import grouped_attention
from decoding.models.native.rope import rotate
from heads.base import RestrictedHead
from heads.block.confidence import Confidence
from heads.block.convolution import BlockConvolution, run_between
from heads.block.corrections import Correction, make_correction
from heads.block.fusion import make_fc, make_fusion
from heads.block.shape import CAUSAL, PER_LAYER, BlockConfig
from heads.drafts_in_rows import slot_mask
from heads.layers import FeedForward, Rope, rope_tables
from training.heads.masks import MASKED

KeysValues = tuple[Tensor, Tensor]  # of one layer, (B, G, T, D) each
JoinLayer = Callable[[KeysValues], KeysValues]  # puts those of a block after those of its context
Join = Callable[[int, KeysValues], KeysValues]  # the same, in the layer of this number


class BlockAttention(nn.Module):
    """Attention of a block to the context and to itself, with normed query and key heads."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.head_dim = D
        self.q_proj = nn.Linear(H, config.num_heads * D, bias=False)
        self.k_proj = nn.Linear(H, config.num_kv_heads * D, bias=False)
        self.v_proj = nn.Linear(H, config.num_kv_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_heads * D, H, bias=False)
        self.q_norm = nn.RMSNorm(D, config.norm_eps)
        self.k_norm = nn.RMSNorm(D, config.norm_eps)
        self.projects_context = config.fusion == PER_LAYER  # by weights of its own
        if self.projects_context:
            self.k_proj_target = nn.Linear(H, config.num_kv_heads * D, bias=False)
            self.v_proj_target = nn.Linear(H, config.num_kv_heads * D, bias=False)

    def keys_values(self, x_BNH: Tensor, rope: Rope, of_context: bool = False) -> KeysValues:
        """Return the keys, rotated by position, and the values: of a block or of its context."""
        project_k, project_v = self.k_proj, self.v_proj
        if of_context and self.projects_context:
            project_k, project_v = self.k_proj_target, self.v_proj_target
        keys_BNGD = self.k_norm(project_k(x_BNH).unflatten(-1, (-1, self.head_dim)))
        values_BNGD = project_v(x_BNH).unflatten(-1, (-1, self.head_dim))
        return rotate(keys_BNGD, *rope).transpose(1, 2), values_BNGD.transpose(1, 2)

    def forward(self, y_BNH: Tensor, join: JoinLayer, mask: Tensor, rope: Rope) -> Tensor:
        """Return the attention's output (B, N, H).

        mask: bool, (B, 1, Q / G * N, T + N): the context's tokens and the slots that a slot sees.
        """
        queries_BNQD = self.q_norm(self.q_proj(y_BNH).unflatten(-1, (-1, self.head_dim)))
        queries_BNQD = rotate(queries_BNQD, *rope)
        keys, values = join(self.keys_values(y_BNH, rope))
        found_BNQD = grouped_attention(
            queries_BNQD, keys, values, mask, F.scaled_dot_product_attention
        )
        output = self.o_proj(found_BNQD.flatten(2))
        assert isinstance(output, Tensor)
        return output


class BlockLayer(nn.Module):
    """A decoder layer over blocks. The context's keys and values come from c without a norm."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)
        self.attention_conv = BlockConvolution(config) if config.conv_taps else None
        self.mlp_conv = BlockConvolution(config) if config.conv_taps else None

    def forward(self, x_BNH: Tensor, join: JoinLayer, mask: Tensor, rope: Rope) -> Tensor:
        attend = partial(self.self_attn, join=join, mask=mask, rope=rope)
        x_BNH = x_BNH + run_between(self.attention_conv, attend, self.input_layernorm(x_BNH))
        y_BNH = self.post_attention_layernorm(x_BNH)
        return x_BNH + run_between(self.mlp_conv, self.mlp, y_BNH)


class BlockHead(RestrictedHead):
    """A block drafter of a target: the backbone, and a correction of its logits if it has one."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        H = config.hidden_size
        self.fc, self.fusion = make_fc(config), make_fusion(config)
        self.hidden_norm = nn.RMSNorm(H, config.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(H, config.norm_eps)
        self.correction: Correction | None = make_correction(config)
        self.confidence = Confidence(config) if config.confidence else None
        self.register_vocabulary(config.draft_vocab_size)

    @property
    def _layers(self) -> list[BlockLayer]:
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def rope_tables(self, length: int) -> Rope:
        """Return cos and sin (T, 1, D) of the positions from 0, in the head's dtype and device."""
        return rope_tables(self.config.rope, self.config.head_dim, 0, length, self.norm.weight)

    def context(self, taps_BTX: Tensor, rope: Rope) -> list[KeysValues]:
        """Return the keys and values of a text for each layer."""
        layers = self._layers
        joined_LBTH = taps_BTX.new_zeros(()) if self.fc is None else self.fc(taps_BTX)[None]
        if self.fusion is not None:
            joined_LBTH = joined_LBTH + self.fusion(taps_BTX)
        contexts = self.hidden_norm(joined_LBTH).expand(len(layers), -1, -1, -1)
        return [
            layer.self_attn.keys_values(context_BTH, rope, of_context=True)
            for layer, context_BTH in zip(layers, contexts, strict=True)
        ]

    def block_ids(self, tips_M: Tensor, filled_MK: Tensor | None = None) -> Tensor:
        """Return the tokens (M, S) of blocks, whose embeddings a block reads.

        tips_M: the tips. filled_MK: the tokens of the slots after the tip, MASKED in those with the
        mask token, as which all further slots count; None: all slots have it.
        """
        shape = (len(tips_M), self.config.block_size - 1)
        slots_MS = torch.full(shape, self.config.mask_token_id, device=tips_M.device)
        if filled_MK is not None:
            filled_MK = filled_MK.where(filled_MK != MASKED, self.config.mask_token_id)
            slots_MS = torch.cat((filled_MK, slots_MS[:, filled_MK.shape[1] :]), 1)
        return torch.cat((tips_M[:, None], slots_MS), 1)

    def forward(
        self,
        blocks_BASH: Tensor,
        rope: Rope,
        join: Join,
        visible_BAT: Tensor,
    ) -> Tensor:
        """Return the inputs of the output layer for every drafted token, (B, A, K, H).

        rope: at the N slots of each row. visible_BAT: bool, the context's tokens that a block sees.
        """
        A, S = blocks_BASH.shape[1:3]
        shared = self.config.num_heads // self.config.num_kv_heads
        mask = slot_mask(visible_BAT, S, self.config.in_block_mask == CAUSAL, shared)
        x_BNH = blocks_BASH.flatten(1, 2)
        for number, layer in enumerate(self._layers):
            x_BNH = layer(x_BNH, partial(join, number), mask, rope)
        states_BASH = self.norm(x_BNH).unflatten(1, (A, S))
        found = states_BASH[:, :, S - self.config.num_drafts :]
        assert isinstance(found, Tensor)
        return found


def after(context: Sequence[KeysValues]) -> Join:
    """Return the `Join` that concatenates a block with these keys and values of each layer."""

    def join(layer: int, block: KeysValues) -> KeysValues:
        (keys, values), (block_keys, block_values) = context[layer], block
        return torch.cat((keys, block_keys), 2), torch.cat((values, block_values), 2)

    return join

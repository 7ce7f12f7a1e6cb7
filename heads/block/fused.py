"""A pass over a block as one call of the compiled step that a fused target runs, on a CPU.

A block layer without a convolution has the form of a Qwen3 layer: its query and key heads are
normed, and the text's keys and values are only made elsewhere. The eager version is
`BlockHead.forward`.

Shapes: B rows, S slots, K drafted tokens, H hidden size.
"""

from torch import Tensor

from decoding.interfaces import Target
from decoding.models.native.fused import FusedForward, fuse_linears, refuse
from decoding.models.native.model import NativeTarget
from decoding.models.native.skips import Skips
from decoding.models.native.weights import NativeConfig, Weights
from heads.block.context import StoredContext
from heads.block.model import BlockHead, BlockLayer
from heads.block.shape import CAUSAL
from heads.layers import share_weights


class FusedPass:
    """The passes of one head over the embeddings of one target; `make_pass` makes it."""

    def __init__(self, head: BlockHead, target: NativeTarget) -> None:
        """Join the head's weights for the step. The head's own then share the memory of these.

        An embedding in another dtype than the head's is copied.
        """
        config, state = head.config, head.state_dict()
        shape = NativeConfig(
            family="qwen3",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_positions=0,
            norm_eps=config.norm_eps,
            tied=True,  # no pass computes logits
            rope={},
        )
        named = {f"model.{name}": tensor for name, tensor in state.items()}
        named["model.embed_tokens.weight"] = target.weights.embedding_VC
        weight = head.norm.weight
        weights = Weights(shape, named, weight.dtype, weight.device, packed=False)
        self._step = FusedForward(weights, Skips().steps(weights.layers))
        self._causal = config.in_block_mask == CAUSAL
        self._first = config.block_size - config.num_drafts  # slot that predicts a token
        self._bound: Tensor | None = None
        for layer, joined in zip(head.layers, weights.layers, strict=True):
            assert isinstance(layer, BlockLayer)
            attention, mlp = layer.self_attn, layer.mlp
            share_weights([attention.q_proj, attention.k_proj, attention.v_proj], joined.qkv)
            share_weights([mlp.gate_proj, mlp.up_proj], joined.gate_up)
        fuse_linears(head)

    def takes(self, ids_BS: Tensor) -> bool:
        """Return whether a pass over as many tokens as these runs in the step."""
        return self._step.takes(ids_BS.numel())

    def states(self, ids_BS: Tensor, context: StoredContext) -> Tensor:
        """Return the inputs of the output layer for every drafted token, (B, K, H)."""
        cache_L2BGTD, (cos_T1D, sin_T1D) = context.stored(), context.tables
        if cache_L2BGTD is not self._bound:
            self._step.bind(cache_L2BGTD, (cos_T1D[:, 0], sin_T1D[:, 0]))
            self._bound = cache_L2BGTD
        return self._step.block(ids_BS, context.lengths_B, self._causal)[:, self._first :]


def make_pass(head: BlockHead, target: Target) -> FusedPass | None:
    """Return the passes of a head for a target, None if the step cannot run them here."""
    weight = head.norm.weight
    builds = refuse(weight.dtype, weight.device) is None and not head.config.conv_taps
    return FusedPass(head, target) if builds and isinstance(target, NativeTarget) else None

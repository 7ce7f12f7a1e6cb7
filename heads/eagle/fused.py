"""An EAGLE-3 head whose drafts are calls of the compiled step that a fused target runs, on a CPU.

The head's layer is a Llama layer whose projections read a normed embedding and a normed state side
by side. EAGLE-1, whose target predicts, and heads with `norm_before_residual` run eagerly.

Shapes: B rows, W elements, P new nodes of a draft, M mask elements, N elements whose logits are
wanted, H hidden size, V vocabulary of the target.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.interfaces import Target, Tokens
from decoding.models.native.fused import FusedForward, fuse_linears, refuse
from decoding.models.native.model import NativeTarget
from decoding.models.native.skips import Skips
from decoding.models.native.weights import NativeConfig, Weights
from heads.eagle.cache import HeadCache
from heads.eagle.model import EagleHead
from heads.layers import share_weights

# The element of the first token, in slot 0, has no state, and no other element sees it.
FIRST_SLOT = 1


class FusedHeadCache(HeadCache):
    """A `HeadCache` of a head for one target; `make_cache` makes it."""

    def __init__(self, head: EagleHead, name: str, target: NativeTarget) -> None:
        """Join the head's weights for the step. The head's own then share the memory of these.

        An embedding in another dtype than the head's is copied.
        """
        super().__init__(head, name)
        config, layer = head.config, head.midlayer
        shape = NativeConfig(
            family="llama",
            vocab_size=config.num_drafted,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=1,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_positions=0,
            norm_eps=config.norm_eps,
            tied=False,
            rope={},
        )
        named = {f"model.layers.0.{part}": value for part, value in layer.state_dict().items()}
        named["model.norm.weight"] = head.norm.state_dict()["weight"]
        named["lm_head.weight"] = head.lm_head.weight.detach()
        named["model.embed_tokens.weight"] = target.weights.embedding_VC
        weights = Weights(shape, named, self.dtype, self.device, packed=False)
        self._step = FusedForward(weights, Skips().steps(weights.layers))
        self._bound: Tensor | None = None
        masks = config.parallel - 1
        self._masks_MH = head.mask_states(masks) if masks > 0 else torch.empty(0)
        attention, mlp = layer.self_attn, layer.mlp
        (joined,) = weights.layers
        share_weights([attention.q_proj, attention.k_proj, attention.v_proj], joined.qkv)
        share_weights([mlp.gate_proj, mlp.up_proj], joined.gate_up)
        fuse_linears(head)

    def start(self, sequences_B: Tokens) -> Tensor:
        """Begin drafts as `HeadCache.start` does, in one call if only the tips are unverified."""
        found_B1V = self._add_all(sequences_B, 1)
        return super().start(sequences_B) if found_B1V is None else found_B1V[:, 0]

    def draft_in_one_pass(self, sequences_B: Tokens, count: int) -> Tensor:
        """Draft `count` tokens after these texts; return their logits (B, count, V)."""
        found_BNV = self._add_all(sequences_B, count)
        return super().draft_in_one_pass(sequences_B, count) if found_BNV is None else found_BNV

    def run(self, tokens_BP: Tensor, parents_BP: Tensor) -> Tensor:
        """Add nodes to the draft as `HeadCache.run` does; return their logits (B, P, V)."""
        first, P = self.num_nodes, tokens_BP.shape[1]
        if not self._fits(self._starts_B, first + P):
            return super().run(tokens_BP, parents_BP)
        self._parents_BN = torch.cat((self._parents_BN, parents_BP), 1)
        states_BPH = self._at(self._states_BTH, self._starts_B1 + parents_BP + 1)
        logits_BPV, states_BPH = self._join(
            tokens_BP, states_BPH, self._starts_B, None, self._parents_BN
        )
        slots_BP = self._starts_B1 + torch.arange(first, first + P)
        self._write(self._states_BTH, states_BPH, slots_BP + 1)
        return logits_BPV

    def extend(self, tokens_B1: Tensor) -> Tensor:
        """Add a node after the draft's last one; return the logits (B, 1, V) of its next token."""
        number, slots_B1 = self.num_nodes, self._starts_B1 + self.num_nodes
        firsts_B = [start + number for start in self._starts_B]
        if not self._fits(firsts_B, 1):
            return super().extend(tokens_B1)
        states_B1H = self._at(self._states_BTH, slots_B1)
        logits_B1V, states_B1H = self._join(tokens_B1, states_B1H, firsts_B, None)
        self._write(self._states_BTH, states_B1H, slots_B1 + 1)
        parents_B1 = torch.full_like(tokens_B1, number - 1)
        self._parents_BN = torch.cat((self._parents_BN, parents_B1), 1)
        return logits_B1V

    def time_pass(self, count: int) -> None:
        """Run a pass for timing, after which no draft is open."""
        if not self._fits(self._starts_B, count):
            return super().time_pass(count)
        states_BWH = self._states_BTH[:, :count]
        ids_BW = torch.zeros(states_BWH.shape[:2], dtype=torch.long)
        self._join(ids_BW, states_BWH, self._starts_B, None)

    def _add_all(self, sequences_B: Tokens, count: int) -> Tensor | None:
        """Add the missing elements up to the tips, and count - 1 mask elements, in one call.

        Returns the logits (B, count, V) of the tips and masks; None, and changes nothing, if one
        call cannot add them, as where tokens before a tip have no states of the target.
        """
        firsts_B, ends_B = self.lengths_B, [len(text) for text in sequences_B]
        tips_B = [end - first - 1 for first, end in zip(firsts_B, ends_B, strict=True)]
        width = max(tips_B) + count
        known = all(known >= end - 1 for known, end in zip(self._known_B, ends_B, strict=True))
        if not known or min(tips_B) < 0 or not self._fits(firsts_B, width):
            return None
        masks = [self.head.config.mask_token_id] * (count - 1)
        new_B = [[*text[n:], *masks] for text, n in zip(sequences_B, firsts_B, strict=True)]
        padded = [[*new, *[0] * (width - len(new))] for new in new_B]
        states_BWH = self._at(self._states_BTH, self._slots(firsts_B, [tip + 1 for tip in tips_B]))
        wanted_BN = devices.tensor(tips_B, self.device)[:, None] + torch.arange(count)
        if masks:
            states_BWH = F.pad(states_BWH, (0, 0, 0, count - 1))
            self._write(states_BWH, self._masks_MH[: count - 1], wanted_BN[:, 1:])
        last_B = None if masks else tips_B
        tokens_BW = devices.tensor(padded, self.device)
        logits, states_BWH = self._join(tokens_BW, states_BWH, firsts_B, last_B)
        self.lengths_B = [end - 1 for end in ends_B]
        self._begin(self.lengths_B)
        self._parents_BN = torch.arange(-1, count - 1).expand(len(ends_B), count)
        if masks:
            return self._at(logits, wanted_BN)
        self._write(self._states_BTH, self._at(states_BWH, wanted_BN), self._starts_B1 + 1)
        return logits

    def _fits(self, firsts_B: Sequence[int], width: int) -> bool:
        """Return whether `width` elements from these slots on run in the step.

        The step needs room for all, and cannot let a text's only token see its element.
        """
        room = self._states_BTH.shape[1] - max(firsts_B) - width
        seen = min(self._known_B) > 0 and min(firsts_B) >= FIRST_SLOT
        return seen and room >= 0 and self._step.takes(len(firsts_B) * width)

    def _join(
        self,
        tokens_BW: Tensor,
        states_BWH: Tensor,
        firsts_B: Sequence[int],
        last_B: Sequence[int] | None,
        parents_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of elements' next tokens, and the states that follow (B, W, H).

        firsts_B: slots of the first elements, or of the tips with parents_BN, the parents of all
        nodes of a draft that these elements end; None: each element sees those before it. last_B:
        the one element of each row whose logits are wanted, as (B, 1, V); None: all, (B, W, V).
        """
        if self._cache_12BKTD is not self._bound:
            cos_T1D, sin_T1D = self._rope
            rope = (cos_T1D[:, 0], sin_T1D[:, 0])
            self._step.bind(self._cache_12BKTD, rope, FIRST_SLOT)
            self._bound = self._cache_12BKTD
        lengths_B = [first - FIRST_SLOT for first in firsts_B]
        before_norm = not self.head.config.norm_output
        logits, states_BWH = self._step.join(
            tokens_BW, states_BWH, lengths_B, last_B, before_norm, parents_BN
        )
        return self._spread(logits), states_BWH


def make_cache(head: EagleHead, name: str, target: Target, execution: str) -> HeadCache:
    """Return the cache of a head for a target, fused if `execution` is `fused` and it can be."""
    config, weight = head.config, head.fc.weight
    builds = execution == "fused" and refuse(weight.dtype, weight.device) is None
    supported = not (config.predicts_states or config.norm_before_residual)
    if builds and supported and isinstance(target, NativeTarget):
        return FusedHeadCache(head, name, target)
    return HeadCache(head, name)

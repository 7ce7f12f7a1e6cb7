"""A view of a native target whose vocabulary is extended by slots, on the target's own cache.

Slot j has the id V + j. A forward of the view reads the tip and some slots, and writes their keys
and values past the committed tokens, where the target's next forward overwrites them.

Shapes: S slots, C hidden size, V the target's vocabulary.
"""

import copy

import torch

from decoding.models.native.model import NativeTarget
from heads.sdsat.model import SdsatHead


class SlotView(NativeTarget):
    """A target that reads slots after its tip; call `follow` after every commit of the target."""

    def __init__(self, target: NativeTarget, head: SdsatHead) -> None:
        """Wrap an open target, and copy its embedding and the head, in its dtype, into one table.

        With a low-rank change, which the fused execution lacks, layers run one by one.
        """
        weights = copy.copy(target.weights)
        head = copy.deepcopy(head).to(weights.device, weights.dtype).requires_grad_(False)
        weights.embedding_VC = torch.cat((weights.embedding_VC, head.slots))
        rows = head.config.num_drafts
        weights.layers = [head.change(each, i, rows) for i, each in enumerate(weights.layers)]
        eager = head.config.rank and target.execution == "fused"
        execution = "eager" if eager else target.execution
        name = f"{target.name} with slots"
        super().__init__(weights, name, target.max_length, execution=execution)
        self.follow(target)

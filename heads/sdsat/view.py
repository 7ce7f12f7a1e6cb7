"""A view of a native target whose vocabulary is extended by slots, on the target's own cache.

Slot j has the id V + j. A forward of the view reads text and slots, and writes their keys and
values past the committed tokens, where the target's next forward overwrites them.

Shapes: B rows, N new tokens, I input size, S slots, C hidden size, V the target's vocabulary.
"""

import copy

import torch
from torch import Tensor

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
        self._marks = SlotMarks() if head.config.rank else None
        if self._marks is not None:
            changed = enumerate(weights.layers)
            weights.layers = [head.change(layer, i, self._marks) for i, layer in changed]
        eager = head.config.rank and target.execution == "fused"
        execution = "eager" if eager else target.execution
        name = f"{target.name} with slots"
        super().__init__(weights, name, target.max_length, execution=execution)
        self.follow(target)

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return logits and hidden states of text and slots (see `Target.forward`)."""
        if self._marks is not None:
            self._marks.fill(tokens_BN >= self.vocab_size)
        return super().forward(tokens_BN, parents_BN, taps)


class SlotMarks:
    """Marks of the slots among the rows of a forward; recorded steps hold their addresses."""

    def __init__(self) -> None:
        self._of_shape: dict[tuple[int, int], Tensor] = {}

    def fill(self, is_slot_BN: Tensor) -> None:
        """Set the marks of the forward that begins."""
        rows, tokens = is_slot_BN.shape
        if (rows, tokens) not in self._of_shape:
            with torch.inference_mode(False):
                self._of_shape[rows, tokens] = torch.empty_like(is_slot_BN)
        self._of_shape[rows, tokens].copy_(is_slot_BN)

    def __call__(self, x_BNI: Tensor) -> Tensor:
        """Return the marks (B, N) of a forward with these inputs of a product."""
        return self._of_shape[x_BNI.shape[0], x_BNI.shape[1]]

"""The head with the native target's products on a CPU: oneDNN's packed weights, or fused ones.

The eager twin is `RecurrentHead`. Over eight beams, a plain product with a vocabulary of 4,096 took
1.17 ms on one thread of a shared machine, a third of a round, and the packed one 0.29 ms. Packed
weights have no gradients.

Shapes: E the blocks' width, H the target's hidden size, R rows (any leading dimensions), V drafted
vocabulary.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from decoding.models.native.fused import FusedLinear, refuse
from decoding.models.native.linear import Linear, can_pack, make_linear
from recurrent_drafting.head import Head, RecurrentHead


class PackedHead(Head):
    """A copy of a trained head for drafting."""

    def __init__(
        self, head: RecurrentHead, make: Callable[[Tensor, Tensor | None], Linear]
    ) -> None:
        """Copy the weights into the linear layers that `make` returns."""
        self.config, self.token_ids_V = head.config, head.token_ids_V
        self._output = make(head.output, None)
        if head.config.rnn:
            self.rnn_w = make(head.rnn_w.weight, None)
            self.rnn_u = make(head.rnn_u.weight, head.rnn_u.bias)
            self._rnn_bias_H = head.rnn_u.bias
        if head.config.has_input_map:
            H, first = head.config.hidden_size, head.linears[0]
            self.from_hidden = make(first.weight[:, :H], first.bias)
            self.from_state = make(first.weight[:, H:], None)
        self._later = [make(each.weight, each.bias) for each in head.later_linears]

    @property
    def rnn_bias_H(self) -> Tensor:
        return self._rnn_bias_H

    @property
    def later_linears(self) -> list[Linear]:
        return self._later

    def logits(self, features_RE: Tensor) -> Tensor:
        return self._output(features_RE)


def for_drafting(head: RecurrentHead, fused: bool = False) -> Head:
    """Return the head with the fastest products for its device and dtype.

    fused: use those of the fused step where it runs.
    """
    output = head.output
    if fused and refuse(output.dtype, output.device) is None:
        return PackedHead(head, FusedLinear)
    if can_pack(output.device, output.dtype):
        return PackedHead(head, partial(make_linear, packed=True))
    return head

"""The head with products laid out for a CPU: oneDNN's packed weights, as in the native target.

The eager twin is `RecurrentHead`. Over eight beams, a plain product with a vocabulary of 4,096 took
1.17 ms on one thread of a shared machine, a third of a round, and the packed one 0.29 ms. Packed
weights have no gradients.

Shapes: E the blocks' width, H the target's hidden size, R rows (any leading dimensions), V drafted
vocabulary.
"""

from torch import Tensor

from decoding.models.native.linear import Linear, can_pack, make_linear
from recurrent_drafting.head import Head, RecurrentHead


class PackedHead(Head):
    """A copy of a trained head for drafting."""

    def __init__(self, head: RecurrentHead, packed: bool = True) -> None:
        """Pack the weights; packed=False uses plain products, for parity tests."""
        self.config, self.token_ids_V = head.config, head.token_ids_V
        self._output = make_linear(head.output, None, packed)
        if head.config.rnn:
            self.rnn_w = make_linear(head.rnn_w.weight, None, packed)
            self.rnn_u = make_linear(head.rnn_u.weight, head.rnn_u.bias, packed)
            self._rnn_bias_H = head.rnn_u.bias
        if head.config.has_input_map:
            H, first = head.config.hidden_size, head.linears[0]
            self.from_hidden = make_linear(first.weight[:, :H], first.bias, packed)
            self.from_state = make_linear(first.weight[:, H:], None, packed)
        self._later = [make_linear(each.weight, each.bias, packed) for each in head.later_linears]

    @property
    def rnn_bias_H(self) -> Tensor:
        return self._rnn_bias_H

    @property
    def later_linears(self) -> list[Linear]:
        return self._later

    def logits(self, features_RE: Tensor) -> Tensor:
        return self._output(features_RE)


def for_drafting(head: RecurrentHead) -> Head:
    """Return the packed head if its device and dtype support it, else the head itself."""
    output = head.output
    return PackedHead(head) if can_pack(output.device, output.dtype) else head

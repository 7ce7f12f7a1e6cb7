"""The head with products laid out for a CPU: oneDNN's packed weights, as in the native target.

The eager twin is `RecurrentHead`, which has methods of the same names. Over eight beams a plain
product with a vocabulary of 4,096 took 1.17 ms on one thread of a shared machine, a third of a
round, and the packed one 0.29 ms. There are no gradients.

Shapes: R rows (any leading dimensions), H the target's hidden size, E the blocks' width, V drafted
vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.models.native.linear import can_pack, make_linear
from recurrent_drafting.head import Context, RecurrentHead, ResidualBlock


class PackedHead:
    """A copy of a head for drafting."""

    def __init__(self, head: RecurrentHead, packed: bool = True) -> None:
        """Pack the weights; packed=False uses plain products, for parity tests."""
        self.config, self.token_ids_V = head.config, head.token_ids_V
        H = head.config.hidden_size
        self._output = make_linear(head.output, None, packed)
        if head.config.rnn:
            self._rnn_w = make_linear(head.rnn_w.weight, None, packed)
            self._rnn_u = make_linear(head.rnn_u.weight, head.rnn_u.bias, packed)
            self._rnn_bias_H = head.rnn_u.bias
        linears = [block.linear for block in head.lm_head if isinstance(block, ResidualBlock)]
        first = head.input_proj if head.config.projects else linears.pop(0) if linears else None
        if first is not None:
            self._from_hidden = make_linear(first.weight[:, :H], first.bias, packed)
            self._from_state = make_linear(first.weight[:, H:], None, packed)
        self._has_first = first is not None
        self._blocks = [make_linear(linear.weight, linear.bias, packed) for linear in linears]

    def start(self, embedded_RH: Tensor) -> Tensor:
        """Compute `RecurrentHead.start`."""
        return (
            F.silu(self._rnn_w(embedded_RH) + self._rnn_bias_H) if self.config.rnn else embedded_RH
        )

    def advance(self, state_RH: Tensor, embedded_RH: Tensor) -> Tensor:
        """Compute `RecurrentHead.advance`."""
        if self.config.rnn:
            return F.silu(self._rnn_w(embedded_RH) + self._rnn_u(state_RH.contiguous()))
        return state_RH + embedded_RH

    def context(self, hidden_RH: Tensor) -> Context:
        """Compute `RecurrentHead.context`."""
        if not self._has_first:
            return Context(hidden_RH, hidden_RH)
        first_RE = self._from_hidden(hidden_RH.contiguous())
        return Context(first_RE if self.config.projects else hidden_RH, first_RE)

    def features(self, context: Context, state_RH: Tensor) -> Tensor:
        """Compute `RecurrentHead.features`."""
        if self.config.projects:
            z_RE = context.input_RE + self._from_state(state_RH.contiguous())
        else:
            hidden_RH = context.input_RE.expand(*state_RH.shape[:-1], self.config.hidden_size)
            z_RE = torch.cat((hidden_RH, state_RH), -1)
            if self._has_first:
                z_RE = z_RE + F.silu(context.first_RE + self._from_state(state_RH.contiguous()))
        for block in self._blocks:
            z_RE = z_RE + F.silu(block(z_RE))
        return z_RE

    def logits(self, features_RE: Tensor) -> Tensor:
        """Compute `RecurrentHead.logits`."""
        return self._output(features_RE)

    def to_target_ids(self, drafted_R: Tensor) -> Tensor:
        """Compute `RecurrentHead.to_target_ids`."""
        return drafted_R if self.token_ids_V is None else self.token_ids_V[drafted_R]


Head = RecurrentHead | PackedHead


def for_drafting(head: RecurrentHead) -> Head:
    """Return the form of the head that drafts fastest on its device."""
    output = head.output
    return PackedHead(head) if can_pack(output.device, output.dtype) else head

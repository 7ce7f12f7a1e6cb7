"""What the modules of trained heads share: their size, and a draft vocabulary as files store it.

Shape: V drafted vocabulary.
"""

import torch
from torch import Tensor, nn

from decoding.models.draft_vocabulary import is_drafted


class Head(nn.Module):
    """A trained head of a target, without the target's embedding and output layer."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


class RestrictedHead(Head):
    """A head that may draft a part of the target's tokens (decoding/models/draft_vocabulary.py)."""

    d2t: Tensor | None  # id of each drafted token less its index
    t2d: Tensor | None  # whether each token of the target is drafted, if files have it

    def register_vocabulary(self, size: int, vocab_size: int = 0) -> None:
        """Register the target's first `size` tokens as the draft vocabulary; 0: all tokens.

        vocab_size: of the target, for a head whose files have t2d; 0: they do not.
        """
        first_V = torch.arange(vocab_size) < size if size and vocab_size else None
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long) if size else None)
        self.register_buffer("t2d", first_V)

    @property
    def token_ids_V(self) -> Tensor | None:
        """Ids of the draft vocabulary, rising; None: the full vocabulary."""
        return None if self.d2t is None else self.d2t + _numbers(self.d2t)

    @token_ids_V.setter
    def token_ids_V(self, ids_V: Tensor) -> None:
        self.d2t = ids_V - _numbers(ids_V)
        if self.t2d is not None:
            self.t2d = is_drafted(ids_V, len(self.t2d))


def _numbers(like_V: Tensor) -> Tensor:
    """Return 0, 1, 2, ... of a tensor's length, on its device."""
    return torch.arange(len(like_V), device=like_V.device)

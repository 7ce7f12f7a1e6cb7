"""Markov targets, and heads whose logits equal the target's or their negative.

Shapes: B rows, N nodes, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from recurrent_drafting.head import HeadConfig, RecurrentHead
from tests.support.tiny_targets import TableTarget


class MarkovTarget(TableTarget):
    """Target whose next token depends on the last one alone.

    Hidden states and embeddings are one-hot vectors of the token.
    """

    def __init__(self, logits_VV: Tensor, max_length: int = 10**6) -> None:
        super().__init__(logits_VV[None].expand(len(logits_VV), -1, -1).clone())
        self.hidden_size, self.max_length = len(logits_VV), max_length
        self.ones_VV = torch.eye(len(logits_VV), dtype=torch.float64)

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        return super().forward(tokens_BN, parents_BN, taps)[0], self.embed(tokens_BN)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.ones_VV)


def markov(symbols: int = 12, scale: float = 1.5, seed: int = 1, **options: int) -> MarkovTarget:
    """Return a random Markov target.

    scale: factor of the logits; a large one makes the next token nearly certain.
    """
    generator = torch.Generator().manual_seed(seed)
    return MarkovTarget(
        torch.randn(symbols, symbols, generator=generator, dtype=torch.float64) * scale, **options
    )


def exact_head(target: MarkovTarget, sign: float = 1.0) -> RecurrentHead:
    """Return the head whose logits are `sign` times the target's.

    Its state is the last token, and its output layer the table.
    """
    V = target.vocab_size
    head = RecurrentHead(HeadConfig(V, V, 2 * V, num_draft_layers=0)).double().requires_grad_(False)
    head.rnn_w.weight.copy_(torch.eye(V))
    head.rnn_u.weight.zero_()
    head.rnn_u.bias.zero_()
    head.output.zero_()
    head.output[:, V:] = sign * target.table_VVV[0].T / F.silu(torch.ones((), dtype=torch.float64))
    return head.eval()

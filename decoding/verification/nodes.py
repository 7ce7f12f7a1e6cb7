"""Helpers of the rules that test p / q: values at nodes, and rounds without a draft.

Shapes: B rows, N drafted tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Outcome, Proposal, Readback
from decoding.sampling import noise
from decoding.sampling.warpers import draw


def probabilities(
    probs_BNV: Tensor, proposal: Proposal
) -> tuple[list[list[float]], list[list[float]]]:
    """Return p and q of each drafted token."""
    tokens_BN1 = proposal.tokens_BN[:, :, None]
    p_BN = probs_BNV[:, :-1].gather(-1, tokens_BN1).squeeze(-1).tolist()
    if proposal.q_BNV is None:
        return p_BN, [[1.0] * len(row) for row in p_BN]
    return p_BN, proposal.q_BNV.gather(-1, tokens_BN1).squeeze(-1).tolist()


def at_nodes(values_BN: Tensor, nodes_B: list[int]) -> Tensor:
    """Return values_BN[b, nodes_B[b]] for each row; a view if there is one row."""
    if len(nodes_B) == 1:
        return values_BN[:, nodes_B[0]]
    index_B = devices.tensor(nodes_B, values_BN.device)
    return values_BN[torch.arange(len(nodes_B), device=values_BN.device), index_B]


def tested(accepted_B: Sequence[int], counts_B: Sequence[int]) -> list[int]:
    return [
        accepted + (accepted < count) for accepted, count in zip(accepted_B, counts_B, strict=True)
    ]


def sample_without_draft(logits_BNV: Tensor, chooser: Chooser, readback: Readback) -> Outcome:
    """Return the outcome of a round without a draft: a token sampled from p after each tip."""
    p_BV = chooser.warper.probs(logits_BNV)[:, 0]
    uniforms_B = [chooser.uniform(b, 0, noise.BONUS) for b in range(len(p_BV))]
    (next_B,) = readback(draw(p_BV, uniforms_B))
    return Outcome([[token] for token in next_B], None, [0] * len(p_BV), [0] * len(p_BV))

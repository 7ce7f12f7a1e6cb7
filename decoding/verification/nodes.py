"""Parts of the rules that test p / q: values at nodes, ends of chains, rounds without a draft.

Shapes: B rows, F rows with a rejection, N drafted tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Outcome, Proposal, Readback
from decoding.sampling import noise
from decoding.sampling.warpers import draw, residual_or_p

# rows up to which Python loops on a CPU take less time than operations for all rows at once
FEW_ROWS = 8
# maps F rows and their rejected nodes to the unnormalised weights (F, V) of the next token
Residual = Callable[[list[int], list[int]], Tensor]


def probabilities(
    probs_BNV: Tensor, proposal: Proposal
) -> tuple[list[list[float]], list[list[float]]]:
    """Return p and q (B, N) of each drafted token as lists; q is 1 for point masses."""
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
    """Return the number of tested tokens of each row: the accepted ones and the rejected one."""
    return [
        accepted + (accepted < count) for accepted, count in zip(accepted_B, counts_B, strict=True)
    ]


def finish_chain(
    probs_BNV: Tensor,
    residual: Residual,
    accepted_B: list[int],
    proposal: Proposal,
    chooser: Chooser,
) -> Outcome:
    """Return the outcome of a chain; the next token is sampled from its `final_weights`."""
    counts_B, drafted = proposal.counts_B, proposal.tokens_BN.tolist()
    uniforms_B = [
        chooser.uniform(b, accepted, noise.BONUS if accepted == count else noise.RESIDUAL)
        for b, (accepted, count) in enumerate(zip(accepted_B, counts_B, strict=True))
    ]
    weights_BV = final_weights(probs_BNV, residual, accepted_B, counts_B)
    next_B = draw(weights_BV, uniforms_B).tolist()
    tokens_B = [[*drafted[b][:accepted], next_B[b]] for b, accepted in enumerate(accepted_B)]
    return Outcome(tokens_B, None, accepted_B, tested(accepted_B, counts_B))


def final_weights(
    probs_BNV: Tensor, residual: Residual, accepted_B: list[int], counts_B: list[int]
) -> Tensor:
    """Return the unnormalised distribution (B, V) of the token that follows the accepted ones.

    It is p after a complete chain, and the residual after a rejection.
    """
    weights_BV = at_nodes(probs_BNV, accepted_B)
    failed = [b for b, count in enumerate(counts_B) if accepted_B[b] < count]
    if not failed:
        return weights_BV
    residual_FV = residual(failed, [accepted_B[b] for b in failed])
    if len(failed) == len(accepted_B):
        return residual_or_p(residual_FV, weights_BV)
    weights_BV = weights_BV.clone()
    weights_BV[failed] = residual_or_p(residual_FV, weights_BV[failed])
    return weights_BV


def sample_without_draft(logits_BNV: Tensor, chooser: Chooser, readback: Readback) -> Outcome:
    """Return the outcome of a round without a draft: a token sampled from p after each tip."""
    p_BV = chooser.warper.probs(logits_BNV)[:, 0]
    uniforms_B = chooser.uniforms(range(len(p_BV)), 0, noise.BONUS)
    (next_B,) = readback(draw(p_BV, uniforms_B))
    return Outcome([[token] for token in next_B], None, [0] * len(p_BV), [0] * len(p_BV))

"""Device versions of `token` and `block` verification of chains: one wait per round.

The eager versions (token.py, block.py) read probabilities, decide on the host and then read the
next token: three waits on a GPU, but fewer operations on a CPU that decodes few rows. Both use the
same numbers and the same float64 comparisons, and have the same outcome.

Shapes: B rows, N drafted tokens, V vocabulary. Target probabilities have one node more than the
proposal: the tip comes first.
"""

import math

import numpy as np
import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Outcome, Proposal, Readback
from decoding.sampling import noise
from decoding.sampling.warpers import draw_at, residual_or_p


def token(probs_BNV: Tensor, proposal: Proposal, chooser: Chooser, readback: Readback) -> Outcome:
    """Verify a chain by the rule of token.py (Leviathan et al. 2023), with one wait."""
    accept_BN, last_BN = _uniforms(proposal, chooser)
    p_BN, q_BN = _probabilities(probs_BNV, proposal)
    accepted_B = (accept_BN * (chooser.lenience * q_BN) < p_BN).long().cumprod(1).sum(1)
    p_BV, failed_B = _at(probs_BNV, accepted_B), _last_node(accepted_B, proposal)
    if proposal.q_BNV is None:
        residual_BV = p_BV.scatter(1, _at(proposal.tokens_BN, failed_B)[:, None], 0.0)
    else:
        residual_BV = (p_BV - _at(proposal.q_BNV, failed_B)).clamp_(min=0)
    return _outcome(p_BV, residual_BV, accepted_B, last_BN, proposal, readback)


def block(
    probs_BNV: Tensor, q_BNV: Tensor, proposal: Proposal, chooser: Chooser, readback: Readback
) -> Outcome:
    """Verify a chain by the rule of block.py (Sun et al. 2025), with one wait.

    q_BNV: each drafted token's distribution, which is a point mass if the proposal has no q.
    """
    accept_BN, last_BN = _uniforms(proposal, chooser)
    w_BN = _running_ratios(*_probabilities(probs_BNV, proposal))  # w_0 .. w_N
    surplus_BNV = (w_BN.to(probs_BNV.dtype)[:, :-1, None] * probs_BNV[:, :-1] - q_BNV).clamp_(min=0)
    s_BN, inner_BN = surplus_BNV.sum(-1).double()[:, 1:], w_BN[:, 1:-1]
    rest_BN = s_BN + 1 - inner_BN
    # h_1 .. h_N
    chance_BN = torch.cat((torch.where(rest_BN > 0, s_BN / rest_BN, 1.0), w_BN[:, -1:]), 1)
    depths_N = torch.arange(1, w_BN.shape[1], device=w_BN.device)
    counts_B1 = devices.tensor(proposal.counts_B, w_BN.device)[:, None]
    passed_BN = accept_BN <= torch.where(depths_N == counts_B1, w_BN[:, 1:], chance_BN)
    accepted_B = (passed_BN * depths_N).amax(1)
    residual_BV = _at(surplus_BNV, _last_node(accepted_B, proposal))
    return _outcome(
        _at(probs_BNV, accepted_B), residual_BV, accepted_B, last_BN, proposal, readback
    )


def _uniforms(proposal: Proposal, chooser: Chooser) -> tuple[Tensor, Tensor]:
    """Return the uniforms that test tokens (B, N), and those that sample the next one (B, N + 1).

    The first are infinite where a row drafted nothing; the second are indexed by the number of
    accepted tokens. Both are float64, sent to the device in one copy.
    """
    N = proposal.tokens_BN.shape[1]
    counts_B1, nodes_N = np.array(proposal.counts_B)[:, None], np.arange(N + 1)
    is_drafted_BN = nodes_N < counts_B1
    purposes_BN = np.where(is_drafted_BN, noise.RESIDUAL, noise.BONUS)
    rows_B1 = np.arange(len(counts_B1))[:, None]
    accept_BN = chooser.uniforms(rows_B1, nodes_N[:N], noise.ACCEPT)
    last_BN = chooser.uniforms(rows_B1, np.minimum(nodes_N, counts_B1), purposes_BN)
    accept_BN[~is_drafted_BN[:, :N]] = math.inf
    numbers = np.concatenate((accept_BN, last_BN), 1)
    both = devices.tensor(numbers, proposal.tokens_BN.device, torch.float64)
    return both[:, :N], both[:, N:]


def _probabilities(probs_BNV: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Return p and q (B, N) of each drafted token in float64; q is 1 for point masses."""
    tokens_BN1 = proposal.tokens_BN[:, :, None]
    p_BN = probs_BNV[:, :-1].gather(-1, tokens_BN1).squeeze(-1).double()
    if proposal.q_BNV is None:
        return p_BN, torch.ones_like(p_BN)
    return p_BN, proposal.q_BNV.gather(-1, tokens_BN1).squeeze(-1).double()


def _running_ratios(p_BN: Tensor, q_BN: Tensor) -> Tensor:
    """Return w_0 = 1 and w_i = min(1, w_(i-1) p_i / q_i), (B, N + 1).

    A padded node (q = 0) has ratio 0.
    """
    ratios = [torch.ones_like(p_BN[:, 0])]
    for n in range(p_BN.shape[1]):
        ratio_B = (ratios[-1] * p_BN[:, n] / q_BN[:, n]).clamp_(max=1.0)
        ratios.append(torch.where(q_BN[:, n] > 0, ratio_B, 0.0))
    return torch.stack(ratios, 1)


def _at(values_BN: Tensor, nodes_B: Tensor) -> Tensor:
    """Return values_BN[b, nodes_B[b]] for each row."""
    return values_BN[torch.arange(len(nodes_B), device=nodes_B.device), nodes_B]


def _last_node(accepted_B: Tensor, proposal: Proposal) -> Tensor:
    """Return each row's node whose test failed, or some node if none failed."""
    return accepted_B.clamp(max=proposal.tokens_BN.shape[1] - 1)


def _outcome(
    p_BV: Tensor,
    residual_BV: Tensor,
    accepted_B: Tensor,
    last_BN: Tensor,
    proposal: Proposal,
    readback: Readback,
) -> Outcome:
    """Sample each row's next token, and return the outcome after reading it with one wait."""
    counts_B = proposal.counts_B
    failed_B1 = (accepted_B < devices.tensor(counts_B, accepted_B.device))[:, None]
    weights_BV = torch.where(failed_B1, residual_or_p(residual_BV, p_BV), p_BV)
    next_B = draw_at(weights_BV, last_BN.gather(1, accepted_B[:, None]))
    drafted, accepted, following = readback(proposal.tokens_BN, accepted_B, next_B)
    tokens_B = [
        [*row[:kept], last] for row, kept, last in zip(drafted, accepted, following, strict=True)
    ]
    tested_B = [kept + (kept < count) for kept, count in zip(accepted, counts_B, strict=True)]
    return Outcome(tokens_B, None, accepted, tested_B)

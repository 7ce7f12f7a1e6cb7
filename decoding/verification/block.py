"""Block verification: test a whole chain at once (Sun et al. 2025, arXiv 2403.10444).

Shapes: B rows, N drafted tokens, V vocabulary. Logits have one node more than the proposal: the tip
comes first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Outcome, Proposal, Readback
from decoding.sampling import noise
from decoding.verification import device_chain
from decoding.verification.nodes import (
    FEW_ROWS,
    at_nodes,
    finish_chain,
    probabilities,
    sample_without_draft,
)


def block(
    logits_BNV: Tensor,
    proposal: Proposal | None,
    chooser: Chooser,
    readback: Readback = devices.read,
) -> Outcome:
    """Accept the longest prefix of the chain that passes its joint test.

    On average it is at least as long as the prefix that `token` keeps. With w_0 = 1, w_i = min(1,
    w_(i-1) p(x_i) / q(x_i)) and s_i = sum_x max(w_i p(x | x_1..i) - q(x | x_1..i), 0), the first i
    tokens are accepted with probability h_i = s_i / (s_i + 1 - w_i), and the complete chain with
    h_gamma = w_gamma (Sun et al. 2025, arXiv 2403.10444, Algorithm 2). The next token is sampled
    from max(w_i p - q, 0), or from p after the complete chain. Raises ValueError for a tree.
    """
    if proposal is None:
        return sample_without_draft(logits_BNV, chooser, readback)
    if proposal.parents_BN is not None:
        raise ValueError(
            "verify=block tests chains, found a tree, whose siblings need a rule that updates the "
            "residual. Use verify=token or verify=coupled."
        )
    probs_BNV = chooser.warper.probs(logits_BNV)
    q_BNV = _dense(proposal, probs_BNV)
    if devices.runs_ahead(probs_BNV.device) or len(probs_BNV) > FEW_ROWS:
        return device_chain.block(probs_BNV, q_BNV, proposal, chooser, readback)
    # w_0 .. w_N
    w_BN = [_running_ratios(*pair) for pair in zip(*probabilities(probs_BNV, proposal))]
    weights_BN1 = torch.tensor(w_BN, dtype=probs_BNV.dtype, device=probs_BNV.device)[:, :-1, None]
    # max(w_i p - q, 0) after i tokens, i < N
    surplus_BNV = (weights_BN1 * probs_BNV[:, :-1] - q_BNV).clamp_(min=0)
    s_BN = surplus_BNV.sum(-1).tolist()
    accepted_B = []
    for b, count in enumerate(proposal.counts_B):
        # The uniforms are independent, so the longest prefix may be tested first.
        accepts = (
            chooser.uniform(b, i - 1, noise.ACCEPT) <= _chance(s_BN[b], w_BN[b], i, count)
            for i in range(count, 0, -1)
        )
        accepted_B.append(next((count - n for n, accept in enumerate(accepts) if accept), 0))
    return finish_chain(
        probs_BNV,
        lambda rows, nodes: at_nodes(surplus_BNV[rows], nodes),
        accepted_B,
        proposal,
        chooser,
    )


def _running_ratios(p_N: Sequence[float], q_N: Sequence[float]) -> list[float]:
    """Return w_0 = 1 and w_i = min(1, w_(i-1) p_i / q_i) for i = 1 .. N.

    A padded node (q = 0) has ratio 0.
    """
    ratios = [1.0]
    for p, q in zip(p_N, q_N, strict=True):
        ratios.append(min(1.0, ratios[-1] * p / q) if q > 0 else 0.0)
    return ratios


def _chance(s_N: Sequence[float], w_N: Sequence[float], i: int, count: int) -> float:
    """Return h_i, the acceptance probability of the first i tokens (see `block`)."""
    if i == count:
        return w_N[i]
    rest = s_N[i] + 1 - w_N[i]
    return s_N[i] / rest if rest > 0 else 1.0


def _dense(proposal: Proposal, probs_BNV: Tensor) -> Tensor:
    """Return the distribution (B, N, V) of every drafted token: q, or a point mass without q."""
    if proposal.q_BNV is not None:
        return proposal.q_BNV
    return torch.zeros_like(probs_BNV[:, :-1]).scatter_(-1, proposal.tokens_BN[:, :, None], 1.0)

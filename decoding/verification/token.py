"""Token verification: test sampled tokens one by one by p / q.

Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1.

Shapes: B rows, N drafted tokens, V vocabulary. Logits have one node more than the proposal: the tip
comes first.
"""

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Outcome, Proposal, Readback
from decoding.sampling import noise
from decoding.sampling.warpers import draw
from decoding.verification import device_chain, device_tree, token_tree
from decoding.verification.nodes import at_nodes, probabilities, sample_without_draft, tested


def token(
    logits_BNV: Tensor,
    proposal: Proposal | None,
    chooser: Chooser,
    readback: Readback = devices.read,
) -> Outcome:
    """Accept x sampled from q with probability min(1, p(x) / q(x)).

    After the first rejection the next token is sampled from max(p - q, 0). A proposal without q is
    a point mass: accept x with probability p(x), else sample from p without x. In a tree siblings
    are tested in turn, each against the residual of the rejected ones (recursive rejection, Yang
    et al. 2024, arXiv 2401.06706, section 3.2).
    """
    if proposal is not None and proposal.parents_BN is not None:
        if devices.runs_ahead(logits_BNV.device):
            return device_tree.token(logits_BNV, proposal, chooser, readback)
        return token_tree.token(logits_BNV, proposal, chooser)
    if proposal is None:
        return sample_without_draft(logits_BNV, chooser, readback)
    probs_BNV = chooser.warper.probs(logits_BNV)
    B = len(probs_BNV)
    if devices.runs_ahead(probs_BNV.device):
        return device_chain.token(probs_BNV, proposal, chooser, readback)
    counts_B, drafted = proposal.counts_B, proposal.tokens_BN.tolist()
    p_BN, q_BN = probabilities(probs_BNV, proposal)
    accepted_B = []
    for b, count in enumerate(counts_B):
        passed = (
            chooser.uniform(b, n, noise.ACCEPT) * q_BN[b][n] < p_BN[b][n] for n in range(count)
        )
        accepted_B.append(next((n for n, kept in enumerate(passed) if not kept), count))
    weights_BV = final_weights(probs_BNV, proposal, accepted_B)
    purposes = [
        noise.BONUS if accepted == count else noise.RESIDUAL
        for accepted, count in zip(accepted_B, counts_B)
    ]
    uniforms = [chooser.uniform(b, accepted_B[b], purposes[b]) for b in range(B)]
    next_B = draw(weights_BV, uniforms).tolist()
    tokens_B = [[*drafted[b][: accepted_B[b]], next_B[b]] for b in range(B)]
    return Outcome(tokens_B, None, accepted_B, tested(accepted_B, counts_B))


def final_weights(probs_BNV: Tensor, proposal: Proposal, accepted_B: list[int]) -> Tensor:
    """Return the unnormalised distribution of the next token: p, or the residual if one failed."""
    failed = [b for b, count in enumerate(proposal.counts_B) if accepted_B[b] < count]
    weights_BV = at_nodes(probs_BNV, accepted_B)
    if not failed:
        return weights_BV
    # a slice makes a view, a list a copy
    rows = slice(None) if len(failed) == len(accepted_B) else failed
    nodes = [accepted_B[b] for b in failed]
    p_FV = weights_BV[rows]
    if proposal.q_BNV is None:
        tokens_F1 = at_nodes(proposal.tokens_BN[rows], nodes)[:, None]
        residual_FV = p_FV.scatter(1, tokens_F1, 0.0)
    else:
        residual_FV = (p_FV - at_nodes(proposal.q_BNV[rows], nodes)).clamp_(min=0)
    # If p = q up to rounding, there is no residual and the rejection had probability zero: then p
    # itself is right.
    residual_FV = torch.where(residual_FV.sum(-1, keepdim=True) > 0, residual_FV, p_FV)
    if len(failed) == len(accepted_B):
        return residual_FV
    weights_BV = weights_BV.clone()
    weights_BV[rows] = residual_FV
    return weights_BV

"""Token verification: test sampled tokens one by one by p / q; with a lenience it is LOSSY.

Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1 and appendix A.5.

Shapes: B rows, F rows with a rejection, N drafted tokens, V vocabulary. Logits have one node more
than the proposal: the tip comes first.
"""

from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Outcome, Proposal, Readback
from decoding.sampling import noise
from decoding.verification import batched_tree, device_chain, device_tree, token_tree
from decoding.verification.nodes import (
    FEW_ROWS,
    at_nodes,
    finish_chain,
    probabilities,
    sample_without_draft,
)


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
        if len(logits_BNV) > FEW_ROWS and proposal.q_top is None:
            return batched_tree.token(logits_BNV, proposal, chooser)
        return token_tree.token(logits_BNV, proposal, chooser)
    if proposal is None:
        return sample_without_draft(logits_BNV, chooser, readback)
    probs_BNV = chooser.warper.probs(logits_BNV)
    if devices.runs_ahead(probs_BNV.device) or len(probs_BNV) > FEW_ROWS:
        return device_chain.token(probs_BNV, proposal, chooser, readback)
    p_BN, q_BN = probabilities(probs_BNV, proposal)
    accepted_B = []
    for b, count in enumerate(proposal.counts_B):
        accepts = (
            chooser.uniform(b, n, noise.ACCEPT) * (chooser.lenience * q_BN[b][n]) < p_BN[b][n]
            for n in range(count)
        )
        accepted_B.append(next((n for n, accept in enumerate(accepts) if not accept), count))

    def residual(rows: list[int], nodes: list[int]) -> Tensor:
        # a slice makes a view, a list a copy
        at = slice(None) if len(rows) == len(probs_BNV) else rows
        p_FV = at_nodes(probs_BNV[at], nodes)
        if proposal.q_BNV is not None:
            return (p_FV - at_nodes(proposal.q_BNV[at], nodes)).clamp_(min=0)
        return p_FV.scatter(1, at_nodes(proposal.tokens_BN[at], nodes)[:, None], 0.0)

    return finish_chain(probs_BNV, residual, accepted_B, proposal, chooser)


def lenient(
    logits_BNV: Tensor,
    proposal: Proposal | None,
    chooser: Chooser,
    readback: Readback = devices.read,
) -> Outcome:
    """Accept x sampled from q with probability min(1, p(x) / (l q(x))), l the lenience (lossy).

    The rule is Leviathan et al. 2023, appendix A.5, and the linear lenience of DistillSpec (Zhou et
    al. 2024, arXiv 2310.08461). After a rejection the next token is sampled from max(p - q, 0), as
    `token` does. A drafted position then has the distribution

        min(q, p / l) + (1 - sum min(q, p / l)) max(p - q, 0) / sum max(p - q, 0),

    which is nowhere above p / l. No other residual brings it closer to p in total variation, as
    this one adds only to tokens that are too rare. With l = 1 it is `token`, draw for draw. Raises
    ValueError for a tree.
    """
    if proposal is not None and proposal.parents_BN is not None:
        raise ValueError(
            "verify=lossy_lenience tests chains, found a tree. Use verify=token or verify=coupled."
        )
    return token(logits_BNV, proposal, chooser, readback)

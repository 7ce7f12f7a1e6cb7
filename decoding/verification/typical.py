"""Typical acceptance: keep tokens that are likely enough for the target. LOSSY.

Cai et al. 2024, arXiv 2401.10774, section 2.3.2. The output does not have the target's
distribution. A drafted token x is accepted if p(x) > min(EPSILON, DELTA exp(-H(p))), where p is the
target's warped distribution and H its entropy in nats. The longest accepted path is kept (ties go
to the first), and the next token is sampled from p.

Shapes: B rows, N drafted tokens, V vocabulary. Logits have one node more than the proposal: the tip
comes first.
"""

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Outcome, Proposal, Readback
from decoding.sampling import noise
from decoding.sampling.warpers import draw
from decoding.verification.nodes import at_nodes, sample_without_draft

EPSILON, DELTA = 0.09, 0.3  # as published


def typical(
    logits_BNV: Tensor,
    proposal: Proposal | None,
    chooser: Chooser,
    readback: Readback = devices.read,
) -> Outcome:
    """Accept the longest path of typical tokens, which the module defines (lossy)."""
    if proposal is None:
        return sample_without_draft(logits_BNV, chooser, readback)
    probs_BNV = chooser.warper.probs(logits_BNV)
    B, N = proposal.tokens_BN.shape
    chain_BN = torch.arange(-1, N - 1, device=probs_BNV.device).expand(B, -1)
    parents_BN = chain_BN if proposal.parents_BN is None else proposal.parents_BN
    above_BN = parents_BN.clamp(min=-1) + 1  # padding is not used
    entropy_BN = torch.special.entr(probs_BNV).sum(-1)
    least_BN = (DELTA * (-entropy_BN).exp()).clamp(max=EPSILON).gather(1, above_BN)
    rows_B1 = torch.arange(B, device=probs_BNV.device)[:, None]
    accepts_BN = probs_BNV[rows_B1, above_BN, proposal.tokens_BN] > least_BN
    drafted, parents, accepts = readback(proposal.tokens_BN, parents_BN, accepts_BN)
    walks = [_longest(parents[b][:count], accepts[b]) for b, count in enumerate(proposal.counts_B)]
    paths_B = [path for path, _ in walks]
    ends_B = [path[-1] + 1 if path else 0 for path in paths_B]
    accepted_B, tested_B = [len(path) for path in paths_B], [tested for _, tested in walks]
    uniforms_B = chooser.uniforms(range(len(accepted_B)), accepted_B, noise.BONUS)
    next_B = draw(at_nodes(probs_BNV, ends_B), uniforms_B).tolist()
    tokens_B = [[*(drafted[b][n] for n in path), next_B[b]] for b, path in enumerate(paths_B)]
    if proposal.parents_BN is None:
        return Outcome(tokens_B, None, accepted_B, tested_B)
    return Outcome(tokens_B, paths_B, accepted_B, tested_B, proposal.drafted(parents))


def _longest(parents: list[int], accepts: list[bool]) -> tuple[list[int], int]:
    """Return the longest path of accepted nodes, and the number of tokens tested along it."""
    best: list[int] = []
    path_to: dict[int, list[int]] = {-1: []}
    for node, parent in enumerate(parents):  # parents precede their children
        if parent in path_to and accepts[node]:
            path_to[node] = [*path_to[parent], node]
            if len(path_to[node]) > len(best):
                best = path_to[node]
    tip = best[-1] if best else -1
    return best, len(best) + (tip in parents)

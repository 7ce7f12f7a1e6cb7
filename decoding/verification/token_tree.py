"""Token verification of trees: recursive rejection among siblings.

Yang et al. 2024, arXiv 2401.06706, section 3.2. This is the eager reference; its device version is
decoding/verification/device_tree.py.

Shapes: B rows, N drafted tokens, R rows that continue, V vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from decoding.interfaces import Chooser, Outcome, Proposal
from decoding.sampling import noise
from decoding.sampling.warpers import draw
from decoding.verification.tail_rejection import verify_children


def token(logits_BNV: Tensor, proposal: Proposal, chooser: Chooser) -> Outcome:
    """Walk from the tip through accepted children, testing siblings by recursive rejection.

    Siblings are point masses, or were sampled without replacement. After a rejection the next
    sibling is tested against the residual of p; if all are rejected, the next token is sampled from
    the last residual. Only logits at nodes that the walk reaches are warped.
    """
    assert proposal.parents_BN is not None
    drafted, parents = proposal.tokens_BN.tolist(), proposal.parents_BN.tolist()
    paths_B: list[list[int]] = [[] for _ in drafted]
    tested_B, next_B = [0] * len(drafted), [0] * len(drafted)
    going, depth = list(range(len(drafted))), 0
    while going:
        at_R = [paths_B[b][-1] + 1 if paths_B[b] else 0 for b in going]
        rows_RV = logits_BNV[going, at_R] if len(drafted) > 1 else logits_BNV[:, at_R[0]]
        ended, weights = [], []
        for b, node, p_V in zip(going, at_R, chooser.warper.probs(rows_RV), strict=True):
            children = [n for n in range(proposal.counts_B[b]) if parents[b][n] == node - 1]
            uniform = partial(_accept_uniform, chooser, b, depth)
            if proposal.q_top is not None and children:
                passed, left_V = verify_children(
                    children, drafted[b], p_V, *proposal.q_top.at(b, node), uniform
                )
            else:
                q_V = None
                if children and proposal.q_BNV is not None:
                    q_V = proposal.q_BNV[b, children[0]]
                passed, left_V = _verify_siblings(children, drafted[b], p_V, q_V, uniform)
            tested_B[b] += bool(children)
            if passed is None:
                ended.append((b, noise.RESIDUAL if children else noise.BONUS))
                weights.append(left_V)
            else:
                paths_B[b].append(passed)
        if ended:
            uniforms = [chooser.uniform(b, depth, purpose) for b, purpose in ended]
            tokens = draw(torch.stack(weights), uniforms).tolist()
            for (b, _), token in zip(ended, tokens, strict=True):
                next_B[b] = token
        going, depth = [b for b in going if len(paths_B[b]) > depth], depth + 1
    tokens_B = [[*(drafted[b][n] for n in path), next_B[b]] for b, path in enumerate(paths_B)]
    return Outcome(tokens_B, paths_B, [len(path) for path in paths_B], tested_B)


def _accept_uniform(chooser: Chooser, row: int, depth: int, node: int) -> float:
    return chooser.uniform(row, depth, noise.ACCEPT, node)


def _verify_siblings(
    children: list[int],
    tokens: list[int],
    p_V: Tensor,
    q_V: Tensor | None,
    uniform: Callable[[int], float],
) -> tuple[int | None, Tensor]:
    """Return the first accepted child, and the residual of p after the children before it.

    p and q are recomputed after every rejection. q_V: None for point masses. uniform: maps a child
    to the number that tests it.
    """
    failed: set[int] = set()
    for child in children:
        token = tokens[child]
        if token in failed:  # nothing was sampled there (`draw_different`)
            continue
        p, q = p_V[token].item(), 1.0 if q_V is None else q_V[token].item()
        if uniform(child) * q < p and q > 0:
            return child, p_V
        p_V, q_V = residual_after_rejection(p_V, q_V, token)
        failed.add(token)
    return None, p_V


def residual_after_rejection(
    p_V: Tensor, q_V: Tensor | None, token: int
) -> tuple[Tensor, Tensor | None]:
    """Return p and q for the next sibling: the residual max(p - q, 0), and q without the token."""
    without_V = p_V.clone() if q_V is None else q_V.clone()
    without_V[token] = 0.0
    residual_V = without_V if q_V is None else (p_V - q_V).clamp_(min=0)
    total = residual_V.sum()
    # p = q up to rounding: see `warpers.residual_or_p`
    residual_V = residual_V / total if total > 0 else p_V
    return residual_V, None if q_V is None else without_V / without_V.sum().clamp(min=1e-30)

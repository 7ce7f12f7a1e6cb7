"""Token verification of trees: recursive rejection among siblings.

Yang et al. 2024, arXiv 2401.06706, section 3.2. This is the eager reference; its batched version is
decoding/verification/batched_tree.py, its device version decoding/verification/device_tree.py.

Shapes: B rows, N drafted tokens, R rows that continue, F rows with a rejected child, V vocabulary.
"""

from collections.abc import Callable, Sequence
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
    children_B = [_children(row[:count]) for row, count in zip(parents, proposal.counts_B)]
    paths_B: list[list[int]] = [[] for _ in drafted]
    tested_B, next_B = [0] * len(drafted), [0] * len(drafted)
    going, depth = list(range(len(drafted))), 0
    while going:
        at_R = [paths_B[b][-1] + 1 if paths_B[b] else 0 for b in going]
        rows_RV = logits_BNV[going, at_R] if len(drafted) > 1 else logits_BNV[:, at_R[0]]
        left_RV = chooser.warper.probs(rows_RV)
        children_R = [children_B[b].get(node - 1, []) for b, node in zip(going, at_R)]
        passed_R: list[int | None] = [None] * len(going)
        uniforms_R = [partial(_accept_uniform, chooser, b, depth) for b in going]
        if proposal.q_top is None:
            q_RV = None
            if proposal.q_BNV is not None:
                q_RV = proposal.q_BNV[going, [nodes[0] if nodes else 0 for nodes in children_R]]
            tokens_R = [drafted[b] for b in going]
            passed_R = _verify_siblings(children_R, tokens_R, left_RV, q_RV, uniforms_R)
        else:
            for r, (b, node, nodes) in enumerate(zip(going, at_R, children_R)):
                if nodes:
                    top = proposal.q_top.at(b, node)
                    passed_R[r], left_RV[r] = verify_children(
                        nodes, drafted[b], left_RV[r], *top, uniforms_R[r]
                    )
        ended = [r for r, passed in enumerate(passed_R) if passed is None]
        for b, nodes, passed in zip(going, children_R, passed_R, strict=True):
            tested_B[b] += bool(nodes)
            if passed is not None:
                paths_B[b].append(passed)
        if ended:
            uniforms = [
                chooser.uniform(going[r], depth, noise.RESIDUAL if children_R[r] else noise.BONUS)
                for r in ended
            ]
            for r, token in zip(ended, draw(left_RV[ended], uniforms).tolist(), strict=True):
                next_B[going[r]] = token
        going, depth = [b for b in going if len(paths_B[b]) > depth], depth + 1
    tokens_B = [[*(drafted[b][n] for n in path), next_B[b]] for b, path in enumerate(paths_B)]
    return Outcome(tokens_B, paths_B, [len(path) for path in paths_B], tested_B)


def _children(parents: Sequence[int]) -> dict[int, list[int]]:
    """Return the children of each node that has any; -1 is the tip."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children


def _accept_uniform(chooser: Chooser, row: int, depth: int, node: int) -> float:
    return chooser.uniform(row, depth, noise.ACCEPT, node)


def _verify_siblings(
    children_R: Sequence[Sequence[int]],
    tokens_R: Sequence[Sequence[int]],
    p_RV: Tensor,
    q_RV: Tensor | None,
    uniforms_R: Sequence[Callable[[int], float]],
) -> list[int | None]:
    """Return each row's first accepted child; make p the residual after the children before it.

    p and q are recomputed in place after every rejection, for all rows at once. q_RV: None for
    point masses. uniforms_R: map a child to the number that tests it.
    """
    passed_R: list[int | None] = [None] * len(children_R)
    failed_R: list[set[int]] = [set() for _ in children_R]
    for place in range(max(map(len, children_R))):
        # nothing was sampled at a token that has failed (`draw_different`)
        rows = [
            r
            for r, nodes in enumerate(children_R)
            if passed_R[r] is None
            and place < len(nodes)
            and tokens_R[r][nodes[place]] not in failed_R[r]
        ]
        tokens = [tokens_R[r][children_R[r][place]] for r in rows]
        p_F = p_RV[rows, tokens].tolist()
        q_F = [1.0] * len(rows) if q_RV is None else q_RV[rows, tokens].tolist()
        for r, token, p, q in zip(rows, tokens, p_F, q_F, strict=True):
            child = children_R[r][place]
            if uniforms_R[r](child) * q < p and q > 0:
                passed_R[r] = child
            else:
                failed_R[r].add(token)
        rejected = [(r, token) for r, token in zip(rows, tokens) if passed_R[r] is None]
        if rejected:
            at, ids = map(list, zip(*rejected))
            q_FV = None if q_RV is None else q_RV[at]
            p_FV, q_FV = residual_after_rejection(
                p_RV[at], q_FV, torch.tensor(ids, device=p_RV.device)
            )
            p_RV[at] = p_FV
            if q_RV is not None and q_FV is not None:
                q_RV[at] = q_FV
    return passed_R


def residual_after_rejection(
    p_FV: Tensor, q_FV: Tensor | None, tokens_F: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return p and q for the next sibling: the residual max(p - q, 0), and q without the token."""
    without_FV = (p_FV if q_FV is None else q_FV).scatter(-1, tokens_F[:, None], 0.0)
    residual_FV = without_FV if q_FV is None else (p_FV - q_FV).clamp_(min=0)
    total_F1 = residual_FV.sum(-1, keepdim=True)
    # p = q up to rounding: see `warpers.residual_or_p`
    residual_FV = torch.where(total_F1 > 0, residual_FV / total_F1, p_FV)
    if q_FV is None:
        return residual_FV, None
    return residual_FV, without_FV / without_FV.sum(-1, keepdim=True).clamp(min=1e-30)

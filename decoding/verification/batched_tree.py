"""Batched version of `token` verification of trees: no loop over rows.

The eager version (token_tree.py) takes fewer operations for few rows, and Python for every row and
node. Both use the same numbers and the same float64 comparisons, and have the same outcome.

Shapes: B rows, N drafted tokens, P = N + 1 nodes with the tip, R rows that continue, F rows whose
child is tested, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoding.interfaces import NO_NODE, Chooser, Outcome, Proposal
from decoding.sampling import noise
from decoding.sampling.warpers import draw
from decoding.verification import token_tree

Integers = NDArray[np.int64]
TIP = -1  # the node before the first drafted ones; as a result, no node


def token(logits_BNV: Tensor, proposal: Proposal, chooser: Chooser) -> Outcome:
    """Verify trees of point masses or of tokens sampled from `q_BNV` by the rule of token_tree."""
    nodes = Nodes.of(proposal)
    B = len(nodes.tokens_BN)
    tokens_B: list[list[int]] = [[] for _ in range(B)]
    paths_B: list[list[int]] = [[] for _ in range(B)]
    tested_B, at_B = np.zeros(B, np.int64), np.full(B, TIP)  # at_B: the last accepted nodes
    going, depth = np.arange(B), 0
    while len(going):
        at_R = at_B[going]
        left_RV = chooser.warper.probs(_at(logits_BNV, going, at_R + 1))
        starts_R, counts_R = nodes.starts_BP[going, at_R + 1], nodes.counts_BP[going, at_R + 1]
        q_RV = None
        if proposal.q_BNV is not None:
            first_R = nodes.order_BN[going, starts_R % nodes.order_BN.shape[1]]
            q_RV = _at(proposal.q_BNV, going, first_R)
        uniforms = partial(chooser.uniforms, depths=depth)
        passed_R = _verify_siblings(nodes, going, starts_R, counts_R, left_RV, q_RV, uniforms)
        tested_B[going] += counts_R > 0
        is_ended_R = passed_R == TIP
        ended = np.flatnonzero(is_ended_R)
        if len(ended):
            purposes = np.where(counts_R[ended] > 0, noise.RESIDUAL, noise.BONUS)
            numbers = chooser.uniforms(going[ended], depth, purposes)
            next_tokens = draw(left_RV[_rows(ended, len(left_RV))], numbers).tolist()
            for b, token in zip(going[ended].tolist(), next_tokens, strict=True):
                tokens_B[b].append(token)
        going, passed_R, depth = going[~is_ended_R], passed_R[~is_ended_R], depth + 1
        at_B[going] = passed_R
        accepted = nodes.tokens_BN[going, passed_R].tolist()
        for b, node, token in zip(going.tolist(), passed_R.tolist(), accepted, strict=True):
            paths_B[b].append(node)
            tokens_B[b].append(token)
    return Outcome(tokens_B, paths_B, [len(path) for path in paths_B], tested_B.tolist())


@dataclass(frozen=True)
class Nodes:
    """The drafted nodes of each row on the host."""

    tokens_BN: Integers
    order_BN: Integers  # the nodes, sorted by their parents
    starts_BP: Integers  # place of each node's first child in that order
    counts_BP: Integers  # number of its children
    is_repeat_BN: NDArray[np.bool_]  # whether an earlier sibling has the same token

    @classmethod
    def of(cls, proposal: Proposal) -> "Nodes":
        """Return the nodes of a tree, without padding and nodes past a row's count."""
        assert proposal.parents_BN is not None
        tokens_BN, parents_BN = proposal.tokens_BN.numpy(), proposal.parents_BN.numpy()
        N = tokens_BN.shape[1]
        is_real_BN = np.arange(N) < np.array(proposal.counts_B)[:, None]
        parents_BN = np.where(is_real_BN, parents_BN, NO_NODE)
        counts_BP = (parents_BN[:, None] == np.arange(-1, N)[:, None]).sum(2)
        ends_BP = counts_BP.cumsum(1) + (parents_BN == NO_NODE).sum(1)[:, None]
        # padding has siblings as well, which are not tested
        pairs_BN = parents_BN * (1 + tokens_BN.max()) + tokens_BN
        is_repeat_BN = np.tril(pairs_BN[:, :, None] == pairs_BN[:, None], -1).any(2)
        order_BN = parents_BN.argsort(1, kind="stable")
        return cls(tokens_BN, order_BN, ends_BP - counts_BP, counts_BP, is_repeat_BN)


def _rows(rows: Integers, of: int) -> Tensor | slice:
    """Return the index of some of `of` rows; a slice, which copies nothing, if it is all."""
    return slice(None) if len(rows) == of else torch.from_numpy(rows)


def _at(values_BNV: Tensor, rows_R: Integers, nodes_R: Integers) -> Tensor:
    """Return values (R, V) at one node of each of these rows."""
    return values_BNV[torch.from_numpy(rows_R), torch.from_numpy(nodes_R)]


def _verify_siblings(
    nodes: Nodes,
    going_R: Integers,
    starts_R: Integers,
    counts_R: Integers,
    p_RV: Tensor,
    q_RV: Tensor | None,
    uniforms: Callable[..., Any],
) -> Integers:
    """Return each row's first accepted child, or TIP; make p the residual after those before it.

    p and q are recomputed in place after every rejection, for all rows at once. going_R: the rows
    of the batch. starts_R, counts_R: their children (`Nodes`). q_RV: None for point masses.
    uniforms: `Chooser.uniforms` at this depth.
    """
    passed_R = np.full(len(going_R), TIP)
    for place in range(counts_R.max()):
        at_F = np.flatnonzero((passed_R == TIP) & (place < counts_R))
        children_F = nodes.order_BN[going_R[at_F], starts_R[at_F] + place]
        # nothing was sampled at a token that has failed (`draw_different`)
        is_new_F = ~nodes.is_repeat_BN[going_R[at_F], children_F]
        at_F, children_F = at_F[is_new_F], children_F[is_new_F]
        if not len(at_F):
            continue
        rows_F = going_R[at_F]
        tokens_F = torch.from_numpy(nodes.tokens_BN[rows_F, children_F])
        tested = torch.from_numpy(at_F), tokens_F
        p_F = p_RV[tested].double().numpy()
        q_F = np.ones(len(p_F)) if q_RV is None else q_RV[tested].double().numpy()
        numbers_F = uniforms(rows_F, purposes=noise.ACCEPT, nodes=children_F)
        is_passed_F = (numbers_F * q_F < p_F) & (q_F > 0)
        passed_R[at_F[is_passed_F]] = children_F[is_passed_F]
        is_failed_F = ~is_passed_F
        if is_failed_F.any():
            at = _rows(at_F[is_failed_F], len(p_RV))
            p_RV[at], q_FV = token_tree.residual_after_rejection(
                p_RV[at],
                None if q_RV is None else q_RV[at],
                tokens_F[_rows(np.flatnonzero(is_failed_F), len(tokens_F))],
            )
            if q_RV is not None and q_FV is not None:
                q_RV[at] = q_FV
    return passed_R

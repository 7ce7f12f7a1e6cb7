"""`token` verification of trees where the host runs ahead of the device: the device is asked twice a round, whatever the tree.

The eager twin is `verify._recursive`, which asks at every node. Here the few numbers that decide are read at once: the target's probability of
each drafted token, and where tokens were drawn, its probabilities of all candidates that they were drawn from. A failed sibling changes p at
these and nowhere else but for the scale, so the host walks the tree with a handful of numbers; what it leaves of p is then drawn from on the
device. Same uniforms, same tests, same outcome up to rounding.

Shapes: B rows, N drafted tokens, V vocabulary, P nodes with children, K candidates. Logits have one node more than the proposal: the tip.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import cuda, noise
from decoding.chooser import Chooser
from decoding.drafter import Outcome, Proposal
from decoding.sampling import draw_at


@dataclass(slots=True)
class Residual:
    """What failed siblings left of p at one node, not normalised: numbers in place of p's at some ids, p itself at all others."""

    weights: dict[int, float]
    total: float = 1.0

    def fail(self, token: int, q: dict[int, float] | None) -> None:
        """A child failed; q: of its turn, None for a point mass."""
        if q is None:
            self.total -= self.weights[token]
            self.weights[token] = 0.0
            return
        before = self.total
        for other, share in q.items():
            kept = max(self.weights[other] - before * share, 0.0)
            self.total += kept - self.weights[other]
            self.weights[other] = kept


# (row, node, its children) -> p at the node, and what the children were drawn from, or None for point masses.
Start = Callable[[int, int, Sequence[int]], tuple[Residual, dict[int, float] | None]]


def token(logits_BNV: Tensor, proposal: Proposal, chooser: Chooser) -> Outcome:
    """See `verify.token`. The proposal is a tree of point masses, or has `q_top`."""
    assert proposal.parents_BN is not None and proposal.q_BNV is None
    probs_BNV = chooser.warper.probs(logits_BNV)
    if proposal.q_top is None:
        walks = _point_masses(probs_BNV, proposal, chooser)
    else:
        walks = _drawn(probs_BNV, proposal, chooser)
    return _outcome(probs_BNV, walks, chooser)


@dataclass(slots=True)
class _Walk:
    """One row's way through its tree."""

    path: list[int]
    tokens: list[int]
    has_children: bool  # of the node where it ended
    residual: Residual


def _point_masses(probs_BNV: Tensor, proposal: Proposal, chooser: Chooser) -> list[_Walk]:
    assert proposal.parents_BN is not None
    rows_B1 = torch.arange(len(probs_BNV), device=probs_BNV.device)[:, None]
    p_BN = probs_BNV[rows_B1, proposal.parents_BN + 1, proposal.tokens_BN]
    drafted, parents, p = cuda.read(proposal.tokens_BN, proposal.parents_BN, p_BN)

    def start(row: int, node: int, children: Sequence[int]) -> tuple[Residual, None]:
        return Residual({drafted[row][child]: p[row][child] for child in children}), None

    return [_walk(b, drafted[b], parents[b][:count], start, chooser) for b, count in enumerate(proposal.counts_B)]


def _drawn(probs_BNV: Tensor, proposal: Proposal, chooser: Chooser) -> list[_Walk]:
    assert proposal.parents_BN is not None and proposal.q_top is not None
    ids_BPK, q_BPK = proposal.q_top.ids_BPK, proposal.q_top.probs_BPK
    p_BPK = probs_BNV[:, : ids_BPK.shape[1]].gather(2, ids_BPK[:, : probs_BNV.shape[1]])
    drafted, parents, ids, q, p = cuda.read(proposal.tokens_BN, proposal.parents_BN, ids_BPK, q_BPK, p_BPK)

    def start(row: int, node: int, children: Sequence[int]) -> tuple[Residual, dict[int, float] | None]:
        if not children:
            return Residual({}), None
        known = ids[row][node + 1]
        shares = dict(zip(known, q[row][node + 1], strict=True))
        return Residual(dict(zip(known, p[row][node + 1], strict=True))), shares

    return [_walk(b, drafted[b], parents[b][:count], start, chooser) for b, count in enumerate(proposal.counts_B)]


def _walk(row: int, tokens: list[int], parents: list[int], start: Start, chooser: Chooser) -> _Walk:
    """From the tip to where the target goes on by itself."""
    path: list[int] = []
    children_of: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children_of.setdefault(parent, []).append(node)
    while True:
        node, depth = path[-1] if path else -1, len(path)
        children = children_of.get(node, [])
        residual, q = start(row, node, children)
        for child in children:
            id_ = tokens[child]
            chance = 1.0 if q is None else q[id_]
            kept = residual.weights[id_] / residual.total if residual.total > 0 else 0.0
            if chooser.uniform(row, depth, noise.ACCEPT, child) * chance < kept and chance > 0:
                path.append(child)
                break
            residual.fail(id_, q)
            if q is not None:
                q = _without(q, id_)
        if len(path) == depth:
            return _Walk(path, [tokens[n] for n in path], bool(children), residual)


def _without(q: dict[int, float], token: int) -> dict[int, float]:
    """q of the next sibling: the drawn token cannot be drawn again."""
    rest = sum(share for other, share in q.items() if other != token)
    return {other: share / rest if other != token and rest > 0 else 0.0 for other, share in q.items()}


def _outcome(probs_BNV: Tensor, walks: list[_Walk], chooser: Chooser) -> Outcome:
    """Draw the token after the accepted ones from what is left of p, and read it."""
    device, V = probs_BNV.device, probs_BNV.shape[-1]
    uniforms, ends = [], []
    for b, walk in enumerate(walks):
        purpose = noise.RESIDUAL if walk.has_children else noise.BONUS
        uniforms.append([chooser.uniform(b, len(walk.path), purpose)])
        ends.append(walk.path[-1] + 1 if walk.path else 0)
    # p = q up to rounding leaves no residual, and the failed test was one of probability zero: then p itself is right.
    left = [list(walk.residual.weights.items()) if walk.residual.total > 0 else [] for walk in walks]
    most = max(1, max(len(pairs) for pairs in left))
    padded = [pairs + [(V, 0.0)] * (most - len(pairs)) for pairs in left]
    ids_BK = cuda.tensor([[id_ for id_, _ in pairs] for pairs in padded], device)
    values_BK = cuda.tensor([[value for _, value in pairs] for pairs in padded], device, probs_BNV.dtype)
    p_BV = probs_BNV[torch.arange(len(walks), device=device), cuda.tensor(ends, device)]
    weights_BV = F.pad(p_BV, (0, 1)).scatter_(1, ids_BK, values_BK)[:, :V]
    (next_B,) = cuda.read(draw_at(weights_BV, cuda.tensor(uniforms, device, torch.float64)))
    tokens_B = [[*walk.tokens, last] for walk, last in zip(walks, next_B, strict=True)]
    paths_B = [walk.path for walk in walks]
    tested_B = [len(walk.path) + walk.has_children for walk in walks]
    return Outcome(tokens_B, paths_B, [len(path) for path in paths_B], tested_B)

"""Device version of `token` verification of trees: one wait per round for any tree.

The eager version (token_tree.py) waits at every node. Here the device computes the numbers of all
nodes at once, and the host then walks the tree. Each node needs the acceptance probability of each
child, given that its earlier siblings were rejected, and the token that follows if all children are
rejected. This token is sampled at every node before the walk by one uniform per row, which is valid
because the end of the walk depends on other uniforms only.

- Point masses: a rejected child removes its probability from p, so the rest is known before any
  test.
- Children sampled from few candidates (`Proposal.q_top`): rejections change p at the candidates
  and at all other tokens together, by numbers that the host computes along the walk
  (decoding/verification/tail_rejection.py). The device samples from all other tokens twice, from p
  and from the part of p that exceeds q, and the host chooses between the two.
- Children sampled from the whole vocabulary (`Proposal.q_BNV`): the device computes all rejections
  for all nodes at once, child by child.

The tests and their uniforms equal the eager version's, so the path is equal up to rounding; the
token after it is sampled by another uniform.

Rounding never leads to a token with p = 0: a subtraction leaves no weight where p is 0, and a
rejected child has none. With point masses, whose p is not reduced, one of the siblings is accepted
if they hold all of p.

Shapes: B rows, N drafted tokens, V vocabulary, P = N + 1 nodes with the tip, K candidates, S
children of a node, Q nodes with candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.interfaces import NO_NODE, Chooser, Outcome, Proposal, Readback
from decoding.sampling import noise
from decoding.sampling.warpers import draw_at, draw_from, residual_or_p
from decoding.verification.tail_rejection import TailRejection, tail_ratio


class NodeTest(Protocol):
    """The tests of one node's children, in their order."""

    def acceptance_probability(self, child: int) -> float:
        """Return this child's acceptance probability, given that earlier siblings were rejected."""
        ...

    def reject(self, child: int, uniform: float) -> bool:
        """Record that this uniform rejected the child; return whether the next one is tested."""
        ...

    def next_token(self, uniform: float) -> int:
        """Return the token that follows when no child is accepted."""
        ...


# (row, node, its children) -> the node's tests; node -1 is the tip
NodeTests = Callable[[int, int, list[int]], NodeTest]


def token(
    logits_BPV: Tensor, proposal: Proposal, chooser: Chooser, readback: Readback = devices.read
) -> Outcome:
    """Verify a tree by the rule of token_tree.py, with one wait."""
    probs_BPV = chooser.warper.probs(logits_BPV)
    # for rows without a draft
    ends_B = chooser.uniforms(range(len(probs_BPV)), 0, noise.BONUS)
    ends_B11 = devices.tensor(ends_B, probs_BPV.device, torch.float64)[:, None, None]
    make_tests = _point_mass_tests
    if proposal.q_BNV is not None:
        make_tests = _full_vocabulary_tests
    elif proposal.q_top is not None:
        make_tests = _candidate_tests
    drafted, parents, node_tests = make_tests(probs_BPV, ends_B11, proposal, readback)
    paths_B, tokens_B, tested_B = [], [], []
    for b, count in enumerate(proposal.counts_B):
        path, tested, following = _walk(b, parents[b][:count], node_tests, chooser)
        paths_B.append(path)
        tokens_B.append([*(drafted[b][node] for node in path), following])
        tested_B.append(tested)
    return Outcome(
        tokens_B, paths_B, [len(path) for path in paths_B], tested_B, proposal.drafted(parents)
    )


def _walk(
    row: int, parents: list[int], node_tests: NodeTests, chooser: Chooser
) -> tuple[list[int], int, int]:
    """Walk from the tip until no child is accepted.

    Returns the path, the number of tokens tested along it, and the token that follows.
    """
    path: list[int] = []
    children_of: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children_of.setdefault(parent, []).append(node)
    while True:
        depth, here = len(path), path[-1] if path else -1
        children = children_of.get(here, [])
        node_test = node_tests(row, here, children)
        for child in children:
            uniform = chooser.uniform(row, depth, noise.ACCEPT, child)
            if uniform < node_test.acceptance_probability(child):
                path.append(child)
                break
            if not node_test.reject(child, uniform):
                break
        if len(path) == depth:
            following = node_test.next_token(chooser.uniform(row, 0, noise.RESIDUAL))
            return path, depth + bool(children), following


@dataclass(slots=True)
class PointMassNode:
    """A node whose children are point masses."""

    # tokens of all nodes
    tokens: list[int]
    # token -> p of the children that are not rejected yet
    untested: dict[int, float]
    # p of all other tokens
    rest: float
    # the token that follows if all children are rejected
    follows: int

    def acceptance_probability(self, child: int) -> float:
        p = self.untested.get(self.tokens[child], 0.0)
        # A sum of the rest: 1 minus the rejected probabilities has rounding errors, by which the
        # last child could be rejected although the children hold all of p.
        return p / (self.rest + sum(self.untested.values())) if p > 0 else 0.0

    def reject(self, child: int, uniform: float) -> bool:
        self.untested.pop(self.tokens[child], None)
        return True

    def next_token(self, uniform: float) -> int:
        return self.follows


def _point_mass_tests(
    probs_BPV: Tensor, ends_B11: Tensor, proposal: Proposal, readback: Readback
) -> tuple[list[list[int]], list[list[int]], NodeTests]:
    """Return tokens, parents and node tests of a tree of point masses."""
    assert proposal.parents_BN is not None
    real_BN = _is_node(proposal)
    N = real_BN.shape[1]
    own_BN = torch.arange(1, N + 1, device=real_BN.device).expand_as(real_BN)
    # a node that was not drafted points at a row of the table that no walk reads
    above_BN = torch.where(real_BN, proposal.parents_BN + 1, own_BN)
    flat_BN = above_BN * probs_BPV.shape[2] + proposal.tokens_BN
    p_BN = probs_BPV.flatten(1).gather(1, flat_BN)
    left_BPV = probs_BPV.flatten(1).scatter(1, flat_BN, 0.0).view_as(probs_BPV)
    follows_BP = draw_at(residual_or_p(left_BPV, probs_BPV), ends_B11.expand(-1, N + 1, 1))
    rest_BP = left_BPV.sum(-1, dtype=torch.float64)
    drafted, parents, p, rest, follows = readback(
        proposal.tokens_BN, proposal.parents_BN, p_BN, rest_BP, follows_BP
    )

    def node_tests(row: int, node: int, children: list[int]) -> NodeTest:
        untested = {drafted[row][child]: p[row][child] for child in children}
        return PointMassNode(drafted[row], untested, rest[row][node + 1], follows[row][node + 1])

    return drafted, parents, node_tests


@dataclass(slots=True)
class PrecomputedNode:
    """A node whose tests the device has computed completely."""

    # acceptance probabilities of all nodes
    chances: list[float]
    # the token that follows if all children are rejected
    follows: int

    def acceptance_probability(self, child: int) -> float:
        return self.chances[child]

    def reject(self, child: int, uniform: float) -> bool:
        return True  # the next sibling's probability includes this rejection

    def next_token(self, uniform: float) -> int:
        return self.follows


@dataclass(slots=True)
class CandidateNode:
    """A node whose children were sampled from few candidates, perhaps with a tail."""

    # tokens of all nodes
    tokens: list[int]
    rejection: TailRejection
    # token sampled from p in the tail
    other: int
    # token sampled from the part of p that exceeds q in the tail
    residual_tail_token: int
    # p of the candidates and the tail before any test
    p: list[float]

    def acceptance_probability(self, child: int) -> float:
        return self.rejection.acceptance_probability(self.tokens[child])

    def reject(self, child: int, uniform: float) -> bool:
        return self.rejection.reject(self.tokens[child], uniform)

    def next_token(self, uniform: float) -> int:
        rejection = self.rejection
        if rejection.rejected_in_tail:
            return self.residual_tail_token
        weights = rejection.p if sum(rejection.p) > 0 else self.p  # as in `residual_or_p`
        point, drawn = uniform * sum(weights), self.other
        for token, weight in zip(rejection.ids, weights[:-1], strict=False):
            point -= weight
            if point < 0:
                return token
            if weights[-1] == 0 and weight > 0:
                drawn = token  # rounding may leave `point` above all weights
        return drawn


def _candidate_tests(
    probs_BPV: Tensor, ends_B11: Tensor, proposal: Proposal, readback: Readback
) -> tuple[list[list[int]], list[list[int]], NodeTests]:
    """Return tokens, parents and node tests of a tree whose children have few candidates."""
    assert proposal.parents_BN is not None and proposal.q_top is not None
    P, last = probs_BPV.shape[1], probs_BPV.shape[2] - 1
    q_top = proposal.q_top
    ids_BQK, q_BQK, tail_BPV = q_top.ids_BPK[:, :P], q_top.probs_BPK[:, :P], q_top.tail_BPV
    Q, has_tail = ids_BQK.shape[1], tail_BPV is not None  # nodes past Q have no children
    p_BQK = probs_BPV.gather(2, ids_BQK)
    # A node without children ignores its candidates, since it may only have some because another
    # row of the batch drafts deeper.
    any_BP = draw_at(probs_BPV, ends_B11.expand(-1, P, 1))
    others_BQV = probs_BPV[:, :Q].scatter_(2, ids_BQK[:, :, :-1] if has_tail else ids_BQK, 0.0)
    cumulative_BQV = others_BQV.cumsum(-1, dtype=torch.float64)
    other_BQ = draw_from(cumulative_BQV, ends_B11.expand(-1, Q, 1))
    wanted = [ids_BQK, q_BQK, p_BQK, cumulative_BQV[:, :, -1], other_BQ, any_BP]
    if tail_BPV is not None:
        tail_BQV = tail_BPV[:, :P]
        sum_BQ1 = tail_BQV.sum(-1, keepdim=True)
        scale_BQ1 = (cumulative_BQV[:, :, -1:].to(sum_BQ1.dtype) / sum_BQ1).nan_to_num_(
            nan=0.0, posinf=0.0
        )
        surplus_BQV = torch.addcmul(others_BQV, tail_BQV, scale_BQ1, value=-1).clamp_(min=0)
        residual_tail_BQ = draw_at(surplus_BQV, ends_B11.expand(-1, Q, 1))
        wanted += [
            tail_BQV.gather(2, ids_BQK[:, :, -1:]).squeeze(2),
            sum_BQ1.squeeze(2),
            residual_tail_BQ,
        ]
    drafted, parents, ids, q, p, others, other, any_, *of_tail = readback(
        proposal.tokens_BN, proposal.parents_BN, *wanted
    )

    def node_tests(row: int, node: int, children: list[int]) -> NodeTest:
        place = node + 1
        if not children:
            return PrecomputedNode([], any_[row][place])
        candidate_p, all_others = p[row][place], others[row][place]
        shares = [max(share, 0.0) for share in q[row][place]]
        # a token past the vocabulary has no weight and is not used
        drawn = residual_tail_token = min(other[row][place], last)
        within = 0.0
        if has_tail:
            drawn_q, sum_q, left = (each[row][place] for each in of_tail)
            within = tail_ratio(candidate_p.pop(), all_others, drawn_q, sum_q)
            # p = q up to rounding leaves nothing
            residual_tail_token = left if left <= last else drawn
        else:
            shares.append(0.0)
        rejection = TailRejection(ids[row][place], [*candidate_p, all_others], shares, within)
        return CandidateNode(drafted[row], rejection, drawn, residual_tail_token, rejection.p)

    return drafted, parents, node_tests


def _full_vocabulary_tests(
    probs_BPV: Tensor, ends_B11: Tensor, proposal: Proposal, readback: Readback
) -> tuple[list[list[int]], list[list[int]], NodeTests]:
    """Return tokens, parents and node tests of a tree sampled from the full vocabulary.

    All nodes are tested together, one child of each at a time.
    """
    assert proposal.parents_BN is not None and proposal.q_BNV is not None
    children_BPS, ranks_BN = _children_by_node(proposal)
    N = ranks_BN.shape[1]
    first_BP1 = children_BPS[:, :, :1].clamp(max=N - 1)
    left_BPV = probs_BPV.double()
    q_BPV = proposal.q_BNV.gather(1, first_BP1.expand(-1, -1, left_BPV.shape[2])).double()
    tokens_BPS = (
        F.pad(proposal.tokens_BN, (0, 1)).gather(1, children_BPS.flatten(1)).view_as(children_BPS)
    )
    # nothing was sampled where a sibling repeats an earlier one (`draw_different`)
    again_BPS = (tokens_BPS[..., None] == tokens_BPS[..., None, :]).tril_(-1).any(-1)
    has_BPS = (children_BPS < N) & ~again_BPS
    chances = []
    for s in range(children_BPS.shape[2]):
        token_BP1 = tokens_BPS[:, :, s : s + 1]
        scale_BP1 = left_BPV.sum(-1, keepdim=True) / q_BPV.sum(-1, keepdim=True)
        chance_BP1 = left_BPV.gather(2, token_BP1) / (scale_BP1 * q_BPV.gather(2, token_BP1))
        has_BP1 = has_BPS[:, :, s : s + 1]
        # a token without q was not sampled
        chances.append(chance_BP1.nan_to_num(nan=0.0, posinf=0.0) * has_BP1)
        scale_BP1 = torch.where(has_BP1, scale_BP1, 0.0).nan_to_num(nan=0.0, posinf=0.0)
        left_BPV = torch.addcmul(left_BPV, scale_BP1, q_BPV, value=-1).clamp_(min=0)
        q_BPV = q_BPV.scatter(2, token_BP1, 0.0)
    above_BN1 = (proposal.parents_BN + 1).clamp(min=0)[:, :, None]
    chance_BNS = torch.cat(chances, 2).gather(1, above_BN1.expand(-1, -1, len(chances)))
    chance_BN = chance_BNS.gather(2, ranks_BN[:, :, None]).squeeze(2)
    follows_BP = draw_at(residual_or_p(left_BPV, probs_BPV), ends_B11.expand(-1, N + 1, 1))
    drafted, parents, chance, follows = readback(
        proposal.tokens_BN, proposal.parents_BN, chance_BN, follows_BP
    )

    def node_tests(row: int, node: int, children: list[int]) -> NodeTest:
        return PrecomputedNode(chance[row], follows[row][node + 1])

    return drafted, parents, node_tests


def _children_by_node(proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Return the children (B, P, S) of every node and each node's index (B, N) among its siblings.

    Missing children are N.
    """
    assert proposal.parents_BN is not None
    B, N = proposal.parents_BN.shape
    device, S = proposal.parents_BN.device, min(proposal.siblings or N, N)
    real_BN = _is_node(proposal)
    # one more place, for padding
    above_BN = torch.where(real_BN, proposal.parents_BN + 1, N + 1)
    earlier_NN = torch.ones(N, N, dtype=torch.bool, device=device).tril(-1)
    ranks_BN = ((above_BN[:, :, None] == above_BN[:, None]) & earlier_NN).sum(-1).clamp_(max=S - 1)
    children_BX = torch.full((B, (N + 2) * S), N, device=device)
    children_BX.scatter_(1, above_BN * S + ranks_BN, torch.arange(N, device=device).expand(B, N))
    return children_BX.view(B, N + 2, S)[:, : N + 1], ranks_BN


def _is_node(proposal: Proposal) -> Tensor:
    """Return a mask (B, N) of the nodes that were drafted and are verified."""
    assert proposal.parents_BN is not None
    counts_B1 = devices.tensor(proposal.counts_B, proposal.parents_BN.device)[:, None]
    places_N = torch.arange(proposal.parents_BN.shape[1], device=proposal.parents_BN.device)
    return (places_N < counts_B1) & (proposal.parents_BN > NO_NODE)

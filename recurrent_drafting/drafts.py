"""One round's draft: the choice of beams, the frontier of each step, and the proposal.

The rows' plans set how much is drafted (recurrent_drafting/plans.py). Fixed drafts continue from
all beams to the last step. With costs, a step starts from as many of the likeliest beams as the
plan chooses; the other beams stay nodes without children. Some planners read the chances of a step
on the host; the others receive them after the round, with the accepted lengths.

Shapes: B rows, L steps, M = L W nodes searched, N nodes proposed, P beams that a step starts from,
W beams, X any size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Proposal, TopRows
from recurrent_drafting.beams import Beams, Choose, Frontier, Step, TopBeams
from recurrent_drafting.head import Head
from recurrent_drafting.plans import BeamPlan, Fixed, Plan
from recurrent_drafting.prefix_tree import Tree, edges, mask_survivors, pack
from recurrent_drafting.sampled_beams import Admit, SampledBeams, SampledChain

# On a GPU the tokens of a forward, nodes and tip, come in multiples of this number: few widths are
# recorded, and products fill their tiles.
TOKENS_STEP = 8


class Draft(ABC):
    """Base class of top-k and sampled drafts."""

    choose: Choose

    def __init__(self, head: Head, width: int, chooser: Chooser, plans_B: Sequence[Plan]) -> None:
        self.head, self.width, self.chooser = head, width, chooser
        self.depths_B = [plan.depth for plan in plans_B]
        self.rooms_B = list_rooms(plans_B)
        # the plans of all rows or of none
        self.by_cost_B: list[BeamPlan] = [plan for plan in plans_B if not isinstance(plan, Fixed)]

    @property
    def narrow(self) -> Callable[[Step], Frontier | None] | None:
        """The function that chooses each step's frontier; None to continue from all beams."""
        return self._narrow if self.by_cost_B else None

    @abstractmethod
    def _narrow(self, step: Step) -> Frontier | None:
        """Return the beams of a step that the next one starts from; None ends the search."""

    @abstractmethod
    def proposal(self, beams: Beams) -> Proposal:
        """Return the proposal, a chain or a tree of the nodes."""

    def _read(self, chances_BW: Callable[[], Tensor]) -> Sequence[Sequence[float]]:
        """Return the chances of a step on the host; empty for planners that do not read."""
        if not self.by_cost_B[0].reads:
            return [()] * len(self.by_cost_B)
        (read_BW,) = devices.read(chances_BW())
        return list(read_BW)

    def _count_starts(self, chances_BW: Sequence[Sequence[float]]) -> list[int]:
        """Return the number of beams that each row's next step starts from."""
        pairs = zip(self.by_cost_B, chances_BW, strict=True)
        return [plan.start_from(chances_W) for plan, chances_W in pairs]

    def _finish(
        self, proposal: Proposal, beams: Beams, chances_BLW: Callable[[], Tensor]
    ) -> Proposal:
        """Add the draft's size, and the readback of the chances of each step, likeliest first."""
        proposal.steps, proposal.frontiers = len(beams.steps), beams.num_started
        if self.by_cost_B and not self.by_cost_B[0].reads:
            proposal.readback = lambda _: (chances_BLW(),)
        return proposal


def list_rooms(plans_B: Sequence[Plan]) -> list[int] | None:
    """Return the largest number of nodes that each row proposes; None if all are proposed."""
    rooms = [plan.room for plan in plans_B if isinstance(plan, Fixed) and plan.room is not None]
    return rooms or None


def count_nodes(counts_B: Sequence[int], most: int, device: torch.device) -> int:
    """Return the number of nodes in the target's forward, at most `most`.

    On a GPU, nodes and tip are rounded up to a multiple of TOKENS_STEP.
    """
    nodes = max(counts_B)
    if not devices.runs_ahead(device):
        return nodes
    return min(-(-(nodes + 1) // TOKENS_STEP) * TOKENS_STEP - 1, most)


def tree_proposal(tree: Tree, counts_B: list[int] | None) -> Proposal:
    """Return the proposal of a tree.

    counts_B: the number of nodes of each row, or a larger number, which padding fills; None reads
    the numbers from the device.
    """
    if counts_B is None:
        (counts_B,) = devices.read(tree.counts_B)
        assert counts_B is not None
    N = count_nodes(counts_B, tree.tokens_BM.shape[1], tree.tokens_BM.device)
    return Proposal(tree.tokens_BM[:, :N], counts_B, tree.parents_BM[:, :N])


def fixed_proposal(tree: Tree, rooms_B: list[int] | None) -> Proposal:
    """Return the proposal of fixed beams.

    rooms_B: see `list_rooms`. None proposes all nodes, whose numbers are read first; otherwise the
    numbers are read after the round.
    """
    proposal = tree_proposal(tree, rooms_B)
    if rooms_B is not None:
        proposal.readback = lambda _: (tree.counts_B,)
    return proposal


def pack_nodes(beams: Beams, keep_BM: Tensor) -> Tree:
    """Return the tree of the nodes in a mask."""
    return pack(beams.tokens_BLW.flatten(1), edges(beams.parents_BLW), keep_BM)


def pack_last_beams(beams: Beams, depths_B: Tensor) -> Tree:
    """Return the tree of the beams of each row's last step."""
    return pack_nodes(beams, mask_survivors(beams.parents_BLW, depths_B))


def mask_largest(values_BM: Tensor, counts_B: Sequence[int]) -> Tensor:
    """Return a mask (B, M) of the counts_B largest values of each row; ties go to the first."""
    counts_B1 = devices.tensor(list(counts_B), values_BM.device)[:, None]
    if values_BM.shape[1] == 1:
        return counts_B1 > 0
    order_BM = values_BM.sort(dim=-1, descending=True, stable=True).indices
    ranks_BM = torch.arange(order_BM.shape[1], device=order_BM.device).expand_as(order_BM)
    return torch.empty_like(order_BM).scatter_(1, order_BM, ranks_BM) < counts_B1


def keep_first(values_BLX: Tensor, counts_B: Sequence[int], other: float) -> Tensor:
    """Return values (B, L) or (B, L, X) with `other` after the first counts_B along L."""
    L = values_BLX.shape[1]
    if min(counts_B) == L:
        return values_BLX
    after_BL = (
        torch.arange(L, device=values_BLX.device)
        >= devices.tensor(list(counts_B), values_BLX.device)[:, None]
    )
    return values_BLX.masked_fill(after_BL if values_BLX.ndim == 2 else after_BL[:, :, None], other)


class TopDraft(Draft):
    """A draft of the likeliest beams, which are point masses.

    The tree holds the fixed beams of the last step; with costs, it holds the nodes that pay.
    """

    def __init__(self, head: Head, width: int, chooser: Chooser, plans_B: Sequence[Plan]) -> None:
        super().__init__(head, width, chooser, plans_B)
        temperature = 1.0 if chooser.warper.greedy else chooser.warper.temperature
        coupled = chooser if chooser.rule == "coupled" else None
        self.choose = TopBeams(head, width, temperature, coupled, scored=bool(self.by_cost_B))

    def _narrow(self, step: Step) -> Frontier | None:
        scores_BW = step.scores_BW
        assert scores_BW is not None
        chances_BW = self._read(scores_BW.exp)
        for plan, chances_W in zip(self.by_cost_B, chances_BW, strict=True):
            plan.add(chances_W)
        counts_B = self._count_starts(chances_BW)
        P = max(counts_B)  # the likeliest beams are the first
        return Frontier(keep_first(scores_BW[:, :P], counts_B, float("-inf"))) if P else None

    def proposal(self, beams: Beams) -> Proposal:
        counts_B = [plan.nodes for plan in self.by_cost_B] or self.depths_B
        if self.width == 1:
            proposal = Proposal(beams.tokens_BLW[:, : max(counts_B), 0], counts_B)
        elif self.by_cost_B:
            keep_BM = mask_largest(self._scores(beams).flatten(1), counts_B)
            proposal = tree_proposal(pack_nodes(beams, keep_BM), counts_B)
        else:
            depths_B = devices.tensor(self.depths_B, beams.steps[0].tokens_BW.device)
            proposal = fixed_proposal(pack_last_beams(beams, depths_B), self.rooms_B)
        return self._finish(proposal, beams, lambda: self._scores(beams).exp())

    def _scores(self, beams: Beams) -> Tensor:
        """Return the nodes' scores (B, L, W), -inf after a row's last step."""
        scores = [step.scores_BW for step in beams.steps if step.scores_BW is not None]
        steps_B = [plan.steps for plan in self.by_cost_B]
        return keep_first(torch.stack(scores, 1), steps_B, float("-inf"))


class SampledDraft(Draft):
    """A draft of beams sampled without replacement, with their distributions.

    Every sampled node is in the tree, expanded or not.
    """

    def __init__(self, head: Head, width: int, chooser: Chooser, plans_B: Sequence[Plan]) -> None:
        super().__init__(head, width, chooser, plans_B)
        admit = self._admit if self.by_cost_B else None
        length, rows = max(self.depths_B), len(self.depths_B)
        self.choose = self._sampler = make_sampler(head, width, length, rows, chooser, admit)
        # with costs, of each step: the chances (B, W) of the children before they were sampled
        self._chances: list[Tensor] = []

    def _admit(self, chances_BW: Tensor) -> Tensor:
        """Return a mask of the children to sample, as many as the plans choose, likeliest first.

        A later sibling never has a larger chance, so siblings keep their order. Nodes that were not
        sampled get no children.
        """
        self._chances.append(chances_BW)
        pairs = zip(self.by_cost_B, self._read(lambda: chances_BW), strict=True)
        counts_B = [plan.admit(chances_W) for plan, chances_W in pairs]
        return mask_largest(chances_BW, counts_B) & (chances_BW > 0)

    def _narrow(self, step: Step) -> Frontier | None:
        """Continue from the nodes with the largest chances.

        Their tokens may decide, as they carry no information about the tokens of their children
        (decoding/drafters/trees/sampled_children.py).
        """
        scores_BW = step.scores_BW
        if scores_BW is None:  # the last step
            return None
        counts_B = self._count_starts(self._read(lambda: scores_BW))
        P = max(counts_B)
        if P == 0:
            return None
        if scores_BW.shape[1] == 1:
            return Frontier(keep_first(scores_BW, counts_B, 0.0))
        order = scores_BW.sort(dim=-1, descending=True, stable=True)
        return Frontier(keep_first(order.values[:, :P], counts_B, 0.0), order.indices[:, :P])

    def proposal(self, beams: Beams) -> Proposal:
        counts_B = [plan.nodes for plan in self.by_cost_B] or [
            self.width * depth for depth in self.depths_B
        ]
        if isinstance(self._sampler, SampledChain):
            N = max(counts_B)
            q_BNV = self._sampler.q(beams)[:, :N]
            proposal = Proposal(beams.tokens_BLW[:, :N, 0], counts_B, None, q_BNV)
        else:
            tokens_BM, parents_BM, rows = self._sampler.nodes(beams)
            proposal = Proposal(tokens_BM, counts_B, parents_BM, q_top=rows)
            if self.by_cost_B:
                tree = pack(tokens_BM, parents_BM, beams.join(lambda step: step.admitted_BW))
                proposal = tree_proposal(tree, counts_B)
                N = proposal.tokens_BN.shape[1]
                proposal.q_top = reorder_rows(tree, N, rows, number_rows(beams))
        return self._finish(
            proposal, beams, lambda: torch.stack(self._chances, 1).sort(-1, descending=True).values
        )


def make_sampler(
    head: Head, width: int, length: int, rows: int, chooser: Chooser, admit: Admit | None = None
) -> SampledBeams | SampledChain:
    """Return the sampler of a round's beams. length: maximum draft length of its rows."""
    if width == 1:
        return SampledChain(head, chooser, admit)
    return SampledBeams(head, width, length, rows, chooser, admit)


def number_rows(beams: Beams) -> Tensor:
    """Return for every node (B, M) the row of q that its children were sampled from.

    Nodes that were not expanded get 0, the tip's row.
    """
    parents_BLW = beams.parents_BLW
    B, L, W = parents_BLW.shape
    numbers_BM = parents_BLW.new_zeros(B, L * W)
    if beams.frontiers:
        beams_BW = torch.arange(W, device=parents_BLW.device).expand(B, W)
        nodes_BP = torch.cat(
            [frontier.select(beams_BW) + W * step for step, frontier in enumerate(beams.frontiers)],
            1,
        )
        rows_P = torch.arange(1, nodes_BP.shape[1] + 1, device=nodes_BP.device)
        numbers_BM.scatter_(1, nodes_BP, rows_P.expand_as(nodes_BP))
    return numbers_BM


def reorder_rows(tree: Tree, nodes: int, rows: TopRows, numbers_BM: Tensor) -> TopRows:
    """Return the distributions of the tip and of the first `nodes` kept nodes, in their order.

    rows: the distributions before packing. numbers_BM: see `number_rows`.
    """
    B, M = tree.places_BM.shape
    numbers_BN = numbers_BM.new_zeros(B, M + 2).scatter_(1, tree.places_BM + 1, numbers_BM)
    numbers_BN1 = numbers_BN[:, : nodes + 1, None]

    def select(rows_BPX: Tensor) -> Tensor:
        return rows_BPX.gather(1, numbers_BN1.expand(-1, -1, rows_BPX.shape[2]))

    tail_BPV = None if rows.tail_BPV is None else select(rows.tail_BPV)
    return TopRows(select(rows.ids_BPK), select(rows.probs_BPK), tail_BPV)

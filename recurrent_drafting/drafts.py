"""One round's draft: how its beams are chosen, from which of them it goes on, and the proposal that
they become.

How much is drafted the rows' plans say (recurrent_drafting/plans.py). Fixed beams all go on to the
last step. By cost a step starts from the likeliest beams of the one before, so many as the plan
wants; the others stay what they are, nodes without children. Where a plan reads, a step's chances
are read for it; elsewhere they come back with the accepted lengths.

Shapes: B rows, W beams, P beams that a step starts from, L steps, M = L W nodes seen, N nodes
proposed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Proposal, TopRows
from recurrent_drafting.beams import Beams, Choose, Going, Picks, Step
from recurrent_drafting.drawn_beams import Admit, DrawnChain, Draws
from recurrent_drafting.head import Head
from recurrent_drafting.plans import BeamPlan, Fixed, Plan
from recurrent_drafting.prefix_tree import Tree, edges, pack, surviving

# on a GPU a forward's tokens, nodes and tip, come in multiples of it: few widths are recorded, and
# products fill their tiles
TOKENS_STEP = 8


class Draft(ABC):
    """What both kinds share."""

    choose: Choose

    def __init__(self, head: Head, width: int, chooser: Chooser, plans_B: Sequence[Plan]) -> None:
        self.head, self.width, self.chooser = head, width, chooser
        self.depths_B = [plan.depth for plan in plans_B]
        self.rooms_B = rooms_of(plans_B)
        # all rows or none
        self.by_cost_B: list[BeamPlan] = [plan for plan in plans_B if not isinstance(plan, Fixed)]

    @property
    def narrow(self) -> Callable[[Step], Going | None] | None:
        """What `search` asks after each step; None where all beams go on."""
        return self._narrow if self.by_cost_B else None

    @abstractmethod
    def _narrow(self, step: Step) -> Going | None:
        """The beams of a step that the next one starts from; None ends the search."""

    def _told(self, chances_BW: Callable[[], Tensor]) -> Sequence[Sequence[float]]:
        """What the rows' plans are given of a step: its chances, or nothing where that would be a
        wait.
        """
        if not self.by_cost_B[0].reads:
            return [()] * len(self.by_cost_B)
        (told_BW,) = devices.read(chances_BW())
        return list(told_BW)

    def _finished(
        self, proposal: Proposal, beams: Beams, chances_BLW: Callable[[], Tensor]
    ) -> Proposal:
        """With what it cost, and what the plans ask for; chances_BLW: of each step, likeliest
        first.
        """
        proposal.steps, proposal.frontiers = len(beams.steps), beams.started
        if self.by_cost_B and not self.by_cost_B[0].reads:
            proposal.readback = lambda _: (chances_BLW(),)
        return proposal


def rooms_of(plans_B: Sequence[Plan]) -> list[int] | None:
    """Nodes of each row's tree that are proposed, at most; None: as many as there are, which is
    read.
    """
    return [
        plan.room for plan in plans_B if isinstance(plan, Fixed) and plan.room is not None
    ] or None


def nodes_of(counts_B: Sequence[int], most: int, device: torch.device) -> int:
    """Nodes that the target's forward runs over."""
    nodes = max(counts_B)
    return (
        min(-(-(nodes + 1) // TOKENS_STEP) * TOKENS_STEP - 1, most)
        if devices.runs_ahead(device)
        else nodes
    )


def proposal_of(tree: Tree, counts_B: list[int] | None) -> Proposal:
    """The proposal of a tree. counts_B: nodes of each row, or room for them: where there are fewer,
    padding is among them. None reads them.
    """
    if counts_B is None:
        (counts_B,) = devices.read(tree.counts_B)
        assert counts_B is not None
    N = nodes_of(counts_B, tree.tokens_BM.shape[1], tree.tokens_BM.device)
    return Proposal(tree.tokens_BM[:, :N], counts_B, tree.parents_BM[:, :N])


def fixed_proposal(tree: Tree, room_B: list[int] | None) -> Proposal:
    """The proposal of fixed beams: all nodes, whose number is read; or as many as there is room
    for, and the number is asked for.
    """
    proposal = proposal_of(tree, room_B)
    if room_B is not None:
        proposal.readback = lambda _: (tree.counts_B,)
    return proposal


def tree_of(beams: Beams, keep_BM: Tensor) -> Tree:
    """The tree of some of the nodes."""
    return pack(beams.tokens_BLW.flatten(1), edges(beams.parents_BLW), keep_BM)


def last_beams(beams: Beams, depths_B: Tensor) -> Tree:
    """The tree of the beams of each row's last step."""
    return tree_of(beams, surviving(beams.parents_BLW, depths_B))


def first(values_BM: Tensor, counts_B: Sequence[int]) -> Tensor:
    """Which are the counts_B largest values of each row (B, M); of equal ones the first."""
    counts_B1 = devices.tensor(list(counts_B), values_BM.device)[:, None]
    if values_BM.shape[1] == 1:
        return counts_B1 > 0
    order_BM = values_BM.sort(dim=-1, descending=True, stable=True).indices
    places_BM = torch.arange(order_BM.shape[1], device=order_BM.device).expand_as(order_BM)
    return torch.empty_like(order_BM).scatter_(1, order_BM, places_BM) < counts_B1


def own(scores_BP: Tensor, counts_B: Sequence[int], none: float) -> Tensor:
    """The scores of each row's first beams, `none` of those that only its neighbours go on from."""
    P = scores_BP.shape[1]
    if min(counts_B) == P:
        return scores_BP
    beams_P = torch.arange(P, device=scores_BP.device)
    return scores_BP.masked_fill(
        beams_P >= devices.tensor(list(counts_B), scores_BP.device)[:, None], none
    )


def picks(head: Head, width: int, chooser: Chooser, scored: bool) -> Picks:
    """How beams are picked under a rule."""
    temperature = 1.0 if chooser.warper.greedy else chooser.warper.temperature
    return Picks(head, width, temperature, chooser if chooser.rule == "coupled" else None, scored)


class PickedDraft(Draft):
    """The likeliest beams, point masses. Fixed, the tree is that of the last step's beams; by cost,
    of the nodes that are worth it.
    """

    def __init__(self, head: Head, width: int, chooser: Chooser, plans_B: Sequence[Plan]) -> None:
        super().__init__(head, width, chooser, plans_B)
        self.choose = picks(head, width, chooser, scored=bool(self.by_cost_B))

    def _narrow(self, step: Step) -> Going | None:
        """Picks are the likeliest first."""
        scores_BW = step.scores_BW
        assert scores_BW is not None
        told = self._told(scores_BW.exp)
        counts_B = []
        for plan, chances_W in zip(self.by_cost_B, told, strict=True):
            plan.add(chances_W)
            counts_B.append(plan.start_from(chances_W))
        P = max(counts_B)
        return Going(own(scores_BW[:, :P], counts_B, float("-inf"))) if P else None

    def proposal(self, beams: Beams) -> Proposal:
        """The beams as a chain or a tree."""
        counts_B = [plan.nodes for plan in self.by_cost_B] or self.depths_B
        if self.width == 1:
            proposal = Proposal(beams.tokens_BLW[:, : max(counts_B), 0], counts_B)
        elif self.by_cost_B:
            proposal = proposal_of(
                tree_of(beams, first(self._seen(beams).flatten(1), counts_B)), counts_B
            )
        else:
            depths_B = devices.tensor(self.depths_B, beams.steps[0].tokens_BW.device)
            proposal = fixed_proposal(last_beams(beams, depths_B), self.rooms_B)
        return self._finished(proposal, beams, lambda: self._seen(beams).exp())

    def _seen(self, beams: Beams) -> Tensor:
        """Scores (B, L, W) of the nodes; -inf of those of steps that a row did not want."""
        scores_BLW = torch.stack(
            [step.scores_BW for step in beams.steps if step.scores_BW is not None], 1
        )
        steps_B, L = [plan.steps for plan in self.by_cost_B], len(beams.steps)
        if min(steps_B) == L:
            return scores_BLW
        steps_L1 = torch.arange(L, device=scores_BLW.device)[:, None]
        return scores_BLW.masked_fill(
            steps_L1 >= devices.tensor(steps_B, scores_BLW.device)[:, None, None], float("-inf")
        )


class DrawnDraft(Draft):
    """Beams drawn without replacement, with what they were drawn from. Every drawn node is in the
    tree, expanded or not.
    """

    def __init__(self, head: Head, width: int, chooser: Chooser, plans_B: Sequence[Plan]) -> None:
        super().__init__(head, width, chooser, plans_B)
        admit = self._admit if self.by_cost_B else None
        self.choose = self._draws = drawing(
            head, width, max(self.depths_B), len(self.depths_B), chooser, admit
        )
        # by cost: of each step's children before they were drawn, (B, W)
        self._chances: list[Tensor] = []

    def _admit(self, chances_BW: Tensor) -> Tensor:
        """The children that are drawn: the worthiest; siblings keep their order, as a later one is
        never worth more. None below a node that is not there.
        """
        self._chances.append(chances_BW)
        told = self._told(lambda: chances_BW)
        counts_B = [
            plan.admit(chances_W) for plan, chances_W in zip(self.by_cost_B, told, strict=True)
        ]
        return first(chances_BW, counts_B) & (chances_BW > 0)

    def _narrow(self, step: Step) -> Going | None:
        """The likeliest go on, by what they are: that says nothing of their own children, which are
        not drawn yet (decoding/drafters/trees/sampled_children.py).
        """
        scores_BW = step.scores_BW
        if scores_BW is None:  # the last step's
            return None
        told = self._told(lambda: scores_BW)
        counts_B = [
            plan.start_from(chances_W) for plan, chances_W in zip(self.by_cost_B, told, strict=True)
        ]
        P = max(counts_B)
        if P == 0:
            return None
        if scores_BW.shape[1] == 1:
            return Going(own(scores_BW, counts_B, 0.0))
        order = scores_BW.sort(dim=-1, descending=True, stable=True)
        return Going(own(order.values[:, :P], counts_B, 0.0), order.indices[:, :P])

    def proposal(self, beams: Beams) -> Proposal:
        """The drawn nodes as a chain or a tree, with their q."""
        counts_B = [plan.nodes for plan in self.by_cost_B] or [
            self.width * depth for depth in self.depths_B
        ]
        if isinstance(self._draws, DrawnChain):
            N = max(counts_B)
            proposal = Proposal(
                beams.tokens_BLW[:, :N, 0], counts_B, None, self._draws.q(beams)[:, :N]
            )
        else:
            tokens_BM, parents_BM, rows = self._draws.drawn(beams)
            proposal = Proposal(tokens_BM, counts_B, parents_BM, q_top=rows)
            if self.by_cost_B:
                tree = pack(tokens_BM, parents_BM, beams.made(lambda step: step.admitted_BW))
                proposal = proposal_of(tree, counts_B)
                proposal.q_top = expanded(
                    tree, proposal.tokens_BN.shape[1], rows, numbers_of(beams)
                )
        return self._finished(
            proposal, beams, lambda: torch.stack(self._chances, 1).sort(-1, descending=True).values
        )


def drawing(
    head: Head, width: int, length: int, rows: int, chooser: Chooser, admit: Admit | None = None
) -> Draws | DrawnChain:
    """How beams of so many tokens are drawn."""
    return (
        DrawnChain(head, chooser, admit)
        if width == 1
        else Draws(head, width, length, rows, chooser, admit)
    )


def numbers_of(beams: Beams) -> Tensor:
    """Where the rows of q stand that the nodes' children were drawn from (B, M): 0, the tip's, for
    a node that was not expanded.
    """
    parents_BLW = beams.parents_BLW
    B, L, W = parents_BLW.shape
    numbers_BM = parents_BLW.new_zeros(B, L * W)
    if beams.going:
        beams_W = torch.arange(W, device=parents_BLW.device).expand(B, W)
        nodes_BP = torch.cat(
            [going.of(beams_W) + W * step for step, going in enumerate(beams.going)], 1
        )
        numbers_BM.scatter_(
            1,
            nodes_BP,
            torch.arange(1, nodes_BP.shape[1] + 1, device=nodes_BP.device).expand_as(nodes_BP),
        )
    return numbers_BM


def expanded(tree: Tree, nodes: int, rows: TopRows, numbers_BM: Tensor) -> TopRows:
    """The rows of the tip and of the first kept nodes, from those of the tip and of the nodes
    before packing. numbers_BM: see `numbers_of`.
    """
    B, M = tree.places_BM.shape
    source_BN = numbers_BM.new_zeros(B, M + 2).scatter_(1, tree.places_BM + 1, numbers_BM)[
        :, : nodes + 1
    ]

    def moved(each_BPX: Tensor) -> Tensor:
        return each_BPX.gather(1, source_BN[:, :, None].expand(-1, -1, each_BPX.shape[2]))

    tail_BPV = None if rows.tail_BPV is None else moved(rows.tail_BPV)
    return TopRows(moved(rows.ids_BPK), moved(rows.probs_BPK), tail_BPV)

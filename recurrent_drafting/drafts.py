"""One round's draft: how its beams are chosen, when it ends, and the proposal that they become.

By cost every step is read and weighed here; where the host runs ahead of the device, recurrent_drafting/sized.py does without.

Shapes: B rows, W beams, L steps, M = L W nodes seen, N nodes proposed, P nodes that were expanded, K candidates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding import cuda
from decoding.chooser import Chooser
from decoding.drafter import Proposal, TopRows
from decoding.worth import Worth
from recurrent_drafting.beams import Beams, Choose, Picks, Step
from recurrent_drafting.drawn_beams import Admit, DrawnChain, Draws
from recurrent_drafting.packed import Head
from recurrent_drafting.prefix_tree import Tree, edges, pack, surviving

TOKENS_STEP = 8  # on a GPU a forward's tokens, nodes and tip, come in multiples of it: few widths are recorded, and products fill their tiles


class Draft:
    """What both kinds share. worth_B: the rows' decisions by cost; none where beams are fixed."""

    choose: Choose

    def __init__(
        self, head: Head, width: int, chooser: Chooser, depths_B: Sequence[int], worth_B: Sequence[Worth]
    ) -> None:
        self.head, self.width, self.chooser = head, width, chooser
        self.depths_B, self.worth_B = list(depths_B), worth_B

    def goes_on(self, row: int) -> bool:
        """Whether a row wants another step."""
        worth = self.worth_B[row]
        return not worth.ended and worth.steps < self.depths_B[row]

    def more(self, step: Step) -> bool:
        """Whether any row wants another step."""
        return any(self.goes_on(row) for row in range(len(self.worth_B)))


def nodes_of(counts_B: Sequence[int], most: int, device: torch.device) -> int:
    """Nodes that the target's forward runs over."""
    nodes = max(counts_B)
    return min(-(-(nodes + 1) // TOKENS_STEP) * TOKENS_STEP - 1, most) if cuda.runs_ahead(device) else nodes


def proposal_of(tree: Tree, counts_B: list[int] | None, steps: int) -> Proposal:
    """The proposal of a tree. counts_B: nodes of each row, or room for them: where there are fewer, padding is among them. None reads them."""
    if counts_B is None:
        (counts_B,) = cuda.read(tree.counts_B)
        assert counts_B is not None
    N = nodes_of(counts_B, tree.tokens_BM.shape[1], tree.tokens_BM.device)
    return Proposal(tree.tokens_BM[:, :N], counts_B, tree.parents_BM[:, :N], steps=steps)


def fixed_proposal(tree: Tree, room_B: list[int] | None, steps: int) -> Proposal:
    """The proposal of fixed beams: all nodes, whose number is read; or as many as there is room for, and the number is asked for."""
    proposal = proposal_of(tree, room_B, steps)
    if room_B is not None:
        proposal.asks = lambda _: (tree.counts_B,)
    return proposal


def tree_of(beams: Beams, keep_BM: Tensor) -> Tree:
    """The tree of some of the nodes."""
    return pack(beams.tokens_BLW.flatten(1), edges(beams.parents_BLW), keep_BM)


def last_beams(beams: Beams, depths_B: Tensor) -> Tree:
    """The tree of the beams of each row's last step."""
    return tree_of(beams, surviving(beams.parents_BLW, depths_B))


class PickedDraft(Draft):
    """The likeliest beams, point masses. Fixed, the tree is that of the last step's beams; by cost, of the nodes that are worth it."""

    def __init__(
        self,
        head: Head,
        width: int,
        chooser: Chooser,
        depths_B: Sequence[int],
        worth_B: Sequence[Worth],
        room_B: list[int] | None = None,
    ) -> None:
        """room_B: nodes of each row that are proposed, at most; None: as many as there are, which is read."""
        super().__init__(head, width, chooser, depths_B, worth_B)
        self.room_B = room_B
        temperature = 1.0 if chooser.warper.greedy else chooser.warper.temperature
        coupled = chooser if chooser.rule == "coupled" else None
        self.choose = Picks(head, width, temperature, coupled, scored=bool(worth_B))

    def more(self, step: Step) -> bool:
        """Weighs the step's nodes in the rows that still draft."""
        assert step.scores_BW is not None
        (chances_BW,) = cuda.read(step.scores_BW.exp())
        for row, worth in enumerate(self.worth_B):
            if self.goes_on(row):
                worth.saw(chances_BW[row])
        return super().more(step)

    def proposal(self, beams: Beams) -> Proposal:
        """The beams as a chain or a tree."""
        steps, device = len(beams.steps), beams.steps[0].tokens_BW.device
        kept_B = [worth.best()[0] for worth in self.worth_B]
        counts_B = [len(kept) for kept in kept_B] or None
        if self.width == 1:
            counts_B = counts_B or self.depths_B
            return Proposal(beams.tokens_BLW[:, : max(counts_B), 0], counts_B, steps=steps)
        if counts_B is None:
            return fixed_proposal(last_beams(beams, cuda.tensor(self.depths_B, device)), self.room_B, steps)
        keep = [[node in kept for node in range(steps * self.width)] for kept in map(set, kept_B)]
        return proposal_of(tree_of(beams, cuda.tensor(keep, device)), counts_B, steps)


class DrawnDraft(Draft):
    """Beams drawn without replacement (see `Draws`), with what they were drawn from. Every drawn node is in the tree."""

    def __init__(
        self, head: Head, width: int, chooser: Chooser, depths_B: Sequence[int], worth_B: Sequence[Worth]
    ) -> None:
        super().__init__(head, width, chooser, depths_B, worth_B)
        admit = self._admit if worth_B else None
        self.choose = self._draws = drawing(head, width, max(depths_B), len(self.depths_B), chooser, admit)

    def _admit(self, chances_BW: Tensor) -> Tensor:
        """The children that are drawn: in each row those that are worth their verification; none in rows that draft no more."""
        (read_BW,) = cuda.read(chances_BW)
        none = [False] * self.width
        drawn_BW = [
            worth.admit(chances_W) if self.goes_on(row) else none
            for row, (worth, chances_W) in enumerate(zip(self.worth_B, read_BW, strict=True))
        ]
        return cuda.tensor(drawn_BW, chances_BW.device)

    def proposal(self, beams: Beams) -> Proposal:
        """The drawn nodes as a chain or a tree, with their q."""
        counts_B = [worth.verified for worth in self.worth_B] or [self.width * depth for depth in self.depths_B]
        return drawn_proposal(self._draws, beams, counts_B)


def drawing(
    head: Head, width: int, length: int, rows: int, chooser: Chooser, admit: Admit | None
) -> Draws | DrawnChain:
    """How beams of so many tokens are drawn."""
    return DrawnChain(head, chooser, admit) if width == 1 else Draws(head, width, length, rows, chooser, admit)


def drawn_proposal(draws: Draws | DrawnChain, beams: Beams, counts_B: list[int]) -> Proposal:
    """The nodes that were drawn, as a chain or a tree, with their q. counts_B: of each row."""
    steps = len(beams.steps)
    if isinstance(draws, DrawnChain):
        N = max(counts_B)
        return Proposal(beams.tokens_BLW[:, :N, 0], counts_B, None, draws.q(beams)[:, :N], steps)
    tokens_BM, parents_BM, rows = draws.drawn(beams)
    if beams.steps[0].admitted_BW is None:
        return Proposal(tokens_BM, counts_B, parents_BM, None, steps, rows)
    tree = pack(tokens_BM, parents_BM, beams.made(lambda step: step.admitted_BW))
    proposal = proposal_of(tree, counts_B, steps)
    proposal.q_top = expanded(tree, proposal.tokens_BN.shape[1], rows)
    return proposal


def expanded(tree: Tree, nodes: int, rows: TopRows) -> TopRows:
    """The rows of the tip and of the first kept nodes, from those of the tip and of all nodes before packing."""
    B, M = tree.places_BM.shape
    numbers_BM = torch.arange(1, M + 1, device=tree.places_BM.device).expand(B, M)
    source_BN = numbers_BM.new_zeros(B, M + 2).scatter_(1, tree.places_BM + 1, numbers_BM)[:, : nodes + 1]
    index_BN1 = source_BN.clamp(max=rows.ids_BPK.shape[1] - 1)[:, :, None]  # the last step's nodes have no children

    def moved(each_BPX: Tensor) -> Tensor:
        return each_BPX.gather(1, index_BN1.expand(-1, -1, each_BPX.shape[2]))

    tail_BPV = None if rows.tail_BPV is None else moved(rows.tail_BPV)
    return TopRows(moved(rows.ids_BPK), moved(rows.probs_BPK), tail_BPV)

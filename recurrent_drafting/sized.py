"""Drafts where the host runs ahead of the device: how many steps and nodes they have is said before them, from the rounds before.

The eager twins are in recurrent_drafting/drafts.py: fixed beams read how many nodes are left after packing, and with costs every step is
read and weighed. Here nothing is read but with the accepted lengths, when the round is over. Fixed beams get as much room in the target's
forward as the last trees of the row needed (`Room`); by cost a row's steps and nodes are chosen as decoding/tree_size.py does, and which nodes
these are is found on the device. What is left out is left out for its place or for its chance, which are known before anything is tested.

Shapes: B rows, W beams, L steps, M = L W nodes seen, N nodes proposed.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding import cuda
from decoding.chooser import Chooser
from decoding.drafter import Proposal
from decoding.tree_size import TreeSize
from recurrent_drafting.beams import Beams, Picks
from recurrent_drafting.drafts import Draft, drawing, drawn_proposal, proposal_of, tree_of
from recurrent_drafting.packed import Head


class Room:
    """Nodes of a row's tree of fixed beams that the target's forward has room for: as many as its last trees needed, of W x L at most.

    What goes beyond is left out: nodes of the last steps, which are reached least often. The true number is read after the round, so a row
    is short of room for one round.
    """

    ROUNDS = 8

    def __init__(self) -> None:
        self._last: deque[tuple[int, int]] = deque(maxlen=self.ROUNDS)  # nodes needed, and seen
        self._most = 0

    def nodes(self, most: int) -> int:
        """Of a draft that sees `most` nodes."""
        self._most = most
        return max((-(-needed * most // seen) for needed, seen in self._last), default=most)

    def learn(self, needed: int) -> None:
        """The round is over."""
        if self._most:
            self._last.append((needed, self._most))
        self._most = 0


class SizedPicks(Draft):
    """The likeliest beams by cost, point masses."""

    def __init__(self, head: Head, width: int, chooser: Chooser, sizes_B: Sequence[TreeSize]) -> None:
        super().__init__(head, width, chooser, [len(size.chosen) for size in sizes_B], [])
        self.nodes_B = [sum(size.chosen) for size in sizes_B]
        temperature = 1.0 if chooser.warper.greedy else chooser.warper.temperature
        coupled = chooser if chooser.rule == "coupled" else None
        self.choose = Picks(head, width, temperature, coupled, scored=True)

    def proposal(self, beams: Beams) -> Proposal:
        """Each row's likeliest nodes, as a chain or a tree."""
        B, L, W = beams.tokens_BLW.shape
        scores_BLW = torch.stack([step.scores_BW for step in beams.steps if step.scores_BW is not None], 1)
        if W == 1:
            proposal = Proposal(beams.tokens_BLW[:, : max(self.nodes_B), 0], self.nodes_B, steps=L)
        else:
            device = scores_BLW.device
            levels_M = torch.arange(L, device=device).repeat_interleave(W)
            drafted_BM = levels_M < cuda.tensor(self.depths_B, device)[:, None]
            keep_BM = first(scores_BLW.flatten(1).masked_fill(~drafted_BM, float("-inf")), self.nodes_B)
            proposal = proposal_of(tree_of(beams, keep_BM), self.nodes_B, L)
        proposal.asks = lambda _: (scores_BLW.exp(),)
        return proposal


class SizedDraws(Draft):
    """Beams by cost, drawn without replacement: of each step's children, before they are drawn, so many of the worthiest are."""

    def __init__(self, head: Head, width: int, chooser: Chooser, sizes_B: Sequence[TreeSize]) -> None:
        super().__init__(head, width, chooser, [len(size.chosen) for size in sizes_B], [])
        self.nodes_B = [sum(size.chosen) for size in sizes_B]
        L = max(self.depths_B)
        self._chosen_BL = [[*size.chosen, *[0] * (L - len(size.chosen))] for size in sizes_B]
        self._chances: list[Tensor] = []
        self.choose = self._draws = drawing(head, width, L, len(sizes_B), chooser, self._admit)

    def _admit(self, chances_BW: Tensor) -> Tensor:
        """The worthiest; siblings keep their order, as a later one is never worth more. None below a node that is not there."""
        chosen_B = [chosen[len(self._chances)] for chosen in self._chosen_BL]
        self._chances.append(chances_BW)
        return first(chances_BW, chosen_B) & (chances_BW > 0)

    def proposal(self, beams: Beams) -> Proposal:
        """The drawn nodes as a chain or a tree, with their q."""
        proposal = drawn_proposal(self._draws, beams, self.nodes_B)
        chances_BLW = torch.stack(self._chances, 1).sort(-1, descending=True).values
        proposal.asks = lambda _: (chances_BLW,)
        return proposal


def first(values_BM: Tensor, counts_B: Sequence[int]) -> Tensor:
    """Which are the counts_B largest values of each row (B, M); of equal ones the first."""
    order_BM = values_BM.sort(dim=-1, descending=True, stable=True).indices
    places_BM = torch.arange(order_BM.shape[1], device=order_BM.device).expand_as(order_BM)
    counts_B1 = cuda.tensor(list(counts_B), order_BM.device)[:, None]
    return torch.empty_like(order_BM).scatter_(1, order_BM, places_BM) < counts_B1

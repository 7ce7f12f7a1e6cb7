"""Drawn beams: the nodes of a step are drawn without replacement among siblings, in a way that
leaves p / q tests exact at every node.

decoding/drafters/trees/sampled_children.py explains why they are exact there, for all trees.
Here a step first decides how many children each node gets, from the nodes of the steps
before and what the head says behind them, and only then draws them, by noise that nothing else has
used: its keys are of (seed, request, round, position, node, symbol). A node's children are the
first of S clocks with the rates q in the order in which they ring (Gumbel top-k: Kool et al. 2019,
arXiv 1903.06059, section 2.3). Every drawn child is in the tree, expanded or not.

The S symbols are the head's likeliest tokens and the *tail*, all others as one, and a token that
was drawn from these. Where top-k, top-p or min-p cut q it has no tail.

Stochastic beam search (Kool et al., section 4), which takes the W earliest of all nodes' clocks,
keeps p / q exact as well (Jeon et al. 2024, arXiv 2402.14160), its last beams alone too: that a
child is there depends on when its clock rang and on what rang before, and when a clock rings tells
nothing of whose it is. What breaks the law is any look at the children themselves: leaving out
unlikely ones, or testing the likeliest first. The tests show both.

Budgets: the j-th child of a node is worth the chance that it is reached and passes, as
decoding/drafters/trees/sampled_children.py takes them. That of a first child that is not drawn yet
is taken for the same at every node, which has gained as much as its mean over q; where costs decide
how many are drawn it is that mean. The W worthiest children are drawn; the first child of the first
node always, so that no tree accepts less than a drawn chain.

Shapes: B rows, W beams, P beams that a step starts from (1 at the tip, else W), L steps, M = L W
nodes, S symbols, K candidates (S less the tail), Q nodes that were expanded and the tip, V
vocabulary that the head drafts from.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.trees.sampled_children import Siblings
from decoding.interfaces import Chooser, TopRows
from decoding.sampling import noise
from decoding.stopping.planner import PRIOR, chance_of
from recurrent_drafting.beams import Beams, Step, over_target
from recurrent_drafting.head import Head

CANDIDATES = 64  # of the head's likeliest tokens are symbols of their own

# From what the children that would be drawn are worth (B, W): which of them are (boolean).
Admit = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Constants:
    """Numbers that depend on shapes alone."""

    counters_WX: Tensor  # of a node's noise: S clocks, and the token of its tail
    siblings: Siblings
    worth_W: (
        # where nothing is weighed, the chance that the j-th child is tested and passes, if its node
        # is reached
        Tensor
    )
    least_W: Tensor  # the same once it is drawn, and how much this grows by its probability
    slope_W: Tensor
    first_W: Tensor  # zeros, the parents of the first step's nodes


@lru_cache
def constants(width: int, symbols: int, dtype: torch.dtype, device: torch.device) -> Constants:
    """Those of so many beams and symbols, in the dtype of probabilities; made once, as each is an
    operation.
    """
    with torch.inference_mode(False):
        counters_WX = torch.arange(width * (symbols + 1), device=device).view(width, symbols + 1)
        like = torch.zeros((), dtype=dtype, device=device)
        siblings = Siblings.of(width, like)
        passes_11 = PRIOR + like[None, None]
        tested_W = siblings.tested(passes_11)[0]
        return Constants(
            noise.scaled_ids(counters_WX),
            siblings,
            tested_W * siblings.passing(passes_11)[0],
            tested_W * (siblings.passes_K + chance_of(0.0) * siblings.first_K),
            tested_W * (chance_of(1.0) - chance_of(0.0)) * siblings.first_K,
            torch.zeros(width, dtype=torch.long, device=device),
        )


@lru_cache
def offsets(length: int, width: int, device: torch.device) -> Tensor:
    """(L, 1): parents among the beams of the step before, zeros at the first step, plus this:
    `prefix_tree.edges` of them in one operation.
    """
    with torch.inference_mode(False):
        return devices.tensor([-1, *range(0, (length - 1) * width, width)], device)[:, None]


class Draws:
    """W nodes a step, of two beams or more."""

    def __init__(
        self,
        head: Head,
        width: int,
        length: int,
        rows: int,
        chooser: Chooser,
        admit: Admit | None = None,
    ) -> None:
        """admit: None draws all."""
        self.head, self.width, self.length, self.chooser, self.admit = (
            head,
            width,
            length,
            chooser,
            admit,
        )
        self.has_tail = not chooser.warper.truncates
        self.symbols = min(head.config.num_drafted, max(CANDIDATES, width) + self.has_tail)
        counters_WX = constants(width, self.symbols, torch.float32, chooser.device).counters_WX
        keys = [[chooser.draft_key(row, depth) for depth in range(length)] for row in range(rows)]
        uniforms_BLWX = noise.uniforms(
            devices.tensor(keys, chooser.device)[:, :, None, None], counters_WX
        )
        # less than 0: the first to ring is the least of rate / clock
        self._clocks_BLWS = uniforms_BLWX[..., :-1].log()
        self._tails_BLW1 = uniforms_BLWX[..., -1:]

    def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
        B, P, _ = logits_BPV.shape
        W = self.width
        places_BPS, probs_BPS, rates_BPS, tail_BPV = self._symbols(logits_BPV, step)
        of_shape = constants(W, self.symbols, probs_BPS.dtype, self.chooser.device)
        above_BP1 = None if scores_BP is None else scores_BP[:, :, None]
        order_BPW = (
            (rates_BPS / self._clocks_BLWS[:, step, :P]).topk(W, dim=-1, largest=False).indices
        )
        drawn_BPW = probs_BPS.gather(2, order_BPW) if step + 1 < self.length else None
        if self.admit is None:
            worth_BPW, reached_BPW = _worth(drawn_BPW, above_BP1, of_shape)
        else:
            worth_BPW, reached_BPW = _weighed(probs_BPS, drawn_BPW, above_BP1, of_shape.siblings)
        slots_BW = None
        if scores_BP is not None:
            ranked_BPW = worth_BPW if self.admit is None else worth_BPW.clone()
            ranked_BPW[:, 0, 0] = float("inf")  # the first child of the first node is always drawn
            # a later sibling is always worth less
            slots_BW = ranked_BPW.flatten(1).topk(W, dim=-1).indices

        def chosen(values_BPW: Tensor) -> Tensor:
            return (
                values_BPW[:, 0] if slots_BW is None else values_BPW.flatten(1).gather(1, slots_BW)
            )

        tokens_BW = self.head.to_target_ids(chosen(places_BPS.gather(2, order_BPW)))
        parents_BW = of_shape.first_W.expand(B, W) if slots_BW is None else slots_BW // W
        scores_BW = None if reached_BPW is None else chosen(reached_BPW)
        made = Step(parents_BW, tokens_BW, scores_BW, None, tail_BPV, places_BPS, rates_BPS)
        if self.admit is not None:
            made.admitted_BW = self.admit(chosen(worth_BPW))
            if scores_BW is not None:
                made.scores_BW = scores_BW * made.admitted_BW
        return made

    def _symbols(
        self, logits_BPV: Tensor, step: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Places (B, P, S) of the symbols in the head's vocabulary, probabilities of their tokens,
        likeliest first, the rates that they are drawn by, and probabilities of all tokens of the
        tail (B, P, V). With a tail the last symbol is that; its token is drawn from it here.
        """
        if not self.has_tail:
            top = logits_BPV.topk(self.symbols, dim=-1)
            probs_BPS = self.chooser.warper.of_likeliest(top.values)
            return top.indices, probs_BPS, probs_BPS, None
        q_BPV = self.chooser.warper.probs(logits_BPV)
        top = q_BPV.topk(self.symbols, dim=-1)
        candidates_BPK = top.indices[:, :, :-1]
        tail_BPV = q_BPV.scatter_(2, candidates_BPK, 0.0)
        ends_BPV = tail_BPV.cumsum(-1, dtype=torch.float64)
        total_BP1 = ends_BPV[:, :, -1:]
        # The first sum that reaches the point; where the tail has no share that is any token, and
        # its clock does not ring before the others have.
        found_BP1 = torch.searchsorted(
            ends_BPV, self._tails_BLW1[:, step, : logits_BPV.shape[1]] * total_BP1
        )
        rates_BPS = torch.cat((top.values[:, :, :-1], total_BP1), 2)
        return torch.cat((candidates_BPK, found_BP1), 2), top.values, rates_BPS, tail_BPV

    def drawn(self, beams: Beams) -> tuple[Tensor, Tensor, TopRows]:
        """Tokens and parents (B, M) of all nodes, and what the children of the tip and of the
        expanded ones were drawn from.
        """
        parents_BLW = beams.parents_BLW
        parents_BM = (parents_BLW + offsets(*parents_BLW.shape[1:], parents_BLW.device)).flatten(1)
        ids_BQS = self.head.to_target_ids(beams.made(lambda step: step.places_BPS))
        rows = TopRows(ids_BQS, beams.made(lambda step: step.rates_BPS))
        if self.has_tail:
            tail_BQV = beams.made(lambda step: step.tail_BPV)
            rows = replace(rows, tail_BPV=over_target(self.head, tail_BQV, 0.0))
        return beams.tokens_BLW.flatten(1), parents_BM, rows


def _worth(
    drawn_BPW: Tensor | None, above_BP1: Tensor | None, of_shape: Constants
) -> tuple[Tensor, Tensor | None]:
    """The chances (B, P, W) that each node's j-th child is tested and passes: before it is drawn,
    which is all that the step looks at, and then by its probability.
    """
    worth_BPW = of_shape.worth_W[None, None] if above_BP1 is None else above_BP1 * of_shape.worth_W
    if drawn_BPW is None:
        return worth_BPW, None
    reached_BPW = torch.addcmul(of_shape.least_W, drawn_BPW, of_shape.slope_W)
    return worth_BPW, reached_BPW if above_BP1 is None else above_BP1 * reached_BPW


def _weighed(
    probs_BPS: Tensor, drawn_BPW: Tensor | None, above_BP1: Tensor | None, siblings: Siblings
) -> tuple[Tensor, Tensor | None]:
    """The same by what the head says at each node, for costs to be weighed by."""
    passes_BP1 = chance_of(probs_BPS.square().sum(-1, keepdim=True))
    tested_BPW = siblings.tested(passes_BP1)
    if above_BP1 is not None:
        tested_BPW = tested_BPW * above_BP1
    worth_BPW = tested_BPW * siblings.passing(passes_BP1)
    return worth_BPW, None if drawn_BPW is None else tested_BPW * siblings.passing(
        chance_of(drawn_BPW)
    )


class DrawnChain:
    """One beam: each token drawn from all that the head says, as any chain is."""

    def __init__(self, head: Head, chooser: Chooser, admit: Admit | None = None) -> None:
        """admit: None draws all."""
        self.head, self.chooser, self.admit = head, chooser, admit

    def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
        tokens_B, q_BV = self.chooser.draft(logits_BPV[:, 0], step)
        assert q_BV is not None, "greedy and coupled decoding pick"
        tokens_B1, scores_B1, admitted_B1 = tokens_B[:, None], None, None
        if self.admit is not None:
            reached_B1 = 1.0 if scores_BP is None else scores_BP
            admitted_B1 = self.admit(reached_B1 * chance_of(q_BV.square().sum(-1, keepdim=True)))
            scores_B1 = reached_B1 * chance_of(q_BV.gather(1, tokens_B1)) * admitted_B1
        ids_B1 = self.head.to_target_ids(tokens_B1)
        return Step(
            torch.zeros_like(ids_B1), ids_B1, scores_B1, q_BV[:, None], admitted_BW=admitted_B1
        )

    def q(self, beams: Beams) -> Tensor:
        """What each token was drawn from, (B, L, the target's vocabulary)."""
        return over_target(self.head, beams.made(lambda step: step.q_BPV), 0.0)

"""Drawn beams: the nodes of a step are drawn without replacement among siblings, in a way that leaves p / q tests exact at every node.

Why they are exact there stands in decoding/draws.py, once for all drawn trees. Here a step first decides how many children each node gets, from
the nodes of the steps before and what the head says behind them, and only then draws them, by noise that nothing else has used: its keys
are of (seed, request, round, position, node, symbol). A node's children are the first of S clocks with the rates q in the order in which they
ring (Gumbel top-k: Kool et al. 2019, arXiv 1903.06059, section 2.3). Every drawn child is in the tree, expanded or not.

The S symbols are the head's likeliest tokens and the *tail*, all others as one. Which token of the tail it is, is drawn when the search is
over, once for all nodes; until then the likeliest of the tail stands for it, so what is drafted behind it was drafted behind another token. That
costs acceptance there and no exactness: any q is tested rightly. Where top-k, top-p or min-p cut q it has no tail.

Stochastic beam search (Kool et al., section 4), which takes the W earliest of all nodes' clocks, keeps p / q exact as well (Jeon et al.
2024, arXiv 2402.14160), its last beams alone too: that a child is there hangs on when its clock rang and on what rang before, and
when a clock rings tells nothing of whose it is. What breaks the law is any look at the children themselves: leaving out unlikely ones,
or testing the likeliest first. The tests show both.

Budgets: the j-th child of a node is worth the chance that it is tested less the chance that the next one is. The chance of a child with probability
q(x) to pass is taken for 0.3 + 0.65 q(x), that of one not drawn yet for the mean of this. The W worthiest children are drawn; the first child
of the first node always, so that no tree accepts less than a drawn chain.

Shapes: B rows, W beams, P beams that a step starts from (1 at the tip, else W), L steps, M = L W nodes, S symbols, Q nodes that were expanded and
the tip, V vocabulary that the head drafts from.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import cuda, noise
from decoding.chooser import Chooser
from decoding.drafter import TopRows
from decoding.draws import CHANCE_SLOPE, LEAST_CHANCE, chance
from recurrent_drafting.beams import Beams, Step, over_target
from recurrent_drafting.packed import Head

CANDIDATES = 64  # of the head's likeliest tokens are symbols of their own

# From what the children that would be drawn are worth (B, W): which of them are (boolean).
Admit = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Constants:
    """Numbers that hang on shapes alone."""

    counters_WX: Tensor  # of a node's noise: S clocks, and the token of its tail
    ranks_X: Tensor  # 0 .. W
    first_W: Tensor  # zeros, the parents of the first step's nodes
    miss_111: Tensor  # the chance of a child to fail, but for what its probability makes of it
    least: Tensor
    lump_SS: Tensor  # of a linear map: the last of the probabilities becomes that of all tokens but the others
    rest_S: Tensor


@lru_cache
def constants(width: int, symbols: int, dtype: torch.dtype, device: torch.device) -> Constants:
    """Those of so many beams and symbols, in the dtype of probabilities; made once, as each is an operation."""
    with torch.inference_mode(False):
        counters_WX = torch.arange(width * (symbols + 1), device=device).view(width, symbols + 1)
        lump_SS = torch.eye(symbols, dtype=dtype, device=device)
        lump_SS[-1] = -1.0
        lump_SS[-1, -1] = 0.0
        rest_S = torch.zeros(symbols, dtype=dtype, device=device)
        rest_S[-1] = 1.0
        return Constants(
            noise.scaled_ids(counters_WX),
            torch.arange(width + 1, device=device),
            torch.zeros(width, dtype=torch.long, device=device),
            torch.full((1, 1, 1), 1 - LEAST_CHANCE, dtype=dtype, device=device),
            torch.full((), LEAST_CHANCE, dtype=dtype, device=device),
            lump_SS,
            rest_S,
        )


@lru_cache
def offsets(length: int, width: int, device: torch.device) -> Tensor:
    """(L, 1): parents among the beams of the step before, zeros at the first step, plus this: `prefix_tree.edges` of them in one operation."""
    with torch.inference_mode(False):
        return torch.tensor([-1, *range(0, (length - 1) * width, width)], device=device)[:, None]


class Draws:
    """W nodes a step, of two beams or more."""

    def __init__(
        self, head: Head, width: int, length: int, rows: int, chooser: Chooser, admit: Admit | None = None
    ) -> None:
        """admit: None draws all."""
        self.head, self.width, self.length, self.chooser, self.admit = head, width, length, chooser, admit
        self.has_tail = not chooser.warper.truncates
        self.symbols = min(head.config.num_drafted, max(CANDIDATES, width) + self.has_tail)
        counters_WX = constants(width, self.symbols, torch.float32, chooser.device).counters_WX
        keys = [[chooser.draft_key(row, depth) for depth in range(length)] for row in range(rows)]
        uniforms_BLWX = noise.uniforms(cuda.tensor(keys, chooser.device)[:, :, None, None], counters_WX)
        self._clocks_BLWS = uniforms_BLWX[..., :-1].log()  # less than 0: the first to ring is the least of rate / clock
        self._tails_BM = uniforms_BLWX[..., -1].flatten(1)

    def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
        B, P, _ = logits_BPV.shape
        W = self.width
        places_BPS, probs_BPS, rates_BPS, q_BPV = self._symbols(logits_BPV)
        of_shape = constants(W, self.symbols, probs_BPS.dtype, self.chooser.device)
        tested_BPX, slots_BW, admitted_BW = self._budget(probs_BPS, scores_BP, of_shape)
        order_BPW = (rates_BPS / self._clocks_BLWS[:, step, :P]).topk(W, dim=-1, largest=False).indices

        def chosen(values_BPW: Tensor) -> Tensor:
            return values_BPW[:, 0] if slots_BW is None else values_BPW.flatten(1).gather(1, slots_BW)

        tokens_BW = self.head.to_target_ids(chosen(places_BPS.gather(2, order_BPW)))
        parents_BW = of_shape.first_W.expand(B, W) if slots_BW is None else slots_BW // W
        scores_BW = None
        if step + 1 < self.length:
            passes_BPW = torch.add(of_shape.least, probs_BPS.gather(2, order_BPW), alpha=CHANCE_SLOPE)
            scores_BW = chosen(tested_BPX[:, :, :-1] * passes_BPW)
            if admitted_BW is not None:
                scores_BW = scores_BW * admitted_BW
        return Step(parents_BW, tokens_BW, scores_BW, q_BPV, places_BPS, rates_BPS, admitted_BW)

    def _symbols(self, logits_BPV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Places (B, P, S) of the likeliest tokens in the head's vocabulary, their probabilities, likeliest first, the rates that the symbols are
        drawn by, and probabilities of all tokens (B, P, V) where there is a tail; the last symbol is then the tail, and no candidate."""
        if not self.has_tail:
            top = logits_BPV.topk(self.symbols, dim=-1)
            probs_BPS = self.chooser.warper.of_likeliest(top.values)
            return top.indices, probs_BPS, probs_BPS, None
        q_BPV = self.chooser.warper.probs(logits_BPV)
        top = q_BPV.topk(self.symbols, dim=-1)
        of_shape = constants(self.width, self.symbols, q_BPV.dtype, self.chooser.device)
        return top.indices, top.values, F.linear(top.values, of_shape.lump_SS, of_shape.rest_S), q_BPV

    def _budget(
        self, probs_BPS: Tensor, reached_BP: Tensor | None, of_shape: Constants
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Which children will be drawn, before any is: the chance (B, P, W + 1) that the j-th child of a node comes to be tested, the places (B, W)
        of the W children among the first W of each node (None: they are the tip's), and which are admitted. Siblings are in their order."""
        B, P, S = probs_BPS.shape
        flat_RS = probs_BPS.reshape(B * P, S)  # the mean chance is that of the sum of squares
        miss_R11 = torch.baddbmm(of_shape.miss_111, flat_RS[:, None], flat_RS[:, :, None], alpha=-CHANCE_SLOPE)
        tested_BPX = miss_R11.view(B, P, 1).pow(of_shape.ranks_X)
        if reached_BP is not None:
            tested_BPX = tested_BPX * reached_BP[:, :, None]
        slots_BW, worth_BPW = None, None
        if reached_BP is not None or self.admit is not None:
            worth_BPW = tested_BPX[:, :, :-1] - tested_BPX[:, :, 1:]
        if reached_BP is not None:
            assert worth_BPW is not None
            ranked_BPW = worth_BPW if self.admit is None else worth_BPW.clone()
            ranked_BPW[:, 0, 0] = float("inf")
            slots_BW = ranked_BPW.flatten(1).topk(self.width, dim=-1).indices  # a later sibling is always worth less
        if self.admit is None:
            return tested_BPX, slots_BW, None
        assert worth_BPW is not None
        worth_BW = worth_BPW[:, 0] if slots_BW is None else worth_BPW.flatten(1).gather(1, slots_BW)
        return tested_BPX, slots_BW, self.admit(worth_BW)

    def drawn(self, beams: Beams) -> tuple[Tensor, Tensor, TopRows]:
        """Tokens and parents (B, M) of all nodes, and what the children of the tip and of the expanded ones were drawn from."""
        tokens_BM, parents_BLW = beams.tokens_BLW.flatten(1), beams.parents_BLW
        parents_BM = (parents_BLW + offsets(*parents_BLW.shape[1:], parents_BLW.device)).flatten(1)
        places_BQS, rates_BQS = beams.made(lambda step: step.places_BPS), beams.made(lambda step: step.rates_BPS)
        ids_BQS = self.head.to_target_ids(places_BQS)
        if not self.has_tail:
            return tokens_BM, parents_BM, TopRows(ids_BQS, rates_BQS)
        tail_BQV = beams.made(lambda step: step.q_BPV).scatter_(2, places_BQS[:, :, :-1], 0.0)
        ends_BQV = tail_BQV.cumsum(-1, dtype=torch.float64)
        total_BQ1 = ends_BQV[:, :, -1:]
        first = self.width - 1  # the tip takes the number of one of the first step's places that are not there
        uniforms_BQ1 = self._tails_BM[:, first : first + ends_BQV.shape[1], None]
        found_BQ1 = torch.searchsorted(ends_BQV, uniforms_BQ1 * total_BQ1)
        # A tail that has no share, and by rounding came up all the same, is its likeliest token.
        own_BQ1 = self.head.to_target_ids(torch.where(total_BQ1 > 0, found_BQ1, places_BQS[:, :, -1:]))
        above_BM = parents_BM + 1
        is_tail_BM = tokens_BM == ids_BQS[:, :, -1].gather(1, above_BM)
        tokens_BM = torch.where(is_tail_BM, own_BQ1.squeeze(2).gather(1, above_BM), tokens_BM)
        ids_BQS = torch.cat((ids_BQS[:, :, :-1], own_BQ1), 2)
        return tokens_BM, parents_BM, TopRows(ids_BQS, rates_BQS, over_target(self.head, tail_BQV, 0.0))


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
            admitted_B1 = self.admit(reached_B1 * chance(q_BV.square().sum(-1, keepdim=True)))
            scores_B1 = reached_B1 * chance(q_BV.gather(1, tokens_B1)) * admitted_B1
        ids_B1 = self.head.to_target_ids(tokens_B1)
        return Step(torch.zeros_like(ids_B1), ids_B1, scores_B1, q_BV[:, None], admitted_BW=admitted_B1)

    def q(self, beams: Beams) -> Tensor:
        """What each token was drawn from, (B, L, the target's vocabulary)."""
        return over_target(self.head, beams.made(lambda step: step.q_BPV), 0.0)

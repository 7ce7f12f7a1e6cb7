"""Beams whose siblings are sampled without replacement, for exact p / q tests at every node.

decoding/drafters/trees/sampled_children.py proves exactness for all trees. Here a step first
settles how many children each node gets, from the nodes of earlier steps and the head's
distributions, and samples them afterwards. Their noise is used once: it is keyed by seed, request,
round, position, node and symbol. A node's children are the first of S exponential clocks with rates
q, in the order in which they ring (Gumbel top-k: Kool et al. 2019, arXiv 1903.06059, section 2.3).
Every sampled child is in the tree, expanded or not.

The S symbols are the head's likeliest tokens and the *tail*, which is all other tokens as one, with
one token sampled from them. Without the tail of a q that top-k, top-p or min-p truncates, the
symbols are tokens alone.

Stochastic beam search (Kool et al., section 4) takes the W earliest of all nodes' clocks. It keeps
p / q exact too (Jeon et al. 2024, arXiv 2402.14160), even for the last beams alone: a child's
presence depends on its clock and on those that rang before, which carry no information about its
token. Any choice among children by their tokens breaks the law, such as dropping unlikely ones or
testing the likeliest first. Tests show both results.

The chance of a node's j-th child is that it is tested and accepted (decoding/stopping/planner.py).
Before sampling, the first child of every node has the same chance; with costs, its mean over q. The
W children with the largest chances are sampled. The first child of the first node always is, so
that no tree accepts less than a sampled chain.

Shapes: B rows, L steps, M = L W nodes, P beams that a step starts from (1 at the tip), Q the tip
and the expanded nodes, S symbols, V the head's drafted vocabulary, W beams.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.trees.sampled_children import Siblings
from decoding.interfaces import Chooser, TopRows
from decoding.models.draft_vocabulary import spread
from decoding.sampling import noise
from decoding.stopping.planner import PRIOR, chance_of
from recurrent_drafting.beams import Beams, Step
from recurrent_drafting.head import Head
from recurrent_drafting.prefix_tree import edges

CANDIDATES = 64  # the head's likeliest tokens that are symbols

# Chances (B, W) of the children before they are sampled -> mask of those to sample.
Admit = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Constants:
    """Tensors that depend on shapes alone, cached because each of their operations takes time."""

    counters_WX: Tensor  # noise counters of each node: S clocks, then the tail's token
    siblings: Siblings
    # Without costs, chances given that the node is accepted: before sampling, and after it as
    # least + slope x probability.
    before_W: Tensor
    least_W: Tensor
    slope_W: Tensor
    zeros_W: Tensor  # parents of the first step's nodes


@lru_cache
def constants(width: int, symbols: int, dtype: torch.dtype, device: torch.device) -> Constants:
    """Return the constants for W = `width` beams and S = `symbols`. dtype: of the probabilities."""
    with torch.inference_mode(False):
        counters_WX = torch.arange(width * (symbols + 1), device=device).view(width, symbols + 1)
        like = torch.zeros((), dtype=dtype, device=device)
        siblings = Siblings.of(width, like)
        prior_11 = PRIOR + like[None, None]
        tested_W = siblings.tested(prior_11)[0]
        return Constants(
            noise.scaled_ids(counters_WX),
            siblings,
            tested_W * siblings.passing(prior_11)[0],
            tested_W * (siblings.passes_K + chance_of(0.0) * siblings.first_K),
            tested_W * (chance_of(1.0) - chance_of(0.0)) * siblings.first_K,
            torch.zeros(width, dtype=torch.long, device=device),
        )


class SampledBeams:
    """The choice of W sampled nodes per step, for two or more beams."""

    def __init__(
        self,
        head: Head,
        width: int,
        length: int,
        rows: int,
        chooser: Chooser,
        admit: Admit | None = None,
    ) -> None:
        """Compute the noise of a round of B = `rows` rows and at most L = `length` steps.

        admit: returns the mask of the W children to sample, given their chances; None: all of them.
        """
        self.head, self.width, self.length = head, width, length
        self.chooser, self.admit = chooser, admit
        self.has_tail = not chooser.warper.truncates
        self.symbols = min(head.config.num_drafted, max(CANDIDATES, width) + self.has_tail)
        counters_WX = constants(width, self.symbols, torch.float32, chooser.device).counters_WX
        keys_BL = devices.tensor(chooser.draft_keys(range(length)), chooser.device)
        uniforms_BLWX = noise.uniforms(keys_BL[:, :, None, None], counters_WX)
        # negative: the first clock to ring has the least rate / clock
        self._clocks_BLWS = uniforms_BLWX[..., :-1].log()
        self._tails_BLW1 = uniforms_BLWX[..., -1:]

    def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
        P, W = logits_BPV.shape[1], self.width
        places_BPS, probs_BPS, rates_BPS, tail_BPV = self._symbols(logits_BPV, step)
        clocks_BPS = rates_BPS / self._clocks_BLWS[:, step, :P]
        order_BPW = clocks_BPS.topk(W, dim=-1, largest=False).indices
        sampled_BPW = probs_BPS.gather(2, order_BPW) if step + 1 < self.length else None
        above_BP1 = None if scores_BP is None else scores_BP[:, :, None]
        fixed = constants(W, self.symbols, probs_BPS.dtype, self.chooser.device)
        if self.admit is None:
            before_BPW, after_BPW = prior_chances(sampled_BPW, above_BP1, fixed)
        else:
            before_BPW, after_BPW = head_chances(probs_BPS, sampled_BPW, above_BP1, fixed.siblings)
        slots_BW = None
        if scores_BP is not None:
            ranked_BPW = before_BPW if self.admit is None else before_BPW.clone()
            ranked_BPW[:, 0, 0] = float("inf")  # the first child of the first node
            # later siblings have smaller chances, so they follow earlier ones
            slots_BW = ranked_BPW.flatten(1).topk(W, dim=-1).indices

        def select(values_BPW: Tensor) -> Tensor:
            values_BM = values_BPW.flatten(1)
            return values_BM if slots_BW is None else values_BM.gather(1, slots_BW)

        tokens_BW = self.head.to_target_ids(select(places_BPS.gather(2, order_BPW)))
        parents_BW = fixed.zeros_W.expand_as(tokens_BW) if slots_BW is None else slots_BW // W
        scores_BW = None if after_BPW is None else select(after_BPW)
        admitted_BW = None if self.admit is None else self.admit(select(before_BPW))
        if scores_BW is not None and admitted_BW is not None:
            scores_BW = scores_BW * admitted_BW
        return Step(
            parents_BW, tokens_BW, scores_BW, None, tail_BPV, places_BPS, rates_BPS, admitted_BW
        )

    def _symbols(
        self, logits_BPV: Tensor, step: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return places, probabilities and rates (B, P, S) of the symbols, and the tail (B, P, V).

        Places are indices into the head's vocabulary, likeliest first. Probabilities are those of
        the S likeliest tokens; rates are the probabilities with which symbols are sampled. A tail
        is the last symbol; its token is sampled here, and its rate is the tail's total probability.
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
        # The first sum that reaches the point. An empty tail gives any token, and its clock rings
        # after all others.
        points_BP1 = self._tails_BLW1[:, step, : logits_BPV.shape[1]] * total_BP1
        found_BP1 = torch.searchsorted(ends_BPV, points_BP1)
        rates_BPS = torch.cat((top.values[:, :, :-1], total_BP1), 2)
        return torch.cat((candidates_BPK, found_BP1), 2), top.values, rates_BPS, tail_BPV

    def nodes(self, beams: Beams) -> tuple[Tensor, Tensor, TopRows]:
        """Return tokens and parents (B, M) of all nodes, and the distributions of children.

        There is a distribution for the children of the tip and of each expanded node.
        """
        ids_BQS = self.head.to_target_ids(beams.join(lambda step: step.places_BPS))
        tail_BQV = None
        if self.has_tail:
            tail_BQV = beams.join(lambda step: step.tail_BPV)
            tail_BQV = spread(tail_BQV, self.head.token_ids_V, self.head.config.vocab_size, 0.0)
        rows = TopRows(ids_BQS, beams.join(lambda step: step.rates_BPS), tail_BQV)
        return beams.tokens_BLW.flatten(1), edges(beams.parents_BLW), rows


def prior_chances(
    sampled_BPW: Tensor | None, above_BP1: Tensor | None, fixed: Constants
) -> tuple[Tensor, Tensor | None]:
    """Return the chances (B, P, W) that children are tested and accepted, estimated from priors.

    There are two estimates. The first is known before sampling and depends on the children's order
    alone. The second also depends on their probabilities `sampled_BPW`; without these it is None.
    above_BP1: chances that the P nodes are accepted; None: 1.
    """
    before_BPW = fixed.before_W[None, None] if above_BP1 is None else above_BP1 * fixed.before_W
    if sampled_BPW is None:
        return before_BPW, None
    after_BPW = torch.addcmul(fixed.least_W, sampled_BPW, fixed.slope_W)
    return before_BPW, after_BPW if above_BP1 is None else above_BP1 * after_BPW


def head_chances(
    probs_BPS: Tensor, sampled_BPW: Tensor | None, above_BP1: Tensor | None, siblings: Siblings
) -> tuple[Tensor, Tensor | None]:
    """Return the estimates of `prior_chances`, but from each node's distribution `probs_BPS`.

    Plans with costs use them. siblings: see `Constants`.
    """
    first_BP1 = chance_of(probs_BPS.square().sum(-1, keepdim=True))
    tested_BPW = siblings.tested(first_BP1)
    if above_BP1 is not None:
        tested_BPW = tested_BPW * above_BP1
    before_BPW = tested_BPW * siblings.passing(first_BP1)
    if sampled_BPW is None:
        return before_BPW, None
    return before_BPW, tested_BPW * siblings.passing(chance_of(sampled_BPW))


class SampledChain:
    """The choice of one beam, whose tokens are sampled from the head's complete distribution."""

    def __init__(self, head: Head, chooser: Chooser, admit: Admit | None = None) -> None:
        """Choose a chain's tokens.

        admit: returns whether a step's token is sampled, given its chance; None: it always is.
        """
        self.head, self.chooser, self.admit = head, chooser, admit

    def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
        tokens_B, q_BV = self.chooser.draft(logits_BPV[:, 0], step)
        assert q_BV is not None, "greedy and coupled decoding take the top k"
        tokens_B1, scores_B1, admitted_B1 = tokens_B[:, None], None, None
        if self.admit is not None:
            above_B1 = 1.0 if scores_BP is None else scores_BP
            admitted_B1 = self.admit(above_B1 * chance_of(q_BV.square().sum(-1, keepdim=True)))
            scores_B1 = above_B1 * chance_of(q_BV.gather(1, tokens_B1)) * admitted_B1
        ids_B1 = self.head.to_target_ids(tokens_B1)
        return Step(
            torch.zeros_like(ids_B1), ids_B1, scores_B1, q_BV[:, None], admitted_BW=admitted_B1
        )

    def q(self, beams: Beams) -> Tensor:
        """Return the distributions (B, L, V of the target) that the tokens were sampled from."""
        q_BLV = beams.join(lambda step: step.q_BPV)
        return spread(q_BLV, self.head.token_ids_V, self.head.config.vocab_size, 0.0)

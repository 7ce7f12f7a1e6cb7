"""Beam search with the head: from the tip, W beams of L drafted tokens, at fixed shapes and without a wait for the device.

What a step chooses is W pairs (beam of the step before, token), and nothing else of it is kept: tokens and back pointers are all that
verification asks of picked beams, and of drawn ones the few candidates that they were drawn from. All beams of a step go on, or those that
the caller names: the others stay nodes without children. The target's hidden state enters through `head.context`, once a draft; embeddings
are the target's own.

`Picks` takes the likeliest pairs of all, as the published code does. They are no samples, so verification takes them for point masses.
`Draws` draws them, so that p / q tests hold at every node (see there).

Shapes: B rows, W beams, P beams that a step starts from (1 at the tip, else W or fewer), Q beams that go on, L drafted tokens along a beam,
K candidates, H hidden size, V vocabulary that the head drafts from.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from decoding import cuda, noise
from decoding.chooser import Chooser
from decoding.draws import CHANCE_SLOPE, LEAST_CHANCE
from recurrent_drafting.head import Context
from recurrent_drafting.packed import Head

CANDIDATES = 64  # of the head's likeliest tokens that a child is drawn from; q is the head's distribution over these

Embed = Callable[[Tensor], Tensor]  # token ids (...) -> the target's embeddings (..., H)


@dataclass(slots=True)
class Step:
    """What one step chose."""

    parents_BW: Tensor  # beam of the step before
    tokens_BW: Tensor  # ids of the target
    scores_BW: (
        Tensor | None
    )  # picks: log probability of the beam; draws: the chance that it is reached and passes; None: nobody reads it


@dataclass(frozen=True, slots=True)
class Going:
    """The beams of a step that the next one starts from."""

    scores_BP: Tensor | None  # None: nobody reads them
    beams_BP: Tensor | None = None  # which; None: the first P, of steps without scores all

    def of(self, values_BW: Tensor) -> Tensor:
        """The values of these beams."""
        if self.beams_BP is not None:
            return values_BW.gather(1, self.beams_BP)
        return values_BW if self.scores_BP is None else values_BW[:, : self.scores_BP.shape[1]]

    def under(self, step: Step) -> Step:
        """A step that was chosen from these beams, with parents among all beams of the step before."""
        if self.beams_BP is None:
            return step
        return Step(self.beams_BP.gather(1, step.parents_BW), step.tokens_BW, step.scores_BW)


@dataclass(slots=True)
class Beams:
    """All steps of a draft, the first token's first."""

    steps: list[Step] = field(default_factory=list)
    going: list[Going] = field(default_factory=list)  # what each step but the first started from
    started: int = 0  # beams that the steps started from, summed; the tip is one

    @property
    def tokens_BLW(self) -> Tensor:
        """Token ids of the target."""
        return torch.stack([step.tokens_BW for step in self.steps], 1)

    @property
    def parents_BLW(self) -> Tensor:
        """Beams of the step before; 0 at the first step."""
        return torch.stack([step.parents_BW for step in self.steps], 1)


class Choose(Protocol):
    """What a step does with the head's logits."""

    def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step: ...


def search(
    head: Head,
    embed: Embed,
    tips_B: Tensor,
    hidden_BH: Tensor,
    length: int,
    choose: Choose,
    narrow: Callable[[Step], Going | None] | None = None,
) -> Beams:
    """Beams of `length` tokens after the tips, or of fewer where `narrow`, asked after each step for the beams to go on from, has none.

    hidden_BH: the target's hidden states of the tokens before the tips, in the head's dtype.
    """
    context = head.context(hidden_BH).unsqueeze(1)
    state_BPH = head.start(embed(tips_B))[:, None]
    beams, going = Beams(), None
    for number in range(length):
        logits_BPV = head.logits(head.features(context, state_BPH))
        step = choose(logits_BPV, None if going is None else going.scores_BP, number)
        beams.started += state_BPH.shape[1]
        beams.steps.append(step if going is None else going.under(step))
        going = Going(step.scores_BW) if narrow is None else narrow(step)
        if going is None or number + 1 == length:
            break
        beams.going.append(going)
        state_BPH = advance(head, embed, state_BPH, going.of(step.parents_BW), going.of(step.tokens_BW))
    return beams


def advance(head: Head, embed: Embed, state_BPH: Tensor, parents_BQ: Tensor, tokens_BQ: Tensor) -> Tensor:
    """The states (B, Q, H) of these beams. parents_BQ: among the P that the step started from."""
    if state_BPH.shape[1] == 1:
        state_BQH = state_BPH.expand(-1, parents_BQ.shape[1], -1)
    else:
        state_BQH = state_BPH.gather(1, parents_BQ[:, :, None].expand(-1, -1, state_BPH.shape[2]))
    return head.advance(state_BQH, embed(tokens_BQ))


def timed_step(head: Head, embed: Embed, context: Context, state_BPH: Tensor, choose: Choose) -> None:
    """One step from P beams, for timing: what `search` does between two choices, and the choice."""
    B, P, _ = state_BPH.shape
    beams_BP = torch.arange(P, device=state_BPH.device).expand(B, P)
    logits_BPV = head.logits(head.features(context, advance(head, embed, state_BPH, beams_BP, beams_BP)))
    choose(logits_BPV, torch.zeros(B, P, device=state_BPH.device), 1)


class Picks:
    """The W likeliest (beam, token) pairs.

    Of each beam only its own W best tokens can be among them, so a step keeps W log probabilities a beam.
    One beam whose probability nobody reads is the argmax. Where the rule shares the target's noise, tokens are ranked by it
    (`Chooser.log_scores`), else by the head's distribution at the temperature that the target is sampled at.
    """

    def __init__(
        self,
        head: Head,
        width: int,
        temperature: float = 1.0,
        coupled: Chooser | None = None,
        scored: bool = False,
    ) -> None:
        """coupled: whose shared noise ranks. scored: beam probabilities are wanted even of a single beam."""
        self.head, self.width, self.temperature, self.coupled = head, width, temperature, coupled
        self.unscored = width == 1 and not scored

    def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
        B, P, _ = logits_BPV.shape
        if self.unscored and self.coupled is None:
            tokens_BP = self.head.to_target_ids(logits_BPV.argmax(-1))
            return Step(torch.zeros_like(tokens_BP), tokens_BP, None)
        scores_BPW, tokens_BPW = self._best(logits_BPV, step)
        if P == 1:
            scores_BW = scores_BPW[:, 0] if scores_BP is None else scores_BPW[:, 0] + scores_BP
            return Step(torch.zeros_like(tokens_BPW[:, 0]), tokens_BPW[:, 0], scores_BW)
        assert scores_BP is not None
        best = (scores_BPW + scores_BP[:, :, None]).flatten(1).topk(self.width, dim=-1)
        tokens_BW = tokens_BPW.flatten(1).gather(1, best.indices)
        return Step(best.indices // self.width, tokens_BW, best.values)

    def _best(self, logits_BPV: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Log probabilities and ids (B, P, W) of each beam's likeliest next tokens, best first."""
        if self.coupled is not None:
            best = self.coupled.log_scores(self._over_target(logits_BPV), step).topk(self.width, dim=-1)
            return best.values, best.indices
        if self.temperature != 1.0:
            logits_BPV = logits_BPV / self.temperature
        # One pass, and half the time of the W values less the sum's logarithm.
        scores_BPV = logits_BPV.log_softmax(-1, dtype=torch.promote_types(logits_BPV.dtype, torch.float32))
        best = scores_BPV.topk(self.width, dim=-1)
        return best.values, self.head.to_target_ids(best.indices)

    def _over_target(self, logits_BPV: Tensor) -> Tensor:
        """Logits over the target's vocabulary: tokens outside a shortlist are ruled out."""
        ids_V = self.head.token_ids_V
        if ids_V is None:
            return logits_BPV
        shape = (*logits_BPV.shape[:-1], self.head.config.vocab_size)
        return logits_BPV.new_full(shape, float("-inf")).index_copy_(-1, ids_V, logits_BPV)


class Draws:
    """W nodes a step, drawn without replacement among siblings, in a way that leaves p / q tests exact at every node.

    Why p / q tests are exact there stands in decoding/draws.py.

    Here a step first decides how many children each node gets, from the nodes of the steps before and their distributions, and only then
    draws them, by noise that nothing else has used: its keys are of (seed, request, round, position, node, candidate). A node's children are
    the first of K clocks with the rates q in the order in which they ring (Gumbel top-k: Kool et al. 2019, arXiv 1903.06059, section 2.3).
    Every drawn child is in the tree, expanded or not.

    Stochastic beam search (Kool et al., section 4), which takes the W earliest of all nodes' clocks, keeps p / q exact as well (Jeon et al.
    2024, arXiv 2402.14160), its last beams alone too: that a child is there hangs on when its clock rang and on what rang before, and
    when a clock rings tells nothing of whose it is. What breaks the law is any look at the children themselves: leaving out unlikely ones,
    or testing the likeliest first. The tests show both.

    Budgets: the j-th child of a node is worth the chance that it is reached and passes. The chance of a child with probability q(x) is
    taken for 0.3 + 0.65 q(x), that of one not drawn yet for the mean of this. The W worthiest children are drawn; the first child of the
    first node always, so that no tree accepts less than a drawn chain.
    """

    def __init__(
        self,
        head: Head,
        width: int,
        length: int,
        rows: int,
        chooser: Chooser,
        admit: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """admit: from the worth (B, W) of the children that would be drawn, which of them are (boolean); None: all."""
        self.head, self.width, self.length, self.chooser, self.admit = head, width, length, chooser, admit
        self.candidates = min(head.config.num_drafted, max(CANDIDATES, width))
        device = chooser.device
        keys = [[chooser.draft_key(row, depth) for depth in range(length)] for row in range(rows)]
        counters_WK = torch.arange(width * self.candidates, device=device).view(width, self.candidates)
        keys_BL11 = cuda.tensor(keys, device)[:, :, None, None]
        self._waits_BLWK = noise.exponentials(keys_BL11, noise.scaled_ids(counters_WK))
        self._ranks_W = torch.arange(width, device=device)
        self._least = torch.full((), LEAST_CHANCE, device=device)
        self.q: list[tuple[Tensor, Tensor]] = []  # of each step's beams: ids of the target and probabilities, (B, P, K)
        self.admitted: list[Tensor] = []  # with `admit`: of each step (B, W)

    def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
        W, P = self.width, logits_BPV.shape[1]
        top = logits_BPV.topk(self.candidates, dim=-1)
        ids_BPK, q_BPK = self.head.to_target_ids(top.indices), self.chooser.warper.probs(top.values)
        self.q.append((ids_BPK, q_BPK))
        tested_BPW, slots_BW, drawn_BW = self._budget(q_BPK, scores_BP)
        order_BPW = (q_BPK / self._waits_BLWK[:, step, :P]).topk(W, dim=-1).indices  # the clocks in the order they ring

        def chosen(values_BPW: Tensor) -> Tensor:
            return values_BPW.flatten(1).gather(1, slots_BW)

        tokens_BW = chosen(ids_BPK.gather(2, order_BPW))
        if drawn_BW is not None:
            self.admitted.append(drawn_BW)
        if step + 1 == self.length:
            return Step(slots_BW // W, tokens_BW, None)
        scores_BW = chosen(tested_BPW) * self._chance(chosen(q_BPK.gather(2, order_BPW)))
        return Step(slots_BW // W, tokens_BW, scores_BW if drawn_BW is None else scores_BW * drawn_BW)

    def _budget(self, q_BPK: Tensor, reached_BP: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Which children will be drawn, before any is: the chance (B, P, W) that the j-th child of a node comes to be tested, the W
        children's places in it, a node's children next to each other in their order, and which are admitted."""
        W = self.width
        chance_BP1 = self._chance(q_BPK.square().sum(-1, keepdim=True))
        tested_BPW = (1 - chance_BP1).pow(self._ranks_W)
        if reached_BP is None:  # all of them are the tip's
            slots_BW = self._ranks_W.expand(len(q_BPK), W)
        else:
            tested_BPW = tested_BPW * reached_BP[:, :, None]
            ranked_BPW = tested_BPW * chance_BP1
            ranked_BPW[:, 0, 0] = float("inf")
            slots_BW = ranked_BPW.flatten(1).topk(W, dim=-1).indices.sort(-1).values
        if self.admit is None:
            return tested_BPW, slots_BW, None
        return tested_BPW, slots_BW, self.admit((tested_BPW * chance_BP1).flatten(1).gather(1, slots_BW))

    def _chance(self, q: Tensor) -> Tensor:
        """The chance of a drawn token to pass, before anything was seen, by its probability."""
        return torch.add(self._least, q, alpha=CHANCE_SLOPE)

"""Beam search with the head: from the tip, W beams of L drafted tokens, at fixed shapes and without
a wait for the device.

What a step chooses is W pairs (beam of the step before, token), and of picked ones nothing else is
kept: tokens and back pointers are all that verification asks for. All beams of a step go on, or
those that the caller names: the others stay nodes without children. The target's hidden state
enters through `head.context`, once a draft; embeddings are the target's own.

`Picks` takes the likeliest pairs of all, as the published code does. They are no samples, so
verification takes them for point masses. recurrent_drafting/drawn_beams.py draws them, so that p /
q tests hold at every node; of these is kept what they were drawn from.

Shapes: B rows, W beams, P beams that a step starts from (1 at the tip, else W or fewer), Q beams
that go on, L drafted tokens along a beam, S symbols that a child is drawn from, H hidden size, V
vocabulary that the head drafts from.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from decoding.interfaces import Chooser
from recurrent_drafting.head import Context, Head

Embed = Callable[[Tensor], Tensor]  # token ids (...) -> the target's embeddings (..., H)


@dataclass(slots=True)
class Step:
    """What one step chose."""

    parents_BW: Tensor  # beam of the step before
    tokens_BW: Tensor  # ids of the target
    # picks: log probability of the beam; draws: the chance that it is reached and passes; None:
    # nobody reads it
    scores_BW: Tensor | None
    # Of drawn beams, of the P that the step started from, what its tokens were drawn from
    # (recurrent_drafting/drawn_beams.py): of a single beam all tokens, else symbols and, of the
    # last of them, the tail.
    q_BPV: Tensor | None = None
    tail_BPV: Tensor | None = None
    places_BPS: Tensor | None = None
    rates_BPS: Tensor | None = None
    admitted_BW: Tensor | None = None  # which were drawn and will be verified; None: all


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
        """A step that was chosen from these beams, with parents among all beams of the
        step before.
        """
        if self.beams_BP is None:
            return step
        return replace(step, parents_BW=self.beams_BP.gather(1, step.parents_BW))


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

    def made(self, part: Callable[[Step], Tensor | None]) -> Tensor:
        """What each step of drawn beams made, one behind the other along the second dimension."""
        parts = [part(step) for step in self.steps]
        return torch.cat([each for each in parts if each is not None], 1)


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
    """Beams of `length` tokens after the tips, or of fewer where `narrow`, asked after each step
    for the beams to go on from, has none.

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
        state_BPH = advance(
            head, embed, state_BPH, going.of(step.parents_BW), going.of(step.tokens_BW)
        )
    return beams


def advance(
    head: Head, embed: Embed, state_BPH: Tensor, parents_BQ: Tensor, tokens_BQ: Tensor
) -> Tensor:
    """The states (B, Q, H) of these beams. parents_BQ: among the P that the step started from."""
    if state_BPH.shape[1] == 1:
        state_BQH = state_BPH.expand(-1, parents_BQ.shape[1], -1)
    else:
        state_BQH = state_BPH.gather(1, parents_BQ[:, :, None].expand(-1, -1, state_BPH.shape[2]))
    return head.advance(state_BQH, embed(tokens_BQ))


def timed_step(
    head: Head, embed: Embed, context: Context, state_BPH: Tensor, choose: Choose
) -> None:
    """One step from P beams, for timing: what `search` does between two choices, and the choice."""
    B, P, _ = state_BPH.shape
    beams_BP = torch.arange(P, device=state_BPH.device).expand(B, P)
    logits_BPV = head.logits(
        head.features(context, advance(head, embed, state_BPH, beams_BP, beams_BP))
    )
    choose(logits_BPV, torch.zeros(B, P, device=state_BPH.device), 1)


class Picks:
    """The W likeliest (beam, token) pairs.

    Of each beam only its own W best tokens can be among them, so a step keeps W log probabilities a
    beam. One beam whose probability nobody reads is the argmax. Where the rule shares the target's
    noise, tokens are ranked by it (`Chooser.log_scores`), else by the head's distribution at the
    temperature that the target is sampled at.
    """

    def __init__(
        self,
        head: Head,
        width: int,
        temperature: float = 1.0,
        coupled: Chooser | None = None,
        scored: bool = False,
    ) -> None:
        """coupled: whose shared noise ranks. scored: beam probabilities are wanted even of a single
        beam.
        """
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
            over_target_BPV = over_target(self.head, logits_BPV, float("-inf"))
            best = self.coupled.log_scores(over_target_BPV, step).topk(self.width, dim=-1)
            return best.values, best.indices
        if self.temperature != 1.0:
            logits_BPV = logits_BPV / self.temperature
        # One pass, and half the time of the W values less the sum's logarithm.
        scores_BPV = logits_BPV.log_softmax(
            -1, dtype=torch.promote_types(logits_BPV.dtype, torch.float32)
        )
        best = scores_BPV.topk(self.width, dim=-1)
        return best.values, self.head.to_target_ids(best.indices)


def over_target(head: Head, values_BPV: Tensor, others: float) -> Tensor:
    """Values over the head's vocabulary as values over the target's; tokens outside a shortlist get
    `others`.
    """
    ids_V = head.token_ids_V
    if ids_V is None:
        return values_BPV
    shape = (*values_BPV.shape[:-1], head.config.vocab_size)
    return values_BPV.new_full(shape, others).index_copy_(-1, ids_V, values_BPV)

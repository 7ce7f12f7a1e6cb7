"""Beam search with the recurrent head: W beams of L drafted tokens after the tip, at fixed shapes.

A step chooses W pairs (beam of the previous step, token) without waiting for the device. Their
tokens and back pointers are all that verification needs of top-k beams. Beams that the search does
not continue from stay nodes without children. The target's hidden state is used once per draft, in
`Head.context`; embeddings are the target's.

`TopBeams` takes the likeliest pairs, as the published code does, and verification treats them as
point masses. recurrent_drafting/sampled_beams.py samples pairs and keeps the distributions that
they were sampled from, so that p / q tests are exact at every node.

Shapes: B rows, H hidden size, K tokens read, L drafted tokens along a beam, P beams that a step
starts from (1 at the tip), Q beams that it continues to, S symbols that a child is sampled from, V
the head's drafted vocabulary, W beams.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser
from decoding.models.draft_vocabulary import spread
from recurrent_drafting.head import Context, Head

Embed = Callable[[Tensor], Tensor]  # token ids (...) -> the target's embeddings (..., H)


@dataclass(slots=True)
class Step:
    """The beams that one step chose."""

    parents_BW: Tensor  # beams of the previous step
    tokens_BW: Tensor  # ids of the target
    # top-k beams: log probability; sampled beams: chance of acceptance; None: not needed
    scores_BW: Tensor | None
    # The distributions of sampled beams (recurrent_drafting/sampled_beams.py), for each of the P
    # beams: q over all tokens for a single beam; else symbols, their rates, and the tail, which is
    # the last symbol's distribution.
    q_BPV: Tensor | None = None
    tail_BPV: Tensor | None = None
    places_BPS: Tensor | None = None
    rates_BPS: Tensor | None = None
    admitted_BW: Tensor | None = None  # mask of the sampled nodes to verify; None: all


@dataclass(frozen=True, slots=True)
class Frontier:
    """The beams of a step that the next one starts from."""

    scores_BP: Tensor | None  # None: not needed
    beams_BP: Tensor | None = None  # indices; None: the first P, or all if there are no scores

    def select(self, values_BW: Tensor) -> Tensor:
        """Return the values of these beams (B, P), given the values of all beams of the step."""
        if self.beams_BP is not None:
            return values_BW.gather(1, self.beams_BP)
        return values_BW if self.scores_BP is None else values_BW[:, : self.scores_BP.shape[1]]


@dataclass(slots=True)
class Beams:
    """All steps of a draft in order."""

    steps: list[Step] = field(default_factory=list)
    frontiers: list[Frontier] = field(default_factory=list)  # of every step but the first
    num_started: int = 0  # beams that all steps started from; the tip is one

    @property
    def tokens_BLW(self) -> Tensor:
        """Token ids of the target."""
        return torch.stack([step.tokens_BW for step in self.steps], 1)

    @property
    def parents_BLW(self) -> Tensor:
        """Beams of the previous step; 0 at the first step."""
        return torch.stack([step.parents_BW for step in self.steps], 1)

    def join(self, part: Callable[[Step], Tensor | None]) -> Tensor:
        """Concatenate a part of every step along dimension 1, leaving out steps without it."""
        parts = [part(step) for step in self.steps]
        return torch.cat([each for each in parts if each is not None], 1)


class Choose(Protocol):
    """The choice of a step's beams from the head's logits."""

    def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
        """Return the beams that step `step` (from 0) chooses.

        Their parents are indices in P. scores_BP: scores of the P beams; None at the tip, or if
        scores are not needed.
        """
        ...


def search(
    head: Head,
    embed: Embed,
    tips_B: Tensor,
    hidden_BH: Tensor,
    length: int,
    choose: Choose,
    narrow: Callable[[Step], Frontier | None] | None = None,
    state_BH: Tensor | None = None,
) -> Beams:
    """Return beams of at most `length` tokens after the tips.

    embed: returns the target's embeddings of token ids. hidden_BH: the target's hidden states at
    the tokens before the tips, in the head's dtype. narrow: returns the beams of a step to continue
    from, or None to end the search; by default all beams continue. state_BH: the head's states
    before the tips, if tokens that the target has not read precede them (`read_tokens`).
    """
    context = head.context(hidden_BH).unsqueeze(1)
    tips_BH = embed(tips_B)
    state_BH = head.start(tips_BH) if state_BH is None else head.advance(state_BH, tips_BH)
    state_BPH = state_BH[:, None]
    beams, frontier = Beams(), None
    for number in range(length):
        logits_BPV = head.logits(head.features(context, state_BPH))
        step = choose(logits_BPV, None if frontier is None else frontier.scores_BP, number)
        parents_BW = step.parents_BW
        if frontier is not None and frontier.beams_BP is not None:
            step.parents_BW = frontier.beams_BP.gather(1, parents_BW)
        beams.num_started += state_BPH.shape[1]
        beams.steps.append(step)
        frontier = Frontier(step.scores_BW) if narrow is None else narrow(step)
        if frontier is None or number + 1 == length:
            break
        beams.frontiers.append(frontier)
        state_BPH = advance(
            head, embed, state_BPH, frontier.select(parents_BW), frontier.select(step.tokens_BW)
        )
    return beams


def read_tokens(
    head: Head, embed: Embed, tokens_B: Sequence[Sequence[int]], device: torch.device
) -> Tensor:
    """Return the head's states (B, H) after these tokens, zero for rows without tokens."""
    counts_B = [len(tokens) for tokens in tokens_B]
    padded = [[*tokens, *[0] * (max(counts_B) - len(tokens))] for tokens in tokens_B]
    embedded_BKH = embed(devices.tensor(padded, device))
    counts_B1 = devices.tensor(counts_B, device)[:, None]
    state_BH = torch.zeros_like(embedded_BKH[:, 0])
    for step in range(max(counts_B)):
        next_BH = head.advance(state_BH, embedded_BKH[:, step])
        state_BH = torch.where(step < counts_B1, next_BH, state_BH)
    return state_BH


def advance(
    head: Head, embed: Embed, state_BPH: Tensor, parents_BQ: Tensor, tokens_BQ: Tensor
) -> Tensor:
    """Return the states (B, Q, H) after these tokens. parents_BQ: their parents' indices in P."""
    if state_BPH.shape[1] == 1:
        state_BQH = state_BPH.expand(-1, parents_BQ.shape[1], -1)
    else:
        state_BQH = state_BPH.gather(1, parents_BQ[:, :, None].expand(-1, -1, state_BPH.shape[2]))
    return head.advance(state_BQH, embed(tokens_BQ))


def run_step(head: Head, embed: Embed, context: Context, state_BPH: Tensor, choose: Choose) -> None:
    """Run one step of `search` from P beams, for timing."""
    B, P, _ = state_BPH.shape
    beams_BP = torch.arange(P, device=state_BPH.device).expand(B, P)
    state_BPH = advance(head, embed, state_BPH, beams_BP, beams_BP)
    logits_BPV = head.logits(head.features(context, state_BPH))
    choose(logits_BPV, torch.zeros(B, P, device=state_BPH.device), 1)


class TopBeams:
    """The choice of the W likeliest pairs (beam, token).

    Only the W best tokens of each beam can be among them, so a step keeps W log probabilities per
    beam. A single beam without scores is the argmax. Under the coupled rule, tokens are ranked with
    the noise that drafter and target share (`Chooser.log_scores`), otherwise by their probabilities
    at the target's temperature.
    """

    def __init__(
        self,
        head: Head,
        width: int,
        temperature: float = 1.0,
        coupled: Chooser | None = None,
        scored: bool = False,
    ) -> None:
        """Choose W = `width` beams.

        coupled: the chooser, under the coupled rule only. scored: whether a single beam has scores.
        """
        self.head, self.width, self.temperature, self.coupled = head, width, temperature, coupled
        self.is_argmax = width == 1 and not scored and coupled is None

    def __call__(self, logits_BPV: Tensor, scores_BP: Tensor | None, step: int) -> Step:
        if self.is_argmax:
            tokens_BP = self.head.to_target_ids(logits_BPV.argmax(-1))
            return Step(torch.zeros_like(tokens_BP), tokens_BP, None)
        scores_BPW, tokens_BPW = self._rank_tokens(logits_BPV, step)
        if logits_BPV.shape[1] == 1:
            scores_BW = scores_BPW[:, 0] if scores_BP is None else scores_BPW[:, 0] + scores_BP
            return Step(torch.zeros_like(tokens_BPW[:, 0]), tokens_BPW[:, 0], scores_BW)
        assert scores_BP is not None
        best = (scores_BPW + scores_BP[:, :, None]).flatten(1).topk(self.width, dim=-1)
        tokens_BW = tokens_BPW.flatten(1).gather(1, best.indices)
        return Step(best.indices // self.width, tokens_BW, best.values)

    def _rank_tokens(self, logits_BPV: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return scores and target ids (B, P, W) of each beam's best tokens, best first."""
        if self.coupled is not None:
            ids_V, vocab_size = self.head.token_ids_V, self.head.config.vocab_size
            full_BPV = spread(logits_BPV, ids_V, vocab_size, float("-inf"))
            best = self.coupled.log_scores(full_BPV, step).topk(self.width, dim=-1)
            return best.values, best.indices
        if self.temperature != 1.0:
            logits_BPV = logits_BPV / self.temperature
        # One pass takes half the time of the W logits less the logarithm of the sum.
        scores_BPV = logits_BPV.log_softmax(
            -1, dtype=torch.promote_types(logits_BPV.dtype, torch.float32)
        )
        best = scores_BPV.topk(self.width, dim=-1)
        return best.values, self.head.to_target_ids(best.indices)

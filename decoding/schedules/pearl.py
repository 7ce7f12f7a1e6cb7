"""PEARL: draft the next chunk while the target verifies the last one (Liu et al. 2025).

Source: arXiv 2408.11850. A row is in one of two states. In *pre-verify* the drafter makes a chunk
of gamma tokens while the target runs over the tip alone, which tests the chunk's first token; if it
is accepted, the row assumes the other tokens. In *post-verify* the drafter makes the next chunk
while the target tests the assumed tokens and the first of the new chunk. A rejection discards the
new chunk; otherwise the chunk's first token replaces the bonus token. There are two ablations:
without pre-verify, all tokens of a new chunk are assumed and tested in the next round; without
post-verify, nothing is drafted while assumed tokens are tested.

The clock is VIRTUAL: the two lanes (draft, target) run one after the other on the complete machine,
and a round counts the longer lane plus the work that cannot overlap. Tokens and acceptance are
real; the time is what two such machines would take. On a GPU a round waits for the end of each
lane, to time it, and once more for the outcome and the new chunk's tokens.

A trained head drafts the next chunk from its own outputs: it reads states of the target, which has
not read the assumed tokens yet. Its drafter stores them once they are verified.

Unlike the published code, this version is exact: no two tests or drafts share a uniform, every
token is tested, and a stop token inside the span ends the row.

Shapes: B running rows, A assumed tokens, N tokens of a window (the assumed ones and the new chunk's
first), V vocabulary.
"""

from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Observation, Outcome, Proposal, Readback, Stopping
from decoding.rounds.batch import Batch, Row
from decoding.sampling.readback import DeviceReadback


@dataclass(slots=True)
class Lane:
    """The assumed tokens of a row, which were drafted after its tip and are not tested yet."""

    tokens: list[int] = field(default_factory=list)
    q_AV: Tensor | None = None
    turns: int = 0  # rounds of the schedule, including those without a target forward


@dataclass(slots=True)
class LaneSeconds:
    """Seconds of a round's two lanes, and of both together, measured or on the virtual clock."""

    draft: float
    target: float
    both: float


class Pearl(Batch):
    """The rows of a batch on PEARL's schedule, with a virtual clock."""

    pre_verify = post_verify = True
    one_row = False  # whether the schedule runs one prompt at a time
    chunk: int | None = None  # length of the next chunk; None: gamma

    def width(self) -> int:
        """Return the room for assumed tokens and a full chunk, in tokens."""
        return 2 * self.gamma + 1

    def open(self) -> None:
        """Prefill like serial decoding, and start every row in pre-verify."""
        self.lanes = [Lane() for _ in self.rows]
        super().open()

    def _round(self) -> None:
        """Run both lanes, verify, and charge the round's seconds to the rows."""
        chunk, forward, took = self._both_lanes()
        settled = perf_counter()
        chunk = chunk if chunk is not None and max(chunk.counts_B) else None
        steps = chunk.steps if chunk is not None else 0
        # a drafter at the end of its context proposes no tokens to assume
        if forward is None and chunk is None:
            forward = self._verify_lane(fresh=False)
            late = perf_counter() - settled
            took = LaneSeconds(took.draft, took.target + late, took.both + late)
            settled = perf_counter()
        if forward is None:
            assert chunk is not None
            self._assume_whole(chunk)
            self._charge(self.rows, steps, took, perf_counter() - settled)
            return
        logits_BNV, hidden_BNC = forward
        for row in self.rows:
            row.generation.verified += logits_BNV.shape[1] - 1
        window, firsts = self._window(chunk)
        drafted = () if chunk is None else (chunk.tokens_BN,)
        readback = DeviceReadback(*drafted, watched=self._watched(logits_BNV, window))
        outcome = self._test(logits_BNV, window, readback)
        chunk_B = readback.drafter_values()[0] if drafted else [[]] * len(self.lanes)
        # the target has not read a new chunk's first token
        pairs = zip(outcome.accepted_B, self.lanes, strict=True)
        read_B = [min(accepted, len(lane.tokens)) for accepted, lane in pairs]
        self.target.commit(None, [1 + read for read in read_B])
        rows, keep = self.rows, self._settle(outcome, chunk, chunk_B, window, firsts)
        assert self.drafter is not None
        self.drafter.observe(
            Observation(replace(outcome, accepted_B=read_B), logits_BNV, hidden_BNC)
        )
        self.drafter.rollback(
            [self._kept(row.sequence, lane) for row, lane in zip(rows, self.lanes, strict=True)]
        )
        self._charge(rows, steps, took, perf_counter() - settled)
        if len(keep) < len(rows):
            self.lanes = [self.lanes[b] for b in keep]
            self._select(keep)

    def _both_lanes(self) -> tuple[Proposal | None, tuple[Tensor, Tensor] | None, LaneSeconds]:
        """Return the next chunk, the target's forward, and the seconds of both lanes.

        The lanes run in turn and are timed as if they ran at the same time.
        """
        began = perf_counter()
        request = self._request()
        assert self.drafter is not None
        chunk = self.drafter.propose(*request) if request is not None else None
        if request is not None:
            devices.synchronize(self.target.device)
        drafted_at = perf_counter()
        forward = self._verify_lane(fresh=request is not None)
        draft, target = drafted_at - began, perf_counter() - drafted_at
        return chunk, forward, LaneSeconds(draft, target, max(draft, target))

    @staticmethod
    def _kept(sequence: list[int], lane: Lane) -> int:
        """Return the number of tokens that the drafter keeps: all but the last of its context."""
        return len(sequence) + len(lane.tokens) - 1

    def _request(self) -> tuple[list[list[int]], list[int], list[Stopping], Chooser] | None:
        """Return the drafter's arguments for the next chunk of every row, None if no row drafts.

        The chunk follows the assumed tokens.
        """
        pairs = zip(self.rows, self.lanes, strict=True)
        contexts_B = [row.sequence + lane.tokens for row, lane in pairs]
        turns_B = [lane.turns for lane in self.lanes]
        for lane in self.lanes:
            lane.turns += 1
        budgets_B = [
            max(0, min(self.chunk or self.gamma, row.limit - len(context)))
            if self.post_verify or not lane.tokens
            else 0
            for row, lane, context in zip(self.rows, self.lanes, contexts_B)
        ]
        budgets_B = [row.stopping.limit(budget) for row, budget in zip(self.rows, budgets_B)]
        if max(budgets_B) == 0:
            return None
        self.chooser.begin(
            [row.key for row in self.rows], turns_B, [len(c) for c in contexts_B], max(budgets_B)
        )
        return contexts_B, budgets_B, [row.stopping for row in self.rows], self.chooser

    def _verify_lane(self, fresh: bool) -> tuple[Tensor, Tensor] | None:
        """Run the target over every row's tip and assumed tokens, and wait for it.

        Returns None for a new chunk without pre-verify.
        """
        if not self.pre_verify and fresh and not self.lanes[0].tokens:
            return None
        width = max(len(lane.tokens) for lane in self.lanes)
        padded = [[*lane.tokens, *[0] * (width - len(lane.tokens))] for lane in self.lanes]
        tokens_BN = devices.tensor(padded, self.target.device, torch.long)
        counts_B = [len(lane.tokens) for lane in self.lanes]
        logits_BNV, hidden_BNC, _ = self._forward(Proposal(tokens_BN, counts_B))
        devices.synchronize(self.target.device)
        return logits_BNV, hidden_BNC

    def _window(self, chunk: Proposal | None) -> tuple[Proposal, list[bool]]:
        """Return the proposal that this round's forward tests.

        Also returns for each row whether the proposal ends with a new chunk's first token.
        """
        fresh_B = [0] * len(self.rows) if chunk is None else chunk.counts_B
        firsts = [count > 0 for count in fresh_B]
        counts_B = [len(lane.tokens) + first for lane, first in zip(self.lanes, firsts)]
        width = max(counts_B)
        # The new chunk is still on the device, where its first token is inserted.
        padded = [lane.tokens + [0] * (width + 1 - len(lane.tokens)) for lane in self.lanes]
        tokens_BX = devices.tensor(padded, self.target.device)
        if chunk is not None:
            # rows without a new chunk write to the unused last column
            places = [
                [len(lane.tokens) if first else width] for lane, first in zip(self.lanes, firsts)
            ]
            places_B1 = devices.tensor(places, self.target.device)
            tokens_BX.scatter_(1, places_B1, chunk.tokens_BN[:, :1])
        q_BNV = self._window_q(chunk, firsts, width)
        return Proposal(tokens_BX[:, :width], counts_B, None, q_BNV), firsts

    def _window_q(self, chunk: Proposal | None, firsts: list[bool], width: int) -> Tensor | None:
        """Return the distributions (B, width, V) that the window's tokens were sampled from.

        Returns None if the rule does not test q.
        """
        known = [lane.q_AV for lane in self.lanes if lane.q_AV is not None]
        fresh = chunk.q_BNV if chunk is not None else None
        if not known and fresh is None:
            return None
        dtype = fresh.dtype if fresh is not None else known[0].dtype
        q_BNV = torch.zeros(
            len(self.lanes), width, self.target.vocab_size, dtype=dtype, device=self.target.device
        )
        for b, lane in enumerate(self.lanes):
            if lane.q_AV is not None:
                q_BNV[b, : len(lane.tokens)] = lane.q_AV
            if firsts[b] and fresh is not None:
                q_BNV[b, len(lane.tokens)] = fresh[b, 0]
        return q_BNV

    def _test(self, logits_BNV: Tensor, window: Proposal, readback: Readback) -> Outcome:
        """Verify the window; logits that the forward lacks are padded, as the rule ignores them."""
        missing = window.tokens_BN.shape[1] + 1 - logits_BNV.shape[1]
        if missing > 0:
            logits_BNV = torch.cat((logits_BNV, logits_BNV[:, -1:].expand(-1, missing, -1)), 1)
        rows = self.rows
        turns_B = [lane.turns - 1 for lane in self.lanes]
        positions_B = [len(row.sequence) for row in rows]
        self.chooser.begin([row.key for row in rows], turns_B, positions_B, logits_BNV.shape[1])
        return self.rule(
            logits_BNV, window if max(window.counts_B) else None, self.chooser, readback
        )

    def _settle(
        self,
        outcome: Outcome,
        chunk: Proposal | None,
        chunk_B: list[list[int]],
        window: Proposal,
        firsts: list[bool],
    ) -> list[int]:
        """Emit the accepted tokens, and set every row's assumed tokens.

        Returns the indices of the rows that continue.
        """
        tokens_B = []
        for b, lane in enumerate(self.lanes):
            passed = outcome.accepted_B[b] == window.counts_B[b]
            tokens_B.append(outcome.tokens_B[b])
            lane.tokens, lane.q_AV = [], None
            # There are no logits after a new chunk's first token, so there is no bonus token;
            # the rest of the chunk is assumed instead.
            if passed and firsts[b] and chunk is not None:
                tokens_B[b] = tokens_B[b][:-1]
                lane.tokens = chunk_B[b][1 : chunk.counts_B[b]]
                lane.q_AV = None if chunk.q_BNV is None else chunk.q_BNV[b, 1 : chunk.counts_B[b]]
        drafted_B = [0] * len(self.rows) if chunk is None else chunk.counts_B
        return self._emit(tokens_B, drafted_B, outcome.tested_B, outcome.accepted_B)

    def _assume_whole(self, chunk: Proposal) -> None:
        """Assume all tokens of a new chunk (no pre-verify); the next round tests them."""
        (chunk_B,) = devices.read(chunk.tokens_BN)
        for b, (row, lane, count) in enumerate(zip(self.rows, self.lanes, chunk.counts_B)):
            lane.tokens = chunk_B[b][:count]
            lane.q_AV = None if chunk.q_BNV is None else chunk.q_BNV[b, :count]
            row.generation.drafted += count

    def _charge(self, rows: list[Row], steps: int, took: LaneSeconds, rest: float) -> None:
        """Add a round's seconds to the rows' statistics. rest: seconds outside the lanes."""
        for row in rows:
            generation = row.generation
            generation.decode_seconds += took.both + rest
            generation.lanes_seconds += took.both
            generation.shorter_seconds += min(took.draft, took.target)
            generation.draft_seconds += took.draft
            generation.target_seconds += took.target
            generation.draft_steps += steps
            generation.draft_frontiers += steps
            if generation.rounds == 1 and not generation.first_token_seconds:
                seconds = generation.prefill_seconds + generation.decode_seconds
                generation.first_token_seconds = seconds
            generation.end_round()


class PearlWithoutPre(Pearl):
    """The ablation without pre-verify: all tokens of a new chunk are assumed."""

    pre_verify = False
    one_row = True


class PearlWithoutPost(Pearl):
    """The ablation without post-verify: nothing is drafted while assumed tokens are tested."""

    post_verify = False

"""PEARL: draft the next chunk while the target verifies the last one (Liu et al. 2025, arXiv
2408.11850).

A row is in one of two states. In *pre-verify* the drafter makes a chunk of gamma tokens while the
target runs over the tip alone, which tells whether the chunk's first token passes; if so the others
are assumed. In *post-verify* the drafter makes the next chunk while the target tests the assumed
tokens and the first of the new chunk. A failure throws the new chunk away. There is no bonus token
where a drafted one stands in its place. Both ablations are here: without pre-verify a fresh chunk
is assumed whole and all of it is tested in the next round; without post-verify nothing is drafted
while assumed tokens are tested.

The clock is VIRTUAL: the lanes run one after the other, each on the whole machine, and a round is
charged the longer of the two and what cannot overlap. Tokens and acceptance are real; the time is
what two machines of this kind would take. Where the host runs ahead of the device a round waits for
the end of each lane, or there would be nothing to time, and once for what was accepted, which
brings the new chunk's tokens along.

Where the published code breaks the law, this does not: every test has a uniform of its own (keyed
by the round, in which tests and drafts of one position never meet), no token goes untested, and a
stop token inside the span ends the row.

Shapes: B running rows, A assumed tokens, N tokens of a window (the assumed ones and the new chunk's
first), V vocabulary.
"""

from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Chooser, Observation, Outcome, Proposal, Readback, Stopping
from decoding.rounds.batch import Batch, Row
from decoding.sampling.readback import DeviceReadback


@dataclass(slots=True)
class Lane:
    """What a row assumes: tokens behind its tip that were drafted and not tested, and the rows they
    were drawn from.
    """

    tokens: list[int] = field(default_factory=list)
    q_AV: Tensor | None = None
    turns: int = 0  # rounds of the schedule; not all run the target


@dataclass(slots=True)
class Took:
    """Seconds of a round's two lanes, and of both together: the longer one's where they run at the
    same time.
    """

    draft: float
    target: float
    both: float


class Pearl(Batch):
    """The rows of a batch under PEARL's schedule, with a virtual clock."""

    pre_verify = True
    post_verify = True
    one_row = False  # whether the schedule runs one prompt at a time
    chunk: int | None = None  # tokens of the next chunk; None: gamma

    def width(self) -> int:
        """Assumed tokens, and a whole chunk behind them in the drafter."""
        return 2 * self.gamma + 1

    def open(self) -> None:
        """As serial decoding; every row starts in pre-verify."""
        self.lanes = [Lane() for _ in self.rows]
        super().open()

    def _round(self) -> None:
        """Both lanes, one after the other; then the verdict, and the longer lane on the clock."""
        chunk, forward, took = self._both_lanes()
        settled = perf_counter()
        steps = chunk.steps if chunk is not None else 0
        # a drafter that is at the end of its context has nothing to assume
        if forward is None and chunk is None:
            forward = self._verify_lane(fresh=False)
            late = perf_counter() - settled
            took = Took(took.draft, took.target + late, took.both + late)
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
        rows, keep = self.rows, self._settle(outcome, chunk, chunk_B, window, firsts)
        assert self.drafter is not None
        self.drafter.observe(Observation(outcome, logits_BNV, hidden_BNC))
        self.drafter.rollback(
            [self._kept(row.sequence, lane) for row, lane in zip(rows, self.lanes, strict=True)]
        )
        self._charge(rows, steps, took, perf_counter() - settled)
        if len(keep) < len(rows):
            self.lanes = [self.lanes[b] for b in keep]
            self._select(keep)

    def _both_lanes(self) -> tuple[Proposal | None, tuple[Tensor, Tensor] | None, Took]:
        """The next chunk, the target's forward, and what the lanes took: here one after the other,
        charged as if at the same time.
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
        return (
            chunk if chunk is not None and max(chunk.counts_B) else None,
            forward,
            Took(draft, target, max(draft, target)),
        )

    @staticmethod
    def _kept(sequence: list[int], lane: Lane) -> int:
        """Tokens that the drafter may keep: all but the last of what it will be asked to go on
        from.
        """
        return len(sequence) + len(lane.tokens) - 1

    def _request(self) -> tuple[list[list[int]], list[int], list[Stopping], Chooser] | None:
        """What to ask of the drafter: the next chunk of every row, behind what it assumes; None
        where no row drafts.
        """
        contexts_B = [
            row.sequence + lane.tokens for row, lane in zip(self.rows, self.lanes, strict=True)
        ]
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
        """The target over every row's tip and assumed tokens, when it is done; None where, without
        pre-verify, a chunk is fresh.
        """
        if not self.pre_verify and fresh and not self.lanes[0].tokens:
            return None
        fed_B = [
            [row.sequence[-1], *lane.tokens]
            for row, lane in zip(self.rows, self.lanes, strict=True)
        ]
        width = max(len(fed) for fed in fed_B)
        padded = [fed + [0] * (width - len(fed)) for fed in fed_B]
        fed_BN = devices.tensor(padded, self.target.device)
        forward = self._processed(*self.target.forward(fed_BN, None, self.taps), fed_BN[:, 1:])
        devices.synchronize(self.target.device)
        return forward

    def _window(self, chunk: Proposal | None) -> tuple[Proposal, list[bool]]:
        """What this round's forward tests, as a proposal, and for each row whether it ends with a
        new chunk's first token.
        """
        fresh_B = [0] * len(self.rows) if chunk is None else chunk.counts_B
        firsts = [count > 0 for count in fresh_B]
        counts_B = [
            len(lane.tokens) + first for lane, first in zip(self.lanes, firsts, strict=True)
        ]
        width = max(counts_B)
        # The new chunk is not known to the host yet: its first token is put in its place on the
        # device.
        padded = [lane.tokens + [0] * (width + 1 - len(lane.tokens)) for lane in self.lanes]
        tokens_BX = devices.tensor(padded, self.target.device)
        if chunk is not None:
            # A row without a new chunk has it put where nobody looks.
            places = [
                [len(lane.tokens) if first else width]
                for lane, first in zip(self.lanes, firsts, strict=True)
            ]
            tokens_BX.scatter_(
                1, devices.tensor(places, self.target.device), chunk.tokens_BN[:, :1]
            )
        return Proposal(
            tokens_BX[:, :width], counts_B, None, self._window_q(chunk, firsts, width)
        ), firsts

    def _window_q(self, chunk: Proposal | None, firsts: list[bool], width: int) -> Tensor | None:
        """The distributions that a window's tokens were drawn from, (B, width, V); None where the
        rule tests none.
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
        """The rule's verdict; the row behind a window's last token may be missing, and is not used
        then.
        """
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
        """Commit and emit what passed, and set what every row assumes next. Returns the rows that
        go on.
        """
        tokens_B, kept_B = [], []
        for b, lane in enumerate(self.lanes):
            accepted = outcome.accepted_B[b]
            kept_B.append(1 + min(accepted, len(lane.tokens)))
            passed = accepted == window.counts_B[b]
            # Behind a new chunk's first token there is no row to draw a bonus from: the chunk goes
            # on in its place.
            tokens_B.append(
                outcome.tokens_B[b][:-1] if passed and firsts[b] else outcome.tokens_B[b]
            )
            lane.tokens, lane.q_AV = [], None
            if passed and firsts[b] and chunk is not None:
                lane.tokens = chunk_B[b][1 : chunk.counts_B[b]]
                lane.q_AV = None if chunk.q_BNV is None else chunk.q_BNV[b, 1 : chunk.counts_B[b]]
        self.target.commit(None, kept_B)
        drafted_B = [0] * len(self.rows) if chunk is None else chunk.counts_B
        return self._emit(tokens_B, drafted_B, outcome.tested_B, outcome.accepted_B)

    def _assume_whole(self, chunk: Proposal) -> None:
        """Without pre-verify: the row takes its chunk untested; the next round tests all of it."""
        (chunk_B,) = devices.read(chunk.tokens_BN)
        for b, (row, lane, count) in enumerate(zip(self.rows, self.lanes, chunk.counts_B)):
            lane.tokens = chunk_B[b][:count]
            lane.q_AV = None if chunk.q_BNV is None else chunk.q_BNV[b, :count]
            row.generation.drafted += count

    def _charge(self, rows: list[Row], steps: int, took: Took, rest: float) -> None:
        """Put a round on the clock: its lanes, then what cannot overlap, in seconds."""
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
                generation.first_token_seconds = (
                    generation.prefill_seconds + generation.decode_seconds
                )


class PearlWithoutPre(Pearl):
    """The first ablation: a fresh chunk is assumed whole."""

    pre_verify = False
    one_row = True


class PearlWithoutPost(Pearl):
    """The second ablation: nothing is drafted while assumed tokens are tested."""

    post_verify = False

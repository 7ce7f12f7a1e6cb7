"""The running rows of one `decode` call and their rounds: propose, forward, verify, emit, commit.

The cache holds all tokens of a row but the last, the tip; each round's forward runs over the tip
and the drafted tokens. Rows that finish leave the batch. A row's random numbers depend on its
request id, so neither its neighbours nor its place in the batch change its output.

Shapes: B running rows, N drafted tokens, M riders, V vocabulary, C hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor

from decoding import devices
from decoding.errors import UserError
from decoding.interfaces import Drafter, Observation, Outcome, Proposal, Stopping, Target
from decoding.models.prefill import prefill
from decoding.rounds.claims import Claim
from decoding.rounds.memory import HeapTrimmer
from decoding.rounds.new_tokens import new_tokens
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.sampling.logits_processors import make_processors
from decoding.sampling.readback import DeviceReadback, FiniteCheck
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.values import quote
from decoding.verification.rules import RULES

OnTokens = Callable[[int, list[int]], None]
# Memory is given back as a batch begins, while no clock runs, or after much growth of a long one.
_trim_at_start, _trim_between_rounds = HeapTrimmer(1 << 30), HeapTrimmer(4 << 30, every=64)


@dataclass(slots=True)
class Row:
    """One running request."""

    # index of its prompt
    index: int
    # noise key of (seed, request id)
    key: int
    # prompt and emitted tokens
    sequence: list[int]
    # maximum length of `sequence`
    limit: int
    generation: Generation
    stopping: Stopping
    # the row ends with the token that completes one of them
    stop_strings: tuple[str, ...] = ()
    # changes the target's logits into this row's probabilities
    warper: Warper = field(default_factory=Warper)


class Batch:
    """The running rows of one `decode` call; drafting and verifying take turns."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rows: list[Row],
        settings: Settings,
        on_tokens: OnTokens | None,
    ) -> None:
        self.target, self.drafter, self.rows, self.on_tokens = target, drafter, rows, on_tokens
        self.gamma = settings.num_draft_tokens if drafter is not None else 0
        self.stops = frozenset() if settings.ignore_eos else frozenset(settings.stop_token_ids)
        self.chooser = TokenChooser(
            settings.warper,
            settings.verify,
            settings.seed,
            target.vocab_size,
            target.device,
            make_processors(settings.repetition_penalty, settings.allowed),
        )
        self.rule = RULES[self.chooser.rule]
        self.text_of = settings.text_of
        # called with the place and the row of each row that ends, before its cache is dropped
        self.on_end: Callable[[int, Row], None] | None = None
        self.claim = Claim(target, drafter)
        # whether the parts of a round end before their work does, so that their times mean nothing
        self.runs_ahead = devices.runs_ahead(target.device)

    def width(self) -> int:
        """Return the maximum number of drafted tokens of a round."""
        return self.drafter.width(self.gamma) if self.drafter is not None else 0

    def capacity(self) -> int:
        """Return the cache slots of a row: drafts of rows near their limit reach past it."""
        return max(row.limit for row in self.rows) + self.width() + 1

    @property
    def wants_hidden(self) -> bool:
        """Whether the drafter reads hidden states."""
        return self.drafter is not None and self.drafter.capabilities.needs_hidden

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose hidden states the drafter reads."""
        return self.drafter.capabilities.taps if self.drafter is not None else ()

    def open(self) -> None:
        """Fill the caches with all prompt tokens except the last."""
        _trim_at_start()
        began = perf_counter()
        prompts_B = [row.sequence for row in self.rows]
        capacity = self.capacity()
        self.target.open(len(prompts_B), capacity)
        read_B = [prompt[:-1] for prompt in prompts_B]
        hidden_BNC = prefill(self.target, read_B, self.wants_hidden, self.taps)
        if self.drafter is not None:
            self.drafter.open(prompts_B, hidden_BNC, capacity)
        for row in self.rows:
            row.generation.prefilled = len(row.sequence) - 1
            row.generation.prefill_seconds = perf_counter() - began

    def close(self) -> None:
        """Release what an overlapped schedule has reserved; a serial batch reserves nothing."""

    def round(self) -> None:
        """Run one round.

        Raises UserError if another call has overwritten the caches, if the target's logits or the
        drafter's probabilities are NaN or infinite, and if `allowed` allows no token.
        """
        _trim_between_rounds()
        with self.claim:
            self.check_claim()
            self._round()

    def check_claim(self) -> None:
        """Raise UserError if another call has overwritten the caches. Call it inside the claim."""
        if not self.claim.holds:
            raise UserError(
                f"this call cannot continue: another call has used the target "
                f"'{self.target.name}' or its drafter and overwritten their caches. Finish or "
                f"close a stream before the next call, or load a second engine."
            )

    def _round(self) -> None:
        """Propose, verify, emit and commit; then drop the rows that have finished."""
        began = perf_counter()
        rows = self.rows
        rounds_B = [row.generation.rounds for row in rows]
        lengths_B = [len(row.sequence) for row in rows]
        self.chooser.begin([row.key for row in rows], rounds_B, lengths_B, self.gamma + 1)
        proposal = self._propose()
        drafted_at = perf_counter()
        counted = None
        drafter_tensors: Sequence[Tensor] = ()
        logits_BNV, hidden_BNC, riders_BMV = self._forward(proposal)
        forwarded_at = perf_counter()
        if proposal is not None:
            counted = proposal.counted()
            if proposal.readback is not None:
                drafter_tensors = proposal.readback(logits_BNV)
        nodes = 1 if counted is None else 1 + counted.tokens_BN.shape[1]
        tested_BNV = logits_BNV if logits_BNV.shape[1] == nodes else logits_BNV[:, :nodes]
        outcome, drafter_values = self._verify(tested_BNV, counted, drafter_tensors)
        verified_at = perf_counter()
        observation = Observation(outcome, logits_BNV, hidden_BNC, drafter_values, riders_BMV)
        drafted_B = [0] * len(rows) if proposal is None else outcome.drafted_B or proposal.counts_B
        keep = self._emit(outcome.tokens_B, drafted_B, outcome.tested_B, outcome.accepted_B)
        self._commit(observation, drafted_B)
        ended = perf_counter()
        for row in rows:
            row.generation.decode_seconds += ended - began
            row.generation.draft_seconds += drafted_at - began
            if not self.runs_ahead:
                row.generation.forward_seconds += forwarded_at - drafted_at
                row.generation.verify_seconds += verified_at - forwarded_at
            row.generation.end_round()
            if proposal is not None:
                row.generation.verified += proposal.width
            if row.generation.rounds == 1:
                row.generation.first_token_seconds = row.generation.prefill_seconds + ended - began
        if len(keep) < len(rows):
            if self.on_end is not None:
                for b in sorted({*range(len(rows))} - {*keep}):
                    self.on_end(b, rows[b])
            self._select(keep)

    def _propose(self) -> Proposal | None:
        """Return this round's proposal, or None if no row drafts anything."""
        if self.drafter is None or self.gamma == 0:
            return None
        # Each round emits one token of the target's, so drafting a row's last token never pays.
        most = self.gamma
        if self.drafter.capabilities.shape == "chain":  # a policy plans with what can be drafted
            most = min(most, self.width())
        room_B = [min(most, row.limit - len(row.sequence) - 1) for row in self.rows]
        budgets_B = [row.stopping.limit(room) for row, room in zip(self.rows, room_B)]
        if max(budgets_B) == 0:
            return None
        stopping_B = [row.stopping for row in self.rows]
        proposal = self.drafter.propose(
            [row.sequence for row in self.rows], budgets_B, stopping_B, self.chooser
        )
        for row in self.rows:  # a draft that keeps no token has taken its steps too
            row.generation.draft_steps += proposal.steps
            row.generation.draft_frontiers += proposal.frontiers or proposal.steps
        return proposal if proposal.width else None

    def _forward(self, proposal: Proposal | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logits and hidden states at the tip and the drafted tokens.

        Also returns the logits of the proposal's riders, None without riders.
        """
        sequences_B = [row.sequence for row in self.rows]
        tokens_BN, parents_BN = new_tokens(sequences_B, proposal, self.target.device)
        riders = None if proposal is None else proposal.riders
        reader = self.target if riders is None else riders.reader
        logits_BNV, hidden_BNC = reader.forward(tokens_BN, parents_BN, self.taps)
        riders_BMV = None
        if riders is not None:
            N = tokens_BN.shape[1] - riders.tokens_BM.shape[1]
            logits_BNV, riders_BMV = logits_BNV[:, :N], logits_BNV[:, N:]
            hidden_BNC = hidden_BNC[:, :N]
        if self.chooser.processors is not None:
            drafted = () if proposal is None else (proposal.tokens_BN, proposal.parents_BN)
            logits_BNV = self.chooser.processors(logits_BNV, sequences_B, *drafted)
        return logits_BNV, hidden_BNC, riders_BMV

    def _verify(
        self, logits_BNV: Tensor, proposal: Proposal | None, along: Sequence[Tensor]
    ) -> tuple[Outcome, list[Any]]:
        """Return the rule's outcome and the drafter's tensors `along` as lists.

        Raises UserError as `round` does.
        """
        watched = self._watched(logits_BNV, proposal)
        is_tree = proposal is not None and proposal.parents_BN is not None
        call = None if is_tree or along else self.target.verify_call(self.chooser)
        if call is None:
            readback = DeviceReadback(*along, watched=watched)
            outcome = self.rule(logits_BNV, proposal, self.chooser, readback)
            return outcome, readback.drafter_values()
        outcome, largest = call(logits_BNV, proposal, self.chooser)
        for check, value in zip(watched, largest, strict=False):
            check.check(value)
        return outcome, []

    def _watched(self, logits_BNV: Tensor, proposal: Proposal | None) -> list[FiniteCheck]:
        """Return this round's checks for NaN and infinities.

        `q_top` needs none: it comes from heads and trees, whose weights were checked on loading.
        """
        checks = [FiniteCheck(logits_BNV, f"the target '{self.target.name}'", "logits")]
        q_BNV = None if proposal is None else proposal.q_BNV
        if q_BNV is not None and q_BNV.numel() and self.drafter is not None:
            whose = f"the drafter '{self.drafter.name}'"
            checks.append(FiniteCheck(q_BNV, whose, "probabilities"))
        return checks

    def _emit(
        self,
        tokens_B: list[list[int]],
        drafted_B: list[int],
        tested_B: list[int],
        accepted_B: list[int],
    ) -> list[int]:
        """Append each row's tokens, up to its first stop token or stop string and its limit.

        Counts the round and calls `on_tokens`. Returns the indices of the rows that continue.
        """
        keep = []
        for b, row in enumerate(self.rows):
            tokens, tested, accepted = tokens_B[b], tested_B[b], accepted_B[b]
            generation = row.generation
            stop = next((i for i, token in enumerate(tokens) if token in self.stops), None)
            if row.stop_strings:
                stop = self._stop_string(row, tokens[:stop], stop)
            end = min(row.limit - len(row.sequence), len(tokens) if stop is None else stop + 1)
            if end < len(tokens):
                tokens, tested, accepted = tokens[:end], min(tested, end), min(accepted, end)
            if stop is not None and stop < end:
                generation.finish = "stop"
            else:
                stop = None
            generation.count(drafted_B[b], tested, accepted, len(tokens))
            row.sequence += tokens
            generation.tokens += tokens
            if stop is None and len(row.sequence) < row.limit:
                keep.append(b)
            if self.on_tokens is not None:
                self.on_tokens(row.index, tokens)
        return keep

    def _stop_string(self, row: Row, new: list[int], otherwise: int | None) -> int | None:
        """Return the index in `new` that completes a stop string, or `otherwise` if none does."""
        # a token adds or completes at least one character
        reach = max(len(text) for text in row.stop_strings)
        recent = row.generation.tokens[-4 * reach :]
        for end in range(len(new)):
            text = self._text([*recent, *new[: end + 1]])
            old = len(self._text(recent)) - reach
            if any(stop in text[max(old, 0) :] for stop in row.stop_strings):
                return end
        return otherwise

    def _text(self, tokens: list[int]) -> str:
        """Return the text of tokens. Raises UserError if `text_of` does not return a string."""
        assert self.text_of is not None
        text = self.text_of(tokens)
        if not isinstance(text, str):
            raise UserError(
                f"text_of() returned {quote(text)}, expected the text of the tokens as a string. "
                f"Correct the function."
            )
        return text

    def _commit(self, observation: Observation, drafted_B: list[int]) -> None:
        """Commit the tips and the accepted tokens; report the round to the drafter and policies."""
        outcome = observation.outcome
        paths_BL = None
        if outcome.paths_B is not None:
            paths_BL = [[0, *(n + 1 for n in path)] for path in outcome.paths_B]
        self.target.commit(paths_BL, [accepted + 1 for accepted in outcome.accepted_B])
        if self.drafter is not None:
            self.drafter.observe(observation)
            self.drafter.rollback(self.target.lengths_B)
            counts = zip(self.rows, drafted_B, outcome.accepted_B, strict=True)
            for row, drafted, accepted in counts:
                row.stopping.update(drafted, accepted)

    def _select(self, keep: list[int]) -> None:
        self.rows = [self.rows[b] for b in keep]
        if keep:
            self.target.select(keep)
            if self.drafter is not None:
                self.drafter.select(keep)

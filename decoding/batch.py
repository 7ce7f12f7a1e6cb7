"""The running rows of one `decode` call, and the steps of a round: propose, one target forward, verify, commit, emit.

The cache holds a row's tokens but the last one, the tip; each round's forward runs over the tip and the drafted tokens. Rows that finish leave
the batch and cost nothing from then on. A row's random numbers hang on its request id, so neither its neighbours nor its place in the
batch change its output.

Shapes: B running rows, N drafted tokens, V vocabulary, C hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from decoding import cuda
from decoding.chooser import Chooser
from decoding.drafter import Drafter, Observation, Proposal
from decoding.errors import UserError
from decoding.processors import Allowed, make_processors
from decoding.reading import Reading
from decoding.sampling import Warper
from decoding.stats import Generation
from decoding.stopping import RoundCosts, Stopping
from decoding.target import Target, prefill
from decoding.verify import RULES

OnTokens = Callable[[int, list[int]], None]


@dataclass(frozen=True)
class Settings:
    """How to decode. The warpers are off at their defaults; temperature 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_draft_tokens: int = 4  # gamma: drafted tokens a round along a chain
    verify: str = "token"  # "token", "block" or "coupled"; at temperature 0 verification is greedy whatever this says
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    # A name of decoding.policies.NAMES: when to end a draft before num_draft_tokens. None: with `costs`, what decoding.schedules.usual_stopping
    # says of the drafter; without, "fixed".
    stopping: str | None = None
    stopping_threshold: float | None = None  # of the policies that have one; None takes the policy's own
    schedule: str = "serial"  # or decoding.schedules.SCHEDULES: draft and verify at the same time
    costs: RoundCosts | None = None  # measured, for stopping="cost_ratio" and for what weighs its proposals or chunks
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of the text's tokens; 1 is off
    # Text so far, as ids -> ids that may follow; None: all of them. It is asked on the host: on a card every drafted token is waited for.
    allowed: Allowed | None = None
    stop_strings: tuple[str, ...] = ()  # a row ends with the token that completes one of them
    text_of: Callable[[Sequence[int]], str] | None = None  # ids -> text, for stop_strings
    ignore_eos: bool = False  # go on to max_new_tokens past stop tokens, for timing

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}, expected 1 or more.")
        if self.num_draft_tokens < 0:
            raise UserError(f"num_draft_tokens is {self.num_draft_tokens}, expected 0 (no drafting) or more.")
        if self.stop_strings and self.text_of is None:
            raise UserError(
                "stop_strings needs text_of, the function from token ids to text (decoding.generate has it)."
            )
        if "" in self.stop_strings:
            raise UserError("stop_strings holds an empty text, which every text ends with: leave it out.")

    @property
    def warper(self) -> Warper:
        """The sampling part of the settings."""
        return Warper(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass(slots=True)
class Row:
    """One running request."""

    index: int  # of its prompt
    key: int  # of (seed, request id)
    sequence: list[int]  # prompt and emitted tokens
    limit: int  # tokens that the sequence may reach
    generation: Generation
    stopping: Stopping


class Batch:
    """The running rows of one `decode` call and the steps of a round."""

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
        self.chooser = Chooser(settings.warper, settings.verify, settings.seed, target.vocab_size, target.device)
        self.chooser.processors = make_processors(settings.repetition_penalty, settings.allowed)
        self.rule = RULES[self.chooser.rule]
        self.stop_strings, self.text_of = settings.stop_strings, settings.text_of
        # Called with the place and the row of each row that ends, while its keys and values are still there.
        self.on_end: Callable[[int, Row], None] | None = None

    def width(self) -> int:
        """The most tokens that a round puts behind the tip."""
        return self.drafter.width(self.gamma) if self.drafter is not None else 0

    def open(self) -> None:
        """Fill the caches with all prompt tokens but the last."""
        began = perf_counter()
        prompts_B = [row.sequence for row in self.rows]
        capacity = max(row.limit for row in self.rows) + self.width() + 1  # rows near their limit are padded past it
        self.target.open(len(prompts_B), capacity)
        wants_hidden = self.drafter is not None and self.drafter.caps.needs_hidden
        hidden_BNC = prefill(self.target, [prompt[:-1] for prompt in prompts_B], wants_hidden)
        if self.drafter is not None:
            self.drafter.open(prompts_B, hidden_BNC, capacity)
        for row in self.rows:
            row.generation.prefilled = len(row.sequence) - 1
            row.generation.prefill_seconds = perf_counter() - began

    def close(self) -> None:
        """Give back what `open` took of the process."""

    def round(self) -> None:
        """Propose, verify, commit, emit; then drop the rows that are done."""
        began = perf_counter()
        rows = self.rows
        rounds_B = [row.generation.rounds for row in rows]
        lengths_B = [len(row.sequence) for row in rows]
        self.chooser.begin([row.key for row in rows], rounds_B, lengths_B, self.gamma + 1)
        proposal = self._propose()
        drafted_at = perf_counter()
        logits_BNV, hidden_BNC = self._forward(proposal)
        counted = None if proposal is None else proposal.counted()
        width = 1 if counted is None else 1 + counted.tokens_BN.shape[1]
        asked = () if proposal is None or proposal.asks is None else proposal.asks(logits_BNV)
        self.chooser.read = Reading(*asked)
        outcome = self.rule(logits_BNV[:, :width], counted, self.chooser)
        seen = Observation(outcome, logits_BNV, hidden_BNC, self.chooser.read.answers())
        drafted_B = [0] * len(rows) if proposal is None else outcome.drafted_B or proposal.counts_B
        keep = self._emit(outcome.tokens_B, drafted_B, outcome.tested_B, outcome.accepted_B)
        self._commit(seen, drafted_B)
        ended = perf_counter()
        for row in rows:
            row.generation.decode_seconds += ended - began
            row.generation.draft_seconds += drafted_at - began
            if proposal is not None:
                row.generation.draft_steps += proposal.steps
                row.generation.draft_beams += proposal.beams or proposal.steps
                row.generation.verified += proposal.tokens_BN.shape[1]
            if row.generation.rounds == 1:
                row.generation.first_token_seconds = row.generation.prefill_seconds + ended - began
        if len(keep) < len(rows):
            if self.on_end is not None:
                for b in sorted({*range(len(rows))} - {*keep}):
                    self.on_end(b, rows[b])
            self._select(keep)

    def _propose(self) -> Proposal | None:
        """This round's proposal; None if no row drafts anything."""
        if self.drafter is None or self.gamma == 0:
            return None
        # The target adds a token of its own to each round, so the last token is never worth a draft.
        room_B = [min(self.gamma, row.limit - len(row.sequence) - 1) for row in self.rows]
        budgets_B = [row.stopping.limit(room) for row, room in zip(self.rows, room_B)]
        if max(budgets_B) == 0:
            return None
        stopping_B = [row.stopping for row in self.rows]
        proposal = self.drafter.propose([row.sequence for row in self.rows], budgets_B, stopping_B, self.chooser)
        return proposal if proposal.tokens_BN.shape[1] else None

    def _forward(self, proposal: Proposal | None) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of the tip and the drafted tokens."""
        tips_B1 = cuda.tensor([row.sequence[-1:] for row in self.rows], self.target.device)
        if proposal is None:
            return self._processed(*self.target.forward(tips_B1))
        tokens_BN = torch.cat((tips_B1, proposal.tokens_BN), 1)
        if proposal.parents_BN is None:
            return self._processed(*self.target.forward(tokens_BN), proposal.tokens_BN)
        parents_BN = torch.cat((torch.full_like(tips_B1, -1), proposal.parents_BN + 1), 1)
        return self._processed(*self.target.forward(tokens_BN, parents_BN), proposal.tokens_BN, proposal.parents_BN)

    def _processed(
        self, logits_BNV: Tensor, hidden_BNC: Tensor, tokens_BN: Tensor | None = None, parents_BN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A forward's output with the processors' changes, each node's by its own text."""
        if self.chooser.processors is not None:
            sequences_B = [row.sequence for row in self.rows]
            logits_BNV = self.chooser.processors(logits_BNV, sequences_B, tokens_BN, parents_BN)
        return logits_BNV, hidden_BNC

    def _emit(
        self, tokens_B: list[list[int]], drafted_B: list[int], tested_B: list[int], accepted_B: list[int]
    ) -> list[int]:
        """Append each row's tokens up to its first stop token and its limit; returns the rows that go on."""
        keep = []
        for b, row in enumerate(self.rows):
            tokens, tested, accepted = tokens_B[b], tested_B[b], accepted_B[b]
            generation = row.generation
            stop = next((i for i, token in enumerate(tokens) if token in self.stops), None) if self.stops else None
            if self.stop_strings:
                stop = self._stop_string(generation.tokens, tokens if stop is None else tokens[:stop], stop)
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

    def _stop_string(self, before: list[int], new: list[int], otherwise: int | None) -> int | None:
        """Index in `new` of the token that completes a stop string; `otherwise` if none does."""
        assert self.text_of is not None
        reach = max(len(text) for text in self.stop_strings)  # a token adds at least a character, or completes one
        recent = before[-4 * reach :]
        for end in range(len(new)):
            text = self.text_of([*recent, *new[: end + 1]])
            old = len(self.text_of(recent)) - reach
            if any(stop in text[max(old, 0) :] for stop in self.stop_strings):
                return end
        return otherwise

    def _commit(self, seen: Observation, drafted_B: list[int]) -> None:
        """Keep the tip and the accepted tokens in the caches."""
        outcome = seen.outcome
        paths_BL = None if outcome.paths_B is None else [[0, *(n + 1 for n in path)] for path in outcome.paths_B]
        self.target.commit(paths_BL, [accepted + 1 for accepted in outcome.accepted_B])
        if self.drafter is not None:
            self.drafter.observe(seen)
            self.drafter.rollback(self.target.lengths_B)
            for row, drafted, accepted in zip(self.rows, drafted_B, outcome.accepted_B, strict=True):
                row.stopping.update(drafted, accepted)

    def _select(self, keep: list[int]) -> None:
        self.rows = [self.rows[b] for b in keep]
        if keep:
            self.target.select(keep)
            if self.drafter is not None:
                self.drafter.select(keep)

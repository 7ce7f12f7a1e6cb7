"""Two generations of one prompt, without a drafter and with it, round by round.

Only one round runs at a time, on the whole machine. The next one belongs to the pane whose own
clock is behind, so what a visitor watches is a race: at every moment both have decoded for about as
long. A pane's clock counts its rounds only, not its prefill and not the other pane's rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from decoding.interfaces import Drafter, Target, precision
from decoding.loop import prefill_batch
from decoding.models.text.text_stream import BROKEN, TextStream
from decoding.rounds.batch import Batch
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.rounds.ties import choice_scores, first_difference, top_two_gap

TextOf = Callable[[Sequence[int]], str]
ACCEPTED, CORRECTED, PLAIN = "accepted", "corrected", "plain"
# of a token's character in `Generation.trace`
MARKS = {"1": ACCEPTED, "0": CORRECTED, ".": PLAIN}


@dataclass(frozen=True)
class Word:
    """The text that a token completed, and where the token came from."""

    text: str
    mark: str  # ACCEPTED: drafted; CORRECTED: the target's, for a rejected draft; PLAIN: neither


@dataclass(frozen=True)
class PaneState:
    """What a pane shows after one of its rounds."""

    words: tuple[Word, ...] = ()
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0  # of decoding
    prefill_seconds: float = 0.0
    tested_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    done: bool = False

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(word.text for word in self.words)

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding; 0 before the first round."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens per target forward; 0 before the first round."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Accepted over tested tokens at depth 1, 2, ..."""
        pairs = zip(self.accepted_by_depth, self.tested_by_depth, strict=True)
        return [accepted / tested for accepted, tested in pairs]


@dataclass(frozen=True)
class RaceState:
    """Both panes at one moment."""

    plain: PaneState
    drafted: PaneState
    # whether both texts must be equal: greedy or coupled decoding
    compared: bool
    # index of the first token that differs among those that both have, or in both whole texts once
    # they have ended; None: all are equal
    differs_at: int | None = None
    # between the scores of the target's two best tokens there; None until the run has ended
    gap: float | None = None
    dtype: str = "float32"  # of the target
    backend: str = "native"  # as in `Target`
    # whether the drafted pane's clock is virtual (decoding/schedules/pearl.py)
    virtual: bool = False
    stopped: bool = False

    @property
    def speedup(self) -> float:
        """Tokens per second of the drafted pane over the plain one's; 0 until both have some."""
        plain = self.plain.tokens_per_second
        return self.drafted.tokens_per_second / plain if plain else 0.0


class Pane:
    """One generation; its first round follows `open`."""

    def __init__(
        self, target: Target, drafter: Drafter | None, settings: Settings, text_of: TextOf
    ) -> None:
        self.target, self.drafter, self.settings = target, drafter, settings
        self.stream = TextStream(text_of)
        self.words: list[Word] = []
        self.generation = Generation()
        self._batch: Batch | None = None
        self._new: list[int] = []

    @property
    def is_open(self) -> bool:
        """Whether the prompt was read."""
        return self._batch is not None

    @property
    def done(self) -> bool:
        """Whether the text has ended."""
        return self._batch is not None and not self._batch.rows

    @property
    def seconds(self) -> float:
        """Seconds of this pane's rounds, on its own clock."""
        return self.generation.decode_seconds

    def open(self, prompt: Sequence[int]) -> None:
        """Read the prompt. Raises UserError as `decoding.loop.prefill_batch` does."""
        with torch.inference_mode():
            self._batch = prefill_batch(
                self.target,
                self.drafter,
                [prompt],
                self.settings,
                on_tokens=lambda _, tokens: self._new.extend(tokens),
            )
        self.generation = self._batch.rows[0].generation

    def round(self) -> None:
        """Run one round and take over its text."""
        assert self._batch is not None
        with torch.inference_mode():
            self._batch.round()
        marks = self.generation.trace[len(self.generation.trace) - len(self._new) :]
        for token, mark in zip(self._new, marks, strict=True):
            if piece := self.stream.add([token]):
                self.words.append(Word(piece, MARKS[mark]))
        self._new.clear()
        if self.done and (rest := self.stream.end().rstrip(BROKEN)):
            self.words.append(Word(rest, PLAIN))

    def close(self) -> None:
        """Release what the schedule has reserved."""
        if self._batch is not None:
            self._batch.close()

    @property
    def state(self) -> PaneState:
        """What this pane shows now."""
        found = self.generation
        return PaneState(
            tuple(self.words),
            len(found.tokens),
            found.rounds,
            found.decode_seconds,
            found.prefill_seconds,
            tuple(found.tested_by_depth),
            tuple(found.accepted_by_depth),
            self.done,
        )


class Race:
    """A pane without a drafter and one with it, on the same prompt.

    in_turn: decode the plain pane to its end before the drafted one begins, for panes that share a
    target, whose cache holds one text, and for a drafter that takes some cores for itself.
    """

    def __init__(
        self,
        plain: Pane,
        drafted: Pane,
        *,
        compared: bool,
        in_turn: bool = False,
        virtual: bool = False,
    ) -> None:
        self.plain, self.drafted = plain, drafted
        self.compared, self.in_turn, self.virtual = compared, in_turn, virtual
        self.stopped = False
        self.gap: float | None = None  # see RaceState.gap

    def rounds(self, prompt: Sequence[int], stop: Callable[[], bool]) -> Iterator[None]:
        """Decode the prompt, and yield after every round.

        stop: called between rounds; if it returns true, both texts end where they are. Afterwards
        the gap is measured if they differ. Raises UserError as `decoding.loop.prefill_batch` and
        `Batch.round` do.
        """
        yield from self._rounds(prompt, stop)
        at = self.differs_at
        if self.compared and at is not None:
            before = [*prompt, *self.plain.generation.tokens[:at]]
            scores_V = choice_scores(self.plain.target, before, self.plain.settings, 0)
            self.gap = top_two_gap(scores_V)

    def _rounds(self, prompt: Sequence[int], stop: Callable[[], bool]) -> Iterator[None]:
        panes = (self.plain, self.drafted)
        try:
            while running := [pane for pane in panes if not pane.done]:
                if stop():
                    self.stopped = True
                    return
                pane = running[0]
                if not self.in_turn:
                    pane = min(running, key=lambda one: (one.is_open, one.seconds))
                if pane.is_open:
                    pane.round()
                    if pane.done:
                        pane.close()
                else:
                    pane.open(prompt)
                yield
        finally:
            for pane in panes:
                pane.close()

    @property
    def differs_at(self) -> int | None:
        """See RaceState.differs_at."""
        ours, theirs = self.drafted.generation.tokens, self.plain.generation.tokens
        both = min(len(ours), len(theirs))
        if self.plain.done and self.drafted.done:
            both = max(len(ours), len(theirs))
        return first_difference(ours[:both], theirs[:both])

    @property
    def state(self) -> RaceState:
        """Both panes now."""
        return RaceState(
            self.plain.state,
            self.drafted.state,
            self.compared,
            self.differs_at,
            self.gap,
            precision(self.plain.target),
            self.plain.target.backend,
            self.virtual,
            self.stopped,
        )

"""Training data in which the student writes some rows of a step, and writes new ones at intervals.

A set of rows follows from the seed, the step, the student's weights and the prompts used so far.
The checkpoint stores the tokens of the current set, so that a run resumes in the middle of one. The
steps until the next refresh use each of its rows once.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from distill.on_policy.prompts import Prompts
from distill.on_policy.schedule import Schedule
from training.data.packing import PackedData, Sample, best_fit
from training.data.token_store import JoinedSamples

# third word of the key of the rows' order
_SHUFFLING = 3


class Writer(Protocol):
    """Source of the student's answers, and of figures on them."""

    def write(self, step: int, prompts: Prompts, first: int, tokens: int) -> list[list[int]]:
        """Answer the prompts `first`, `first` + 1, ... until the texts have `tokens` tokens."""

    def measure(self, samples: Sequence[Sample], rows: list[list[int]]) -> dict[str, float]:
        """Return figures on the student's text in some of the rows."""


@dataclass(frozen=True)
class StudentRows:
    """Rows that the student has written at one refresh."""

    # step before which they were written
    step: int
    # number of the first prompt; the others follow it
    first: int
    answers: list[list[int]]
    figures: dict[str, float]

    def record(self) -> dict[str, Any]:
        """Return the rows as JSON values."""
        tokens = np.asarray([token for answer in self.answers for token in answer], dtype="<i4")
        return {
            "step": self.step,
            "first": self.first,
            "lengths": [len(answer) for answer in self.answers],
            "tokens": base64.b64encode(tokens.tobytes()).decode(),
            "figures": self.figures,
        }

    @classmethod
    def read(cls, record: dict[str, Any]) -> "StudentRows":
        """Return the rows that `record` described."""
        tokens = np.frombuffer(base64.b64decode(record["tokens"]), dtype="<i4")
        ends = np.cumsum(record["lengths"])[:-1]
        answers = [part.tolist() for part in np.split(tokens, ends)] if record["lengths"] else []
        return cls(record["step"], record["first"], answers, record["figures"])


class OnPolicyData(PackedData):
    """Data whose step has the student's rows in place of the last ordinary ones.

    The epochs and the shares of a mixture advance as without the student's rows.
    """

    def __init__(
        self, ordinary: PackedData, prompts: Prompts, schedule: Schedule, writer: Writer
    ) -> None:
        super().__init__(
            ordinary.samples,
            ordinary.capacity,
            ordinary.rows_per_step,
            ordinary.seed,
            ordinary.rows,
        )
        self.ordinary, self.prompts = ordinary, prompts
        self.schedule, self.writer = schedule, writer
        self.load({})

    @property
    def ended(self) -> str:
        """Return why no further step is possible."""
        return self.ordinary.ended

    def step_rows(self, step: int) -> list[list[int]]:
        """Return the rows of `step`; at a refresh, the student first writes new ones.

        All ranks must call it, once for each step.
        """
        rows = self.ordinary.step_rows(step)
        if self.schedule.refreshes_at(step):
            self._refresh(step)
        if not (count := self.schedule.rows_in(step)):
            return rows
        assert self.written is not None
        before = self.schedule.rows_before
        first = before(step) - before(self.written.step)
        return rows[: len(rows) - count] + self._written_rows[first : first + count]

    def state(self) -> dict[str, Any]:
        """Return the state of the ordinary data, and the student's current rows."""
        return self.ordinary.state() | {"written": self._record}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; an empty dict restores the start of a run."""
        self.ordinary.load({key: value for key, value in state.items() if key != "written"})
        record = state.get("written")
        self._use(None if record is None else StudentRows.read(record))

    def adapt(self, figures: dict[str, float]) -> dict[str, float]:
        """Adapt the ordinary data; return its values, and figures on the student's current rows."""
        of_written = self.written.figures if self.written is not None else {}
        return self.ordinary.adapt(figures) | {
            f"on_policy_{name}": value for name, value in of_written.items()
        }

    def write_samples(self, tokens: int) -> list[Sample]:
        """Return at least `tokens` tokens of text by the student before the first step."""
        return self._samples_of(0, self.writer.write(0, self.prompts, 0, tokens))

    def _refresh(self, step: int) -> None:
        """Let the student write the rows of the steps until the next refresh."""
        first = 0 if self.written is None else self.written.first + len(self.written.answers)
        # Packing this number of tokens takes at least the number of rows.
        tokens = self.schedule.rows_from(step) * self.capacity
        answers = self.writer.write(step, self.prompts, first, tokens) if tokens else []
        self._use(StudentRows(step, first, answers, {}))
        if answers:
            figures = self.writer.measure(self.samples, self._written_rows)
            self._use(StudentRows(step, first, answers, figures))

    def _use(self, written: StudentRows | None) -> None:
        """Pack the student's answers with their prompts, and make them part of the samples."""
        self.written = written
        self._record = None if written is None else written.record()
        samples = [] if written is None else self._samples_of(written.first, written.answers)
        self.samples = JoinedSamples([self.ordinary.samples, samples])
        self._written_rows: list[list[int]] = []
        if written is not None and samples:
            rows = best_fit([len(one.ids) for one in samples], self.capacity)
            generator = np.random.default_rng([self.seed, written.step, _SHUFFLING])
            shift = len(self.ordinary.samples)
            # Cut after shuffling: the last rows of the packing hold the shortest answers.
            self._written_rows = [
                [shift + index for index in rows[place]]
                for place in generator.permutation(len(rows)).tolist()
            ][: self.schedule.rows_from(written.step)]

    def _samples_of(self, first: int, answers: list[list[int]]) -> list[Sample]:
        """Return the prompts from `first` on with their answers, of which only these count."""
        samples = []
        for number, answer in enumerate(answers, start=first):
            prompt = self.prompts[number]
            ids = np.asarray(prompt + answer, dtype=np.int32)
            samples.append(Sample(ids, np.arange(len(ids)) >= len(prompt)))
        return samples

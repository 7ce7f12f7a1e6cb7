"""The decoding thread: requests wait in a bounded queue, join the running batch, and leave it.

All other threads talk to it through `submit` and `cancel`. It calls a job's `deliver` after every
round in which one of its rows gained tokens or, for a complete answer, once at the end.
"""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from decoding.engine import Engine
from decoding.errors import UserError
from decoding.rounds.batch import Row
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.sessions.draft_lengths import Range
from decoding.sessions.open_batch import OpenBatch, Request
from serving.api.errors import QueueFullError, RequestError, StoppedError
from serving.api.metrics import Metrics

# Prompt tokens that are read between two rounds; the prompt that reaches them is the last one.
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class NewTokens:
    """Tokens that a row gained. finish: "stop" or "length" if the row has ended."""

    choice: int
    tokens: list[int]
    finish: str | None


Delivery = Sequence[NewTokens] | RequestError


@dataclass(eq=False)
class Job:
    """One HTTP request: the rows of all its choices.

    deliver: called in the decoding thread with the new tokens of a round, or at last with an error.
    stream: whether tokens are delivered round by round. Without it those of all rows come at once,
    when the last row has ended, so that no round waits for the thread that reads them.
    """

    requests: list[Request]
    deliver: Callable[[Delivery], None]
    stream: bool = True
    began: float = field(default_factory=perf_counter)
    # index of a running row -> the number of its choice
    running: dict[int, int] = field(default_factory=dict)
    # index of a row -> when it got its first tokens, and their number
    first: dict[int, tuple[float, int]] = field(default_factory=dict)
    complete: list[NewTokens] = field(default_factory=list)  # ended rows that are not delivered yet
    ended: bool = False  # answered or cancelled

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens of all rows."""
        return sum(len(request.prompt) for request in self.requests)


class Scheduler:
    """The owner of the batch, and its thread: `start` it once, and end it by `stop`."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        max_rows: int,
        max_waiting: int,
        metrics: Metrics,
        lengths: Sequence[Range] = (),
    ) -> None:
        """Allocate the cache of all rows. Raises UserError for settings that do not fit.

        lengths: draft lengths by the number of running rows.
        """
        self.engine, self.max_rows, self.max_waiting = engine, max_rows, max_waiting
        self.metrics = metrics
        self._new: dict[int, list[int]] = {}  # index of a row -> its new tokens
        self._batch = OpenBatch(
            engine.target, engine.drafter, settings, max_rows, self._new.__setitem__, lengths
        )
        self._batch.on_end = lambda _, row: self._finish(row)
        self._waiting: deque[Job] = deque()
        self._cancelled: list[Job] = []
        self._job_of: dict[int, Job] = {}  # index of a running row -> its job
        self._ended: dict[int, Generation] = {}  # of rows that ended in this round
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a row."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of rows that are decoded."""
        return len(self._batch.rows)

    def submit(self, job: Job) -> None:
        """Put a job into the queue.

        Raises RequestError if the queue is full, if the server stops, and if the job has more
        choices than the batch has rows.
        """
        if len(job.requests) > self.max_rows:
            raise RequestError(
                f"the request asks for {len(job.requests)} choices, expected at most "
                f"{self.max_rows}, the rows of this server (max_rows).",
                param="n",
            )
        with self._wake:
            if self._stopping:
                raise StoppedError
            free = self.max_rows - self.running  # the next ones of the queue take these
            if len(self._waiting) >= self.max_waiting + max(free, 0):
                raise QueueFullError(self.max_waiting)
            self._waiting.append(job)
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Drop a job that nobody waits for; it does nothing if the job has ended."""
        with self._wake:
            if not job.ended:
                self._cancelled.append(job)
                self._wake.notify()

    def stop(self, wait: bool = True) -> None:
        """End the thread; jobs that have not ended get an error. wait: until it has ended."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if wait and self.is_alive:
            self._thread.join()

    def _run(self) -> None:
        """Run rounds until the server stops. However the thread ends, nobody waits for it."""
        try:
            while self._wait():
                try:
                    self._step()
                except Exception as error:
                    self._fail_running(error)
        finally:
            self._end_all(StoppedError())

    def _wait(self) -> bool:
        """Wait while there is nothing to do. Returns False if the server stops."""
        with self._wake:
            self._wake.wait_for(
                lambda: bool(self._stopping or self._waiting or self._cancelled or self._batch.rows)
            )
            return not self._stopping

    def _step(self) -> None:
        """Drop cancelled jobs, let waiting ones join, and run a round."""
        self._drop_cancelled()
        read = 0
        while read < PREFILL_TOKENS and (job := self._next_job()) is not None:
            self._join(job)
            read += job.prompt_tokens
        if not self._batch.rows:
            return
        self._new.clear()
        with torch.inference_mode():
            self._batch.round()
        self._deliver()

    def _next_job(self) -> Job | None:
        """Take the first waiting job from the queue if its rows fit into the batch.

        Later jobs do not overtake it, so that none waits forever.
        """
        with self._wake:
            if self._waiting and self._batch.takes(self._waiting[0].requests):
                return self._waiting.popleft()
        return None

    def _join(self, job: Job) -> None:
        """Add a job's rows to the batch; one that cannot be read gets an error."""
        try:
            rows = self._batch.join(job.requests)
        except UserError as error:  # found before anything was read
            self._end(job, RequestError(str(error)))
            return
        except Exception as error:  # such as memory that is full
            self._end(job, _failure(error))
            raise
        self.metrics.waited.observe(perf_counter() - job.began)
        self.metrics.prompt_tokens.inc(job.prompt_tokens)
        for choice, row in enumerate(rows):
            job.running[row.index], self._job_of[row.index] = choice, job

    def _deliver(self) -> None:
        """Hand the round's tokens to their jobs."""
        parts: dict[Job, list[NewTokens]] = {}
        now = perf_counter()
        for index, tokens in self._new.items():
            job, done = self._job_of[index], self._ended.pop(index, None)
            choice, finish = job.running[index], None if done is None else done.finish
            if not job.first:
                self.metrics.first_token.observe(now - job.began)
            at, count = job.first.setdefault(index, (now, len(tokens)))
            if job.stream:
                parts.setdefault(job, []).append(NewTokens(choice, tokens, finish))
            elif done is not None:
                job.complete.append(NewTokens(choice, done.tokens, finish))
            if done is not None and len(done.tokens) > count:
                self.metrics.per_token.observe((now - at) / (len(done.tokens) - count))
            if done is not None:
                del self._job_of[index], job.running[index]
                if not job.stream and not job.running:
                    parts[job] = job.complete
        for job, news in parts.items():
            job.ended = not job.running
            job.deliver(news)

    def _finish(self, row: Row) -> None:
        """Keep what a row has generated, for `_deliver`."""
        self._ended[row.index] = row.generation
        self._count(row)

    def _count(self, row: Row) -> None:
        """Count a row that has left, and let its pool remember its text."""
        self.metrics.count_row(row.generation)
        job = self._job_of[row.index]
        pool = job.requests[job.running[row.index]].pool
        if pool is not None:
            pool.end(row.sequence)

    def _drop_cancelled(self) -> None:
        with self._wake:
            jobs, self._cancelled = self._cancelled, []
            gone = set(jobs)
            if any(job in gone for job in self._waiting):
                self._waiting = deque(job for job in self._waiting if job not in gone)
        indices = {index for job in jobs for index in job.running}
        rows = [row for row in self._batch.rows if row.index in indices]
        self._batch.leave(indices)
        for row in rows:
            self._count(row)
            del self._job_of[row.index]
        for job in jobs:
            job.running.clear()
            job.ended = True

    def _fail_running(self, error: Exception) -> None:
        """End all running jobs with an error of the models, and start with an empty batch."""
        traceback.print_exception(error)
        self._batch.rows = []
        self._new.clear()
        self._ended.clear()
        jobs = set(self._job_of.values())
        self._job_of.clear()
        for job in jobs:
            self._end(job, _failure(error))

    def _end(self, job: Job, error: RequestError) -> None:
        job.running.clear()
        job.ended = True
        job.deliver(error)

    def _end_all(self, error: RequestError) -> None:
        with self._wake:
            self._stopping = True
            jobs = {*self._waiting, *self._job_of.values()} - {*self._cancelled}
            self._waiting.clear()
        self._job_of.clear()
        self._batch.rows = []
        for job in jobs:
            self._end(job, error)


def _failure(error: Exception) -> RequestError:
    words = str(error) if isinstance(error, UserError) else type(error).__name__
    return RequestError(f"decoding failed: {words}", status=500, code="failed")

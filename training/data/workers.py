"""Batches of records, tokenized in several processes and returned in their order.

Rendering chats and locating their answers takes Python about as long as encoding them takes a
tokenizer's threads, so one process keeps no more than a few cores busy. Here one process reads the
files, whose JSON takes it an eighth of that time, and others do the rest.
"""

import io
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr
from itertools import chain, islice
from typing import Any, TypeVar

from decoding.errors import UserError

Batch = TypeVar("Batch")
Result = TypeVar("Result")

AHEAD = 2  # batches that wait for each process, so that none is idle while one is written

_tokenizer: Any = None  # of a worker process


def map_batches(
    function: Callable[..., Result],
    tokenizer: Any,
    batches: Iterable[Batch],
    arguments: tuple[Any, ...],
    workers: int,
) -> Iterator[Result]:
    """Yield function(tokenizer, batch, *arguments) of each batch, in order.

    function: a function of a module. workers: number of processes; 1: this one. They start with the
    second batch. Raises UserError if a process is killed.
    """
    batches = iter(batches)
    here = islice(batches, 1 if workers > 1 else None)
    yield from (function(tokenizer, batch, *arguments) for batch in here)
    second = list(islice(batches, 1))
    if second:
        rest = chain(second, batches)
        yield from _in_processes(function, tokenizer, rest, arguments, workers)


def _in_processes(
    function: Callable[..., Result],
    tokenizer: Any,
    batches: Iterable[Batch],
    arguments: tuple[Any, ...],
    workers: int,
) -> Iterator[Result]:
    # A server without threads forks them: a fork of this process could copy a locked lock. It
    # imports once what each of them needs, this job's module included.
    context = multiprocessing.get_context("forkserver")
    job = getattr(sys.modules["__main__"], "__spec__", None)
    context.set_forkserver_preload(["training.data.samples", *([job.name] if job else [])])
    printed: set[str] = set()
    waiting: deque[Future[tuple[Result, list[str]]]] = deque()

    def finish() -> Result:
        result, lines = waiting.popleft().result()
        for line in lines:
            if line not in printed:
                print(line, file=sys.stderr)
        printed.update(lines)
        return result

    with ProcessPoolExecutor(workers, context, _start, (tokenizer,)) as pool:
        try:
            for batch in batches:
                waiting.append(pool.submit(_run, function, batch, arguments))
                if len(waiting) > AHEAD * workers:
                    yield finish()
            while waiting:
                yield finish()
        except BrokenProcessPool as error:
            raise UserError(
                f"one of {workers} processes that tokenize was killed, perhaps for want of memory. "
                f"Set data.workers to fewer processes; 1 starts none"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start(tokenizer: Any) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process uses one core
    _tokenizer = tokenizer


def _run(function: Callable[..., Result], batch: Any, arguments: tuple[Any, ...]) -> Any:
    """Return the result and the lines on stderr, each of which is shown once for all processes."""
    with redirect_stderr(io.StringIO()) as printed:
        result = function(_tokenizer, batch, *arguments)
    return result, printed.getvalue().splitlines()

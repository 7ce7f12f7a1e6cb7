"""The one thread in which texts are decoded, for one visitor after another.

Threads of PyTorch and the binding to cores belong to the thread that uses them, so all decoding is
in one. The states are read in threads of the web server. A reader gets the newest state and may
miss others, so a slow browser delays nobody.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter, sleep

from serving.web.race import Race, RaceState

REFRESH_SECONDS = 0.1  # between two states, which take time to build, to send and to show
# returns a race and its prompt
Prepare = Callable[[], tuple[Race, Sequence[int]]]


class Mailbox:
    """The newest state of a race, until it is taken."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: list[RaceState] = []
        self._ended = False

    def put(self, state: RaceState) -> None:
        """Replace the state."""
        with self._changed:
            self._newest = [state]
            self._changed.notify()

    def end(self) -> None:
        """Announce that no further state comes."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def take(self) -> RaceState | None:
        """Wait for a state and return it, or None after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest or self._ended)
            return self._newest.pop() if self._newest else None


class Slot:
    """The thread that decodes."""

    def __init__(self, refresh_seconds: float = REFRESH_SECONDS) -> None:
        self._refresh = refresh_seconds
        self._pool = ThreadPoolExecutor(1, "decoding")

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the thread, and wait for it."""
        self._pool.submit(function).result()

    def states(self, prepare: Prepare, stop: threading.Event) -> Iterator[RaceState]:
        """Run a race in the thread, after the races before it, and yield its states.

        The last state is always among them. `stop` ends the race after its current round, and so
        does closing this iterator, as for a visitor who left. Raises what the race raises.
        """
        mailbox = Mailbox()
        future: Future[None] = self._pool.submit(self._run, prepare, stop, mailbox)
        try:
            while (state := mailbox.take()) is not None:
                yield state
                sleep(self._refresh)
            future.result()
        finally:
            stop.set()

    def _run(self, prepare: Prepare, stop: threading.Event, mailbox: Mailbox) -> None:
        shown = 0.0
        try:
            if stop.is_set():
                return
            race, prompt = prepare()
            for _ in race.rounds(prompt, stop.is_set):
                if perf_counter() - shown >= self._refresh:
                    mailbox.put(race.state)
                    shown = perf_counter()
            mailbox.put(race.state)
        finally:
            mailbox.end()

    def close(self) -> None:
        """End the thread after its current race."""
        self._pool.shutdown(cancel_futures=True)

"""The runs that visitors have begun, so that each can stop its own."""

import itertools
import threading

# A client that begins a run and never asks for it leaves its entry. The page's queue asks for a run
# when its turn comes; beyond this number of runs before theirs, the oldest is stopped.
MOST_UNASKED = 10_000


class Visits:
    """The current run of every visitor's session: its number, and the event that ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._runs: dict[str, tuple[int, threading.Event]] = {}
        self._unasked: dict[str, None] = {}  # sessions whose run's turn has not come, in order

    def begin(self, session: str) -> int:
        """Register a new run and return its number; an earlier run of the session is stopped."""
        with self._lock:
            self._drop(session)
            if len(self._unasked) == MOST_UNASKED:
                self._drop(next(iter(self._unasked)))
            number = next(self._numbers)
            self._runs[session] = number, threading.Event()
            self._unasked[session] = None
            return number

    def stop_of(self, session: str, number: object) -> threading.Event:
        """Return the event of a run. It is set if the run is no longer the session's current one.

        A run that waits for its turn may find that its visitor has begun another or has left.
        """
        with self._lock:
            if session in self._runs and self._runs[session][0] == number:
                self._unasked.pop(session, None)
                return self._runs[session][1]
        over = threading.Event()
        over.set()
        return over

    def has_another(self, session: str, number: object) -> bool:
        """Return whether the session has begun another run than this one, which has not ended."""
        with self._lock:
            return session in self._runs and self._runs[session][0] != number

    def stop(self, session: str) -> None:
        """Stop the session's run, whether it decodes or waits for its turn."""
        with self._lock:
            self._stop(session)

    def leave(self, session: str) -> None:
        """Stop the run of a session whose visitor has left, and forget it."""
        with self._lock:
            self._drop(session)

    def end(self, session: str, number: object) -> None:
        """Forget a run that has ended, unless its session has begun another."""
        with self._lock:
            if session in self._runs and self._runs[session][0] == number:
                del self._runs[session]
                self._unasked.pop(session, None)

    def _stop(self, session: str) -> None:
        if session in self._runs:
            self._runs[session][1].set()

    def _drop(self, session: str) -> None:
        self._stop(session)
        self._runs.pop(session, None)
        self._unasked.pop(session, None)

    def __len__(self) -> int:
        return len(self._runs)

"""The runs that visitors have begun, so that each can stop its own."""

import threading


class Visits:
    """An event for the current run of every visitor's session, which ends the run when set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stops: dict[str, threading.Event] = {}

    def begin(self, session: str) -> threading.Event:
        """Register a new run; a run of the same session that has not ended is stopped."""
        with self._lock:
            if session in self._stops:
                self._stops[session].set()
            self._stops[session] = threading.Event()
            return self._stops[session]

    def current(self, session: str) -> threading.Event:
        """Return the event of the session's run; a new one if none was registered."""
        with self._lock:
            return self._stops.setdefault(session, threading.Event())

    def stop(self, session: str) -> None:
        """Stop the session's run, whether it decodes or waits for its turn."""
        with self._lock:
            if session in self._stops:
                self._stops[session].set()

    def leave(self, session: str) -> None:
        """Stop the run of a session whose visitor has left, and forget it."""
        self.stop(session)
        with self._lock:
            self._stops.pop(session, None)

    def end(self, session: str, stop: threading.Event) -> None:
        """Forget a run that has ended, unless its session has begun another."""
        with self._lock:
            if self._stops.get(session) is stop:
                del self._stops[session]

    def __len__(self) -> int:
        return len(self._stops)

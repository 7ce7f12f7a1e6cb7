"""Exclusive use of a target and its drafter, whose caches hold the text of one call.

A call that runs to its end keeps the models locked, so calls from several threads queue. A stream
locks them for each round only, since its reader may never continue. Another call may then
overwrite the caches between two rounds; the stream's next round finds its claim taken and raises
an error instead of continuing another text.
"""

import threading
from weakref import WeakKeyDictionary


class _ModelLock:
    """The lock of one model, and the latest claim to it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.claim: Claim | None = None


_locks: WeakKeyDictionary[object, _ModelLock] = WeakKeyDictionary()
_guard = threading.Lock()


class Claim:
    """A claim to the caches of some models, from `take` until another claim takes one of them.

    Inside `with`, no other thread uses the models.
    """

    def __init__(self, *models: object | None) -> None:
        """Create a claim to these models; None means no drafter."""
        with _guard:
            uses = {_locks.setdefault(model, _ModelLock()) for model in models if model is not None}
        # all claims lock in the same order, which prevents deadlock
        self._locks = sorted(uses, key=id)

    def take(self) -> None:
        """Take over the caches. Call it inside `with`."""
        for use in self._locks:
            use.claim = self

    @property
    def holds(self) -> bool:
        """Whether no other claim has taken one of the models since `take`."""
        return all(use.claim is self for use in self._locks)

    def __enter__(self) -> "Claim":
        locked = []
        try:
            for use in self._locks:
                use.lock.acquire()
                locked.append(use)
        except BaseException:  # an interrupt while it waits
            for use in locked:
                use.lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for use in reversed(self._locks):
            use.lock.release()

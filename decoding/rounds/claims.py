"""Who may use a target and its drafter: their caches hold the text of one call.

A call that runs to its end keeps the models locked, so calls from several threads queue. A stream
keeps them locked for each round alone: waiting for its reader could last for ever, and in one
thread it would. So the next call may overtake it, and the stream's next round then finds that its
claim was taken and raises an error rather than continue another call's text.
"""

import threading
from weakref import WeakKeyDictionary


class _Use:
    """Of one model: its lock, and the claim that was the last to be taken."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.claim: Claim | None = None


_uses: WeakKeyDictionary[object, _Use] = WeakKeyDictionary()
_guard = threading.Lock()


class Claim:
    """The caches of some models, from `take` until another claim takes one of them. Inside `with`,
    no other thread uses them.
    """

    def __init__(self, *models: object | None) -> None:
        """models: None among them means no drafter."""
        with _guard:
            uses = {_uses.setdefault(model, _Use()) for model in models if model is not None}
        # every claim locks in the same order, so that no two wait for each other
        self._uses = sorted(uses, key=id)

    def take(self) -> None:
        """From here on the caches are this claim's. Call it inside `with`."""
        for use in self._uses:
            use.claim = self

    @property
    def holds(self) -> bool:
        """Whether no other claim has taken one of the models since `take`."""
        return all(use.claim is self for use in self._uses)

    def __enter__(self) -> "Claim":
        locked = []
        try:
            for use in self._uses:
                use.lock.acquire()
                locked.append(use)
        except BaseException:  # an interrupt while it waits
            for use in locked:
                use.lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for use in reversed(self._uses):
            use.lock.release()

"""Counter of the eager operations outside models that launch a kernel on a GPU."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# operations without a kernel: views of the same memory, and host numbers
FREE = (
    "aten.detach",
    "aten.alias",
    "aten.lift_fresh",
    "aten._unsafe_view",
    "aten._local_scalar_dense",
    "aten.empty",
)


def run_methods_within(
    context: Callable[[], AbstractContextManager[None]], owner: Any, *names: str
) -> None:
    """Make the named methods of an object run inside a context manager.

    `delattr` on the object restores a method.
    """
    for name in names:
        setattr(owner, name, _within(context, getattr(owner, name)))


def _within(context: Callable[[], AbstractContextManager[None]], method: Any) -> Any:
    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with context():
            return method(*arguments, **named)

    return wrapped


class Operations(TorchDispatchMode):
    """Counter of operations by name, without views; `leave_out` excludes a model's operations.

    Composite operations count as their parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.waits = 0
        self._inside = 0

    @property
    def total(self) -> int:
        """Number of operations outside models."""
        return sum(self.counts.values())

    def leave_out(self, owner: Any, *names: str) -> None:
        """Stop counting inside the named methods of an object."""
        run_methods_within(self._in_model, owner, *names)

    @contextmanager
    def _in_model(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        name = str(func)
        if not self._inside:
            self.waits += name.startswith(("aten._local_scalar_dense", "aten.nonzero"))
            if not func.is_view and not name.startswith(FREE):
                self.counts[name] += 1
        return func(*args, **(kwargs or {}))

"""Peak memory of the tensors that an action creates: on a CPU, on a GPU, or without computing."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from decoding import devices

META = "meta"  # PyTorch's device whose tensors have sizes and no memory


def peak_bytes(action: Callable[[], Any], device: str = "cpu") -> int:
    """Return the peak bytes of the tensors that `action` creates.

    device: where its tensors are. With `meta` nothing is computed, see `count_bytes`.
    """
    if device == META:
        return count_bytes(action)
    place = torch.device(device)
    devices.peak_bytes(place)  # resets the peak to the memory in use
    held = devices.peak_bytes(place)
    if held is not None:
        action()
        most = devices.peak_bytes(place)
        assert most is not None, "the card reported its peak before"
        return most - held
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        action()
    level = peak = 0
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak


def count_bytes(action: Callable[[], Any]) -> int:
    """Return the peak bytes of the tensors that `action` creates, from their sizes alone.

    The tensors may be on any device. Memory that a kernel uses within one operation is left out.
    """
    with _Created() as created:
        action()
    return created.peak


class _Created(TorchDispatchMode):
    """Bytes of the storages that operations create and that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.level = self.peak = 0
        # by id, which no other storage has while this one is alive
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count the storages of its results that it was not given."""
        self._count((args, kwargs), created=False)
        made = func(*args, **(kwargs or {}))
        self._count(made, created=True)
        return made

    def _count(self, tree: Any, created: bool) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage(), created)

    def _add(self, storage: torch.UntypedStorage, created: bool) -> None:
        key, size = id(storage), storage.nbytes() if created else 0
        if key in self.alive:
            return

        def drop(_: Any) -> None:
            del self.alive[key]
            self.level -= size

        self.alive[key] = weakref.ref(storage, drop)
        self.level += size
        self.peak = max(self.peak, self.level)

"""Peak memory of the tensors that an action creates, on a CPU or a GPU."""

from collections.abc import Callable
from typing import Any

import torch

from decoding import devices


def peak_bytes(action: Callable[[], Any], device: str = "cpu") -> int:
    """Return the peak bytes of the tensors that `action` creates."""
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

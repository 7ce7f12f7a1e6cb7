"""The price of each store of the target's states (`states.cache`), for dry runs: bytes and seconds.

Without a store the target reads the data in every pass. With one, it reads each row once, and
again the rows that the memory's limit leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.amounts import hours, size
from training.features.stores import free_bytes
from training.heads.config import StatesConfig


@dataclass(frozen=True)
class StorePrices:
    """What decides the prices of stores."""

    pass_bytes: float  # stored states of one pass over the data
    pass_seconds: float  # of the target, which reads the data once
    passes: float
    ranks: int = 1

    def seconds(self, stored: float) -> float:
        """Return the target's seconds in all passes. stored: the share of the data's states."""
        first = min(self.passes, 1.0)
        return self.pass_seconds * (first + (self.passes - first) * (1 - stored))


def describe_choices(
    settings: StatesConfig, caches: Sequence[str], prices: StorePrices, tflops: float
) -> list[str]:
    """Return a line for each store of `caches`, with a mark at the chosen one."""
    most = settings.memory_mb * 1e6
    share = min(1.0, most / prices.pass_bytes)
    held = min(most, prices.pass_bytes * min(prices.passes, 1.0))
    where = "the memory of each rank" if prices.ranks > 1 else "memory"
    free = free_bytes(Path(settings.folder))
    room = f"{size(free)} free" + ("" if prices.pass_bytes <= free else ", too little")
    choices = {
        "none": ("stores nothing", 0.0),
        "memory": (
            f"{size(held)} of {size(prices.pass_bytes)} in {where} "
            f"(states.memory_mb={settings.memory_mb:,})",
            share,
        ),
        "disk": (f"{size(prices.pass_bytes)} in {settings.folder} ({room})", 1.0),
    }
    lines = [
        f"states: price of each states.cache, in {prices.passes:.3g} passes over the data, at "
        f"{tflops:g} TFLOP/s (assumed_tflops)"
    ]
    for name in caches:
        words, stored = choices[name]
        mark = "*" if name == settings.cache else " "
        lines.append(f"  {mark} {name}: {words}; the target reads {hours(prices.seconds(stored))}")
    return lines

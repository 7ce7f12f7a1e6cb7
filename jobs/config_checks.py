"""Checks of values that every job makes before it loads anything."""

import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

from decoding.errors import UserError
from decoding.values import check_settings

Rule = tuple[str, bool, str]
THREADS_PER_CORE = 8  # more would only wait for each other


def refuse(config: Any, rules: Iterable[Rule]) -> None:
    """Raise UserError for the first broken rule.

    A rule is a dotted key, whether its value is valid, and the expected values in words.
    """
    for key, valid, expected in rules:
        if not valid:
            value = config
            for name in key.split("."):
                value = vars(value)[name]
            raise UserError(f"{key} is {value}, expected {expected}")


def check_job(config: Any) -> None:
    """Raise UserError for values that no job accepts: seed, threads, infinite numbers and NaN."""
    check_settings(config, ["seed"])
    cores = os.cpu_count() or 1
    most = THREADS_PER_CORE * cores
    expected = f"0 (PyTorch's default) to {most} on {cores} cores"
    refuse(config, [("threads", 0 <= config.threads <= most, expected)])
    for key, value in _floats("", vars(config)):
        if not math.isfinite(value):
            raise UserError(f"{key} is {value}, expected a finite number")


def _floats(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield every float of a configuration with its dotted key."""
    if isinstance(value, float):
        yield key, value
    elif isinstance(value, list):
        for entry in value:
            yield from _floats(key, entry)
    elif isinstance(value, dict) or hasattr(value, "__dataclass_fields__"):
        for name, inner in (value if isinstance(value, dict) else vars(value)).items():
            yield from _floats(f"{key}.{name}" if key else str(name), inner)

"""Checks of values that every job makes before it loads anything."""

import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

from decoding.errors import UserError
from decoding.values import check_settings, is_int
from jobs.config import leaves, plain

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
    expected = f"1 to {most} on {cores} cores, 0 for PyTorch's default, or auto"
    valid = config.threads == "auto" or (is_int(config.threads) and 0 <= config.threads <= most)
    refuse(config, [("threads", valid, expected)])
    for path, value in leaves(plain(config)):
        for number in _floats(value):
            if not math.isfinite(number):
                raise UserError(f"{'.'.join(path)} is {number}, expected a finite number")


def _floats(value: Any) -> Iterator[float]:
    """Yield the floats of a value, of lists and mappings in it too."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _floats(entry)

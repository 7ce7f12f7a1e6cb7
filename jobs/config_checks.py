"""Checks of values that every job makes before it loads anything."""

import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

from decoding.errors import UserError
from decoding.values import RULES, check_settings, check_value, is_int
from jobs.config import leaves, plain

Rule = tuple[str, bool, str]
THREADS_PER_CORE = 8  # more would only wait for each other
PROCESSES = ("parallel.processes", "target.processes")
_MODEL = "a model folder, embedded:target or OWNER/NAME on the Hub"
# Keys of paths, which would mean the working folder if they were empty -> what they name.
PATHS = {
    "output_dir": "a folder for the run, such as runs/NAME",
    "target.path": _MODEL,
    "model": _MODEL,
    "benchmark.path": "a file of prompts, such as embedded:prompts",
    "held_out.prompts": "a file of prompts, such as embedded:held_out_chats",
}
# Last parts of the keys of lists whose entries may not be empty -> what an entry names.
ENTRIES = {
    **dict.fromkeys(("chats", "held_out_chats"), "a ShareGPT file or hf:DATASET"),
    **dict.fromkeys(("texts", "held_out_texts"), "a text file, a folder or hf:DATASET"),
    "drafters": "a drafter's folder or name, such as prompt_lookup",
    "runs": "a run folder of eval.run",
}


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
    """Raise UserError for values that no job accepts.

    Checked are seed, threads, numbers of processes, required paths, empty entries of lists,
    infinite numbers and NaN.
    """
    check_settings(config, ["seed"])
    cores = os.cpu_count() or 1
    most = THREADS_PER_CORE * cores
    expected = f"1 to {most} on {cores} cores, 0 for PyTorch's default, or auto"
    valid = config.threads == "auto" or (is_int(config.threads) and 0 <= config.threads <= most)
    refuse(config, [("threads", valid, expected)])
    processes = RULES["processes"]
    for path, value in leaves(plain(config)):
        key = ".".join(path)
        if key in PATHS and key not in config.OPTIONAL_PATHS and not str(value).strip():
            raise UserError(f"{key} is {value!r}, expected {PATHS[key]}")
        if path[-1] in ENTRIES and isinstance(value, list):
            _refuse_empty_entries(key, value, ENTRIES[path[-1]])
        if key in PROCESSES:
            check_value(key, value, processes)
        for number in _floats(value):
            if not math.isfinite(number):
                raise UserError(f"{key} is {number}, expected a finite number")


def _refuse_empty_entries(key: str, entries: list[Any], named: str) -> None:
    """Raise UserError for an entry of a list that is blank or null."""
    for number, entry in enumerate(entries, start=1):
        if entry is None or not str(entry).strip():
            raise UserError(
                f"{key} is {entries}, and entry {number} of it is empty, expected {named}. Remove "
                f"the entry, or write what it names"
            )


def _floats(value: Any) -> Iterator[float]:
    """Yield the floats of a value, of lists and mappings in it too."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _floats(entry)

"""Saved configuration of a run: written with a hash, and checked when it is read.

A configuration of an earlier version is converted to today's keys.
"""

import hashlib
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobs.aliases import current_config
from jobs.run_files import WRONG, damaged, json_kind

_STAMP = "# sha256 of the lines below: "


def upgrade_config(saved: dict[Any, Any]) -> dict[Any, Any]:
    """Return a saved configuration with today's keys and meaning.

    Before `max_seconds` existed, `max_epochs` had no effect next to `max_steps`.
    """
    saved = current_config(saved)

    def loop_of_now(loop: Any) -> Any:
        before = isinstance(loop, dict) and loop.get("max_steps") and "max_seconds" not in loop
        return {**loop, "max_epochs": None} if before else loop

    return saved | {key: loop_of_now(saved[key]) for key in ("loop", "between") if key in saved}


def fill_defaults(saved: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that a saved configuration lacks because they are newer.

    usual: today's configuration with every default.
    """
    inner = {
        key: fill_defaults(value, usual[key])
        if isinstance(value, dict) and isinstance(usual.get(key), dict)
        else value
        for key, value in saved.items()
    }
    return {**usual, **inner}


def add_stamp(text: str) -> str:
    """Return a configuration's text below a line with its hash, which reveals a truncated file."""
    return f"{_STAMP}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def read_config(path: Path, remedy: str) -> dict[str, Any]:
    """Return the mapping in a config.yaml, with or without a hash.

    Raises UserError, with the remedy, for anything else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("it is empty")
        first, _, rest = text.partition("\n")
        if first.startswith(_STAMP) and first != add_stamp(rest).partition("\n")[0]:
            raise ValueError("its hash does not match its content")
        value = yaml.safe_load(text)
        if type(value) is not dict:
            raise ValueError(f"expected a mapping of keys, found {json_kind(value)}")
        found = OmegaConf.to_container(OmegaConf.create(text))
        assert isinstance(found, dict)
        if not isinstance(found.get("job"), str):
            raise ValueError(f"job is {found.get('job')!r}, expected the name of a job")
    except (*WRONG, yaml.YAMLError, OmegaConfBaseException) as error:
        raise damaged(path, error, remedy) from error
    return {str(key): value for key, value in found.items()}

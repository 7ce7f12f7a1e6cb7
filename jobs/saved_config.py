"""Saved configuration of a run: a hash shows damage, and keys of earlier versions are renamed."""

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
    """Return a saved configuration of any version in terms of the current keys."""
    saved = current_config(saved)
    for key in ("loop", "between"):
        loop = saved.get(key)
        # Before `max_seconds` existed, `max_epochs` had no effect next to `max_steps`.
        if isinstance(loop, dict) and loop.get("max_steps") and "max_seconds" not in loop:
            saved[key] = {**loop, "max_epochs": None}
    return saved


def add_stamp(text: str) -> str:
    """Return the text of a configuration with its hash on a line above it."""
    return f"{_STAMP}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def read_config(path: Path, remedy: str) -> dict[str, Any]:
    """Return the mapping in a config.yaml, with or without a hash.

    Raises UserError, which ends with the remedy, for a damaged file.
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

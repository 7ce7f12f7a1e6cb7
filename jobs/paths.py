"""Things by name: `embedded:NAME` is a file or folder of assets/, `package.module.name`
an object.
"""

import importlib
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from decoding.models.folder import exists

ASSETS = Path(__file__).resolve().parent.parent / "assets"
_NAMES = {
    "target": ASSETS / "target",
    "chats": ASSETS / "chats.json",
    "held_out_chats": ASSETS / "held_out_chats.json",
    "prompts": ASSETS / "prompts.jsonl",
}


def resolve(name: str) -> Path:
    """A path as written, or the file behind `embedded:NAME`. Raises UserError for an unknown NAME
    or a path that is not there.
    """
    if name.startswith("embedded:"):
        inner = name.removeprefix("embedded:")
        if inner not in _NAMES:
            raise UserError(
                f"'{name}' is unknown; embedded are: "
                f"{', '.join('embedded:' + key for key in _NAMES)}"
            )
        return _NAMES[inner]
    path = Path(name).expanduser()
    if not exists(path):
        raise UserError(
            f"{path} does not exist (working folder: {Path.cwd()}); give a file or folder, or "
            f"embedded:NAME"
        )
    return path


def is_here(name: str) -> bool:
    """Whether `resolve` would find a path; an embedded name always counts."""
    return name.startswith("embedded:") or exists(Path(name).expanduser())


def imported(dotted: str) -> Any:
    """What `package.module.name` names. Raises ImportError in one line where it is not there."""
    module, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the import of a user's module raises
        raise ImportError(" ".join(f"{type(error).__name__}: {error}".split())) from error

"""Paths by name: `embedded:NAME` is a file or folder of assets/."""

from pathlib import Path

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

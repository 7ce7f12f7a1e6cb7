"""Where the embedded default lies: `embedded:NAME` in a configuration is a file or folder of assets/."""

from pathlib import Path

from decoding.errors import UserError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
_NAMES = {
    "target": ASSETS / "target",
    "chats": ASSETS / "chats.json",
    "held_out_chats": ASSETS / "held_out_chats.json",
    "prompts": ASSETS / "prompts.jsonl",
}


def resolve(name: str) -> Path:
    """A path as written, or the file behind `embedded:NAME`. Raises UserError for an unknown NAME or a path that is not there."""
    if name.startswith("embedded:"):
        inner = name.removeprefix("embedded:")
        if inner not in _NAMES:
            raise UserError(f"'{name}' is unknown; embedded are: {', '.join('embedded:' + key for key in _NAMES)}")
        return _NAMES[inner]
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(
            f"{path} does not exist (working folder: {Path.cwd()}); give a file or folder, or embedded:NAME"
        )
    return path

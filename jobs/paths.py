"""Folders that ship with the project, and the names `embedded:NAME` of their files."""

from pathlib import Path

from decoding.errors import UserError
from decoding.models.hub import find_cached, find_folder
from decoding.models.paths import exists

ROOT = Path(__file__).resolve().parents[1]  # the checkout, or site-packages


def data_folder(name: str) -> Path:
    """Return the folder `conf` or `assets`: the installed one, or the checkout's."""
    installed = ROOT / "shallow_draft_data"  # setup.py puts both folders there
    return (installed if installed.is_dir() else ROOT) / name


ASSETS = data_folder("assets")
_NAMES = {
    "target": ASSETS / "target",
    "chats": ASSETS / "chats.json",
    "held_out_chats": ASSETS / "held_out_chats.json",
    "prompts": ASSETS / "prompts.jsonl",
    "gsm8k_shots": ASSETS / "gsm8k_shots.jsonl",
}


def resolve(name: str) -> Path:
    """Return the path of a file or folder, or of `embedded:NAME`.

    Raises UserError for an unknown NAME and for a path that does not exist.
    """
    if name.startswith("embedded:"):
        inner = name.removeprefix("embedded:")
        if inner not in _NAMES:
            raise UserError(
                f"'{name}' is unknown, expected one of "
                f"{', '.join('embedded:' + key for key in _NAMES)}"
            )
        return _NAMES[inner]
    path = Path(name).expanduser()
    if not exists(path):
        raise UserError(
            f"{path} does not exist (working folder: {Path.cwd()}). Use an existing file or "
            f"folder, or embedded:NAME"
        )
    return path


def resolve_model(name: str, weights: bool = True) -> Path:
    """Return a model's folder, given as a path, `embedded:NAME` or a name on the Hugging Face Hub.

    weights: False if only the tokenizer is read, and no weights are downloaded for it. Raises
    UserError for an unknown NAME, and for a text that is neither a path nor on the Hub.
    """
    return resolve(name) if name.startswith("embedded:") else find_folder(name, weights)


def model_is_here(name: str, weights: bool = True) -> bool:
    """Return whether a model's path exists, or its files are in the Hub's cache."""
    return is_here(name) or find_cached(name, weights) is not None


def is_here(name: str) -> bool:
    """Return whether a path exists; every embedded name counts as existing."""
    return name.startswith("embedded:") or exists(Path(name).expanduser())


def name_anywhere(name: str) -> str:
    """Return a name of a model that other programs understand in any working folder.

    Paths become absolute, and `embedded:target` becomes its path. A name on the Hugging Face Hub,
    which is no local path, is returned as it is.
    """
    if name.startswith("embedded:"):
        return str(resolve(name))
    path = Path(name).expanduser()
    return str(path.absolute()) if exists(path) else name

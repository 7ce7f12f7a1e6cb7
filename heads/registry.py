"""The kinds of heads, and the presets that `python -m heads.train head=NAME` trains.

A preset is a YAML file in the folder `head` of conf/, or of a folder in `hydra.searchpath`. Its
`kind` names the code, and its other values are the options of that kind.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from decoding.drafters.registry import DRAFTERS, head_of, imported
from decoding.errors import UserError
from jobs.composing import CONF
from training.heads.kind import HeadKind

# name of a kind -> dotted name of its HeadKind
_TRAINED = {name: entry.trained for name, entry in DRAFTERS.items() if entry.trained}


def kind_of(name: str) -> HeadKind:
    """Return the kind of head called `name`, or that of the preset `name` of conf/.

    Raises UserError for an unknown name.
    """
    dotted = _TRAINED.get(name) or KINDS.get(name)
    if not dotted:
        raise UserError(f"kind={name} is unknown, expected one of {', '.join(_TRAINED)}")
    return cast(HeadKind, imported(dotted))


def kind_in(folder: Path) -> HeadKind:
    """Return the kind of head that reads the folder.

    Raises UserError for a folder that holds no head.
    """
    name = head_of(folder)
    if not name:
        raise UserError(
            f"{folder} holds no head of a known kind (model_type in config.json). Expected the "
            f"folder that a head's training wrote, or one in its published layout."
        )
    return kind_of(name)


def find_kind(preset: str, folders: Iterable[Path] = (CONF,)) -> str:
    """Return the name of a preset's kind; empty if no folder has a valid file.

    folders: in the order in which they are searched. Raises UserError for a file of an unknown
    kind.
    """
    file = next((file for file in _files(preset, folders) if file.is_file()), None)
    if file is None:
        return ""
    values = read_mapping(file)
    if not values:
        return ""
    kind = values.get("kind") or next(_kinds_of_defaults(values, preset, folders), None)
    if kind not in _TRAINED:
        raise UserError(
            f"{file}: kind is {kind}, expected one of {', '.join(_TRAINED)}. Write the kind of "
            f"head whose options the file sets."
        )
    return str(kind)


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; empty for an invalid file, which composing reports."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _files(preset: str, folders: Iterable[Path]) -> Iterator[Path]:
    return (folder / "head" / f"{preset}.yaml" for folder in folders)


def _kinds_of_defaults(
    values: dict[str, Any], preset: str, folders: Iterable[Path]
) -> Iterator[str]:
    """Yield the kinds of the presets in a preset's `defaults`, the last one first."""
    for one in reversed(values.get("defaults") or []):
        name = one.rpartition("/")[2] if isinstance(one, str) else preset
        if name != preset and (kind := find_kind(name, folders)):
            yield kind


# name of a preset of conf/ -> dotted name of its HeadKind
KINDS = {
    file.stem: _TRAINED[find_kind(file.stem)] for file in sorted((CONF / "head").glob("*.yaml"))
}

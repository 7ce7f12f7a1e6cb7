"""The kinds of heads that `python -m heads.train head=NAME` trains."""

from pathlib import Path
from typing import cast

from decoding.drafters.registry import DRAFTERS, head_of, imported
from decoding.errors import UserError
from training.heads.kind import HeadKind

# name of a file in conf/head -> its HeadKind
KINDS = {name: entry.trained for name, entry in DRAFTERS.items() if entry.trained}
for _entry in DRAFTERS.values():
    KINDS |= _entry.presets


def kind_of(name: str) -> HeadKind:
    """Return the kind of head called `name`. Raises UserError for an unknown name."""
    if name not in KINDS:
        raise UserError(f"head={name} is unknown, expected one of {', '.join(KINDS)}")
    return cast(HeadKind, imported(KINDS[name]))


def kind_in(folder: Path) -> HeadKind:
    """Return a kind of head that reads the folder; presets of one kind read the same folders.

    Raises UserError for a folder that holds no head.
    """
    name = head_of(folder)
    if not name:
        raise UserError(
            f"{folder} holds no head of a known kind (model_type in config.json). Expected the "
            f"folder that a head's training wrote, or one in its published layout."
        )
    entry = DRAFTERS[name]
    return cast(HeadKind, imported(entry.trained or next(iter(entry.presets.values()))))

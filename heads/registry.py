"""The kinds of heads that `python -m heads.train head=NAME` trains."""

from typing import cast

from decoding.drafters.registry import DRAFTERS, imported
from decoding.errors import UserError
from training.heads.kind import HeadKind

# name of a drafter and of its file in conf/head -> its HeadKind
KINDS = {name: entry.trained for name, entry in DRAFTERS.items() if entry.trained}


def kind_of(name: str) -> HeadKind:
    """Return the kind of head called `name`. Raises UserError for an unknown name."""
    if name not in KINDS:
        raise UserError(f"head={name} is unknown, expected one of {', '.join(KINDS)}")
    return cast(HeadKind, imported(KINDS[name]))

"""Keys of a head's config.json as one server reads them, compared with the head itself.

A server may take a default for a missing key, or skip a key that it does not know, without a word:
the head then loads and drafts otherwise than it was trained. A path is a key, with dots between the
keys of nested objects.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class _Marker:
    """A value that no config.json has."""


REQUIRED = _Marker()  # the default of a key that a server does not do without
ANY = _Marker()  # any value is the head's


@dataclass(frozen=True)
class Key:
    """How a server reads one value of config.json."""

    # spellings, of which the first one in the file counts
    paths: tuple[str, ...]
    # field of the shape that has the head's own value; empty: it is `wanted`
    field: str = ""
    wanted: Any = ANY
    # the server's value where the file has none of the paths
    default: Any = REQUIRED
    # what the server does in place of a default, in words
    without: str = ""
    # what follows from another value, in words
    effect: str = ""
    layouts: tuple[str, ...] = ()  # in which it is read; empty: in all
    applies: Callable[[Any], bool] = lambda shape: True  # to a head of this shape
    ignored: bool = False  # the server takes its default whatever the file has

    def note(self, layout: str, values: Mapping[str, Any], shape: Any) -> str:
        """Describe how the server reads another value than the head's; "" if it reads this one.

        layout: the folder's. values: its config.json.
        """
        if (self.layouts and layout not in self.layouts) or not self.applies(shape):
            return ""
        wanted = getattr(shape, self.field) if self.field else self.wanted
        because = f": {self.effect}" if self.effect else ""
        name = self.paths[0]
        if self.ignored:
            if self.default == wanted:
                return ""
            return (
                f"takes {_shown(self.default)} for {name} whatever config.json has, and the head "
                f"has {_shown(wanted)}{because}"
            )
        for path in self.paths:
            if (found := get(values, path)) is not None:
                if wanted is ANY or found == wanted:
                    return ""
                return f"reads {path}={_shown(found)}, and the head has {_shown(wanted)}{because}"
        if self.without:
            return f"{self.without}, as config.json has no {name}{because}"
        if self.default is REQUIRED:
            return f"needs {name}, which config.json does not have{because}"
        if self.default == wanted:
            return ""
        return (
            f"takes {_shown(self.default)} for {name}, which config.json does not have, and the "
            f"head has {_shown(wanted)}{because}"
        )


def architecture_note(values: Mapping[str, Any], known: tuple[str, ...]) -> str:
    """Describe a first architecture that is none of those that a server knows; "" if it is one."""
    found = values.get("architectures")
    first = found[0] if isinstance(found, list) and found else None
    if not known or first in known:
        return ""
    return (
        f"does not know the head's architecture {_shown(first)}: put {' or '.join(known)} first in "
        f"architectures"
    )


def get(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path of config.json; None if there is none."""
    found: Any = values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _shown(value: Any) -> str:
    return json.dumps(value, default=list)

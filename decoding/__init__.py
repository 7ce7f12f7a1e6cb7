"""Lossless decoding with any drafter: `load` and `generate` are the front door."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoding.engine import Engine, Reply, generate, load
    from decoding.errors import UserError
    from decoding.rounds.settings import Settings

__all__ = ["Engine", "Reply", "Settings", "UserError", "generate", "load"]
__version__ = "0.2.0"

# imported when used: a command that only composes its configuration needs no model code
_HOMES = {"UserError": "decoding.errors", "Settings": "decoding.rounds.settings"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "decoding.engine")), name)

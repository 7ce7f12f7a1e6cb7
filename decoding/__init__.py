"""Lossless decoding with any drafter: `load` and `generate` are the front door."""

import os
import sys
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

# How often waiting threads of GNU's OpenMP, which PyTorch uses on Linux, look before they sleep:
# for some 50 microseconds, where the default is 5 ms. On a machine with other work each of a
# model's many small operations can wait that long for a thread that has no core: two threads then
# decoded up to 140 times as slowly as one, now 2 to 4 times
# (docs/experiments/2026-11-28-busy-machine.md). PyTorch reads it once, when it is loaded. A user's
# own choice is kept.
SPINS = "GOMP_SPINCOUNT"
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault(SPINS, "2000")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "decoding.engine")), name)

"""Decode with any drafter, losslessly: `load` and `generate` are the front door."""

from decoding.engine import Engine, Reply, generate, load
from decoding.errors import UserError
from decoding.rounds.settings import Settings

__all__ = ["Engine", "Reply", "Settings", "UserError", "generate", "load"]
__version__ = "0.2.0"

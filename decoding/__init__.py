"""Runs any drafter against a target, losslessly. `load` and `generate` are the front door;
`loop.decode` is the loop.
"""

from decoding.engine import Engine, Reply, generate, load
from decoding.errors import UserError

__all__ = ["Engine", "Reply", "UserError", "generate", "load"]

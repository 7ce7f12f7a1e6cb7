"""Brief measurements of costs, for tests that need some costs, whatever they are.

Beside other tests most measurements are disturbed, and would be repeated up to their bound.
"""

import importlib
from typing import Any

VALUES: dict[str, Any] = {
    "decoding.engine.COST_WINDOWS": 1,
    "eval.measure.parts.ATTEMPTS": 1,
    "eval.measure.parts.COST_WINDOWS": 1,
    "eval.measure.repetition.ATTEMPTS": 1,
    "eval.plan.costs.MOST_WINDOWS": 1,
    "training.held_out.costs.MOST_WINDOWS": 1,
    "eval.engines.measure.PAUSE_SECONDS": 0.0,
}


def measure_briefly(setattr: Any = setattr) -> None:
    """Give the constants of VALUES their values in this process.

    setattr: how to set an attribute of a module, such as `MonkeyPatch.setattr`.
    """
    for place, value in VALUES.items():
        module, _, name = place.rpartition(".")
        setattr(importlib.import_module(module), name, value)

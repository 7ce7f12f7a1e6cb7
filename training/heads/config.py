"""Configuration that the training jobs of heads share."""

from dataclasses import dataclass


@dataclass
class StatesConfig:
    """The target's hidden states: made in every step, or kept after the first time, as the target
    is frozen.
    """

    cache: str = "none"  # none | memory | disk
    memory_mb: int = 1000  # cache=memory: rows beyond it are made anew
    # cache=disk: one file for each target and data, whose size is told first
    folder: str = "runs/states"

"""Configuration of the early-exit head's training."""

from dataclasses import dataclass, field

from training.heads.config import HeadJobConfig, HeadOptions


@dataclass
class EarlyExitOptions(HeadOptions):
    """Shape of the early-exit head, whose layer has the form of the target's layers."""

    # name in tables and in the head's card
    name: str = "early_exit"
    # number of the target's layers before the head's own
    exit_layer: int = 2
    # size of the draft vocabulary; 0: all tokens
    draft_vocab_size: int = 0
    # initial layer: last (the target's last layer) | random. The norm starts as the target's
    start: str = "last"


@dataclass
class EarlyExitTrainConfig(HeadJobConfig):
    """An early-exit head (EESD, arXiv 2406.03853) for the frozen target."""

    head: EarlyExitOptions = field(default_factory=EarlyExitOptions)

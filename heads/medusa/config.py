"""Configuration of Medusa's training."""

from dataclasses import dataclass, field

from training.heads.config import HeadJobConfig, HeadOptions


@dataclass
class MedusaOptions(HeadOptions):
    """Shape of Medusa's heads; loss.predict_n_tokens is their number."""

    # name in tables and in the heads' card
    name: str = "medusa"
    # residual blocks of a head
    num_layers: int = 1
    # whether all heads have the same projection to the vocabulary
    shared: bool = False
    # size of the draft vocabulary; 0: all tokens
    draft_vocab_size: int = 0
    # initial projections: lm_head (the target's) | random
    start: str = "lm_head"


@dataclass
class MedusaTrainConfig(HeadJobConfig):
    """Medusa heads (arXiv 2401.10774) for the frozen target."""

    head: MedusaOptions = field(default_factory=MedusaOptions)

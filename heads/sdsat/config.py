"""Configuration of the training of SDSAT's slots."""

from dataclasses import dataclass, field

from training.heads.config import HeadJobConfig, HeadOptions


@dataclass
class SdsatOptions(HeadOptions):
    """Shape of the slots; loss.predict_n_tokens is the number of drafted tokens."""

    # name in tables and in the head's card
    name: str = "sdsat"
    # rank of the change to the target's products at the slots' rows (LoRA); 0: none
    rank: int = 0


@dataclass
class SdsatTrainConfig(HeadJobConfig):
    """Slot embeddings with which the frozen target drafts (SDSAT, arXiv 2403.18647)."""

    head: SdsatOptions = field(default_factory=SdsatOptions)

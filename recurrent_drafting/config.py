"""Configuration of the recurrent head's training."""

from dataclasses import dataclass, field

from training.heads.config import HeadJobConfig, HeadOptions


@dataclass
class HeadShapeConfig(HeadOptions):
    """Shape and initial weights of the head; by default both are as published."""

    # name in tables and in the head's card
    name: str = "redrafter"
    # residual blocks
    num_draft_layers: int = 2
    # true: recurrent; false: the state is the sum of the embeddings
    rnn: bool = True
    # width of the blocks; 0: twice the target's hidden size; other widths add an input projection
    exit_dim: int = 0
    # size of the draft vocabulary; 0: all tokens
    draft_vocab_size: int = 0
    # channels where the output layer starts as the target's lm_head: none | hidden | state | both
    warm_start: str = "none"
    # whether residual blocks start as the identity
    zero_blocks: bool = False


@dataclass
class HeadTrainConfig(HeadJobConfig):
    """`python -m recurrent_drafting.train`: a recurrent head (ReDrafter) for the frozen target."""

    head: HeadShapeConfig = field(default_factory=HeadShapeConfig)
    # number of beams when the finished head is measured by real drafting
    beam_width: int = 8

"""Configuration of the head's training."""

from dataclasses import dataclass, field

from jobs.config import JobConfig, ParallelConfig, TargetConfig, TrackerConfig
from training.config import DataConfig, HeldOutConfig, LoopConfig
from training.heads.config import StatesConfig
from training.heads.loss_config import HeadLossConfig


@dataclass
class HeadShapeConfig:
    """Shape of the head, and what its weights start from; by default both are as published."""

    name: str = "redrafter"  # name in tables and in the head's card
    num_draft_layers: int = 2  # residual blocks
    rnn: bool = True  # recurrent; false: the state is the sum of the embeddings
    # width of the blocks; 0: twice the target's hidden size; other widths go through input_proj
    exit_dim: int = 0
    # tokens of the shortlist, the most frequent ones of the training answers; 0: all
    draft_vocab_size: int = 0
    # the output layer begins as the target's lm_head on: none | hidden | state | both
    warm_start: str = "none"
    zero_blocks: bool = False  # residual blocks begin as the identity
    # head folder of the same target to go on from; its shape counts, not the one above
    path: str = ""


@dataclass
class HeadTrainConfig(JobConfig):
    """`python -m recurrent_drafting.train`: a recurrent drafter head (ReDrafter) for the frozen
    target.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    head: HeadShapeConfig = field(default_factory=HeadShapeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: HeadLossConfig = field(default_factory=HeadLossConfig)
    states: StatesConfig = field(default_factory=StatesConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    # evaluation prompts that an experiment's later stages decode; never trained on
    benchmark_prompts: str = ""
    # how those stages show them to the target (benchmark.render): auto | chat | text
    benchmark_render: str = "auto"
    # per-head accuracies on data.held_out_chats: the token is among the k likeliest, k = 1 .. top_k
    top_k: int = 5
    beam_width: int = 8  # beams of the real drafting that the finished head is measured by
    # sustained TFLOP/s of all ranks together, for the hours that a dry run tells
    assumed_tflops: float = 100.0
    # tokens of one pass over the data, for the hours of a dry run without loop.max_steps
    assumed_tokens: int = 0
    # share of them that is supervised, for a dry run (ShareGPT: 60 %)
    assumed_supervised: float = 0.6
    loop: LoopConfig = field(default_factory=LoopConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

"""Configuration that the training jobs of heads share."""

from dataclasses import dataclass, field

from jobs.config import JobConfig, ParallelConfig, TargetConfig, TrackerConfig
from training.config import DataConfig, HeldOutConfig, LoopConfig
from training.heads.loss_config import HeadLossConfig


@dataclass
class HeadOptions:
    """The head: its options are those of its kind."""

    name: str = "head"  # name in tables and in the head's card
    # head folder of the same target to go on from; its shape counts, not the one here
    path: str = ""


@dataclass
class StatesConfig:
    """The target's hidden states: made in every step, or kept after the first time, as the target
    is frozen.
    """

    cache: str = "none"  # none | memory | disk
    memory_mb: int = 1000  # cache=memory: rows beyond it are made anew
    # cache=disk: one file for each target and data, whose size is told first
    folder: str = "runs/states"


@dataclass
class HeadJobConfig(JobConfig):
    """A job that trains a head for the frozen target; a kind of head gives `head` its own type."""

    target: TargetConfig = field(default_factory=TargetConfig)
    head: HeadOptions = field(default_factory=HeadOptions)
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
    # sustained TFLOP/s of all ranks together, for the hours that a dry run tells
    assumed_tflops: float = 100.0
    # tokens of one pass over the data, for the hours of a dry run without loop.max_steps
    assumed_tokens: int = 0
    # share of them that is supervised, for a dry run (ShareGPT: 60 %)
    assumed_supervised: float = 0.6
    loop: LoopConfig = field(default_factory=LoopConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

"""Configuration shared by the training jobs of heads."""

from dataclasses import dataclass, field
from typing import Any

from jobs.config import TargetConfig
from training.config import DrafterJobConfig, HeldOutConfig
from training.heads.loss_config import HeadLossConfig
from training.on_policy import OnPolicyOptions


@dataclass
class HeadOptions:
    """Options that all kinds of heads share."""

    # name in tables and in the head's card
    name: str = "head"
    # head folder to continue from, of this target or of another one with the same sizes and
    # tokenizer; its shape replaces the one here
    path: str = ""
    # how a new head with draft_vocab_size chooses its tokens: mass (the largest sums of the
    # target's probability over places of the training answers) | counts (the most frequent tokens)
    draft_vocabulary: str = "mass"


def describe_overridden(options: HeadOptions, shape: Any) -> str:
    """Describe the options that the head in head.path overrides; return "" if there are none.

    shape: the `HeadShape` of that head.
    """
    defaults = vars(type(options)())
    overridden = [
        f"head.{key}={value}"
        for key, value in vars(options).items()
        if key not in ("name", "path") and value not in (defaults[key], getattr(shape, key, None))
    ]
    if not options.path or not overridden:
        return ""
    return (
        f"head.path={options.path} has its own shape and weights, which replace "
        f"{', '.join(overridden)}"
    )


@dataclass
class StatesConfig:
    """Storage of the frozen target's hidden states, which are otherwise computed in every step."""

    # none | memory | disk
    cache: str = "none"
    # cache=memory: limit in MB; rows beyond it are recomputed
    memory_mb: int = 1000
    # cache=disk: folder of the files for each target and data, whose size is printed first
    folder: str = "runs/states"
    # cache=disk: read all the data before the first step, and print the seconds that this takes;
    # otherwise a row's states are stored when it is first trained on
    fill: bool = False
    # cache=disk: layers that the target reads at once, besides those of this head, each kept in a
    # file of its own for all heads that train on the data; []: a store for this head's layers alone
    layers: list[int] = field(default_factory=list)


@dataclass
class HeadJobConfig(DrafterJobConfig):
    """Configuration of a job that trains a head; each kind has its own type of `head`."""

    target: TargetConfig = field(default_factory=TargetConfig)
    head: HeadOptions = field(default_factory=HeadOptions)
    loss: HeadLossConfig = field(default_factory=HeadLossConfig)
    states: StatesConfig = field(default_factory=StatesConfig)
    # rows in which the head drafts from the text, and learns the target's distribution after its
    # own tokens: the loss then reads no token of the data
    on_policy: OnPolicyOptions = field(default_factory=OnPolicyOptions)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    # a checkpoint RUN/checkpoints/STEP of an earlier run, whose drafter folder is written to
    # RUN/exports/STEP without training; all other settings are then those of that run
    checkpoint: str = ""
    # evaluation prompts that an experiment's later stages decode; never trained on
    benchmark_prompts: str = ""
    # form of those prompts (benchmark.render): auto | chat | text
    benchmark_render: str = "auto"
    # per-head accuracies on data.held_out_chats count the k likeliest tokens, k = 1 .. top_k
    top_k: int = 5
    # tokens of one pass over the data, from which a dry run without loop.max_steps estimates hours
    assumed_tokens: int = 0
    # supervised share of the tokens, for a dry run (ShareGPT: 60 %)
    assumed_supervised: float = 0.6

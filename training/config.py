"""Configuration shared by the training jobs: student, data, loop and held-out prompts."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from decoding.values import RULES
from jobs.config import JobConfig, ParallelConfig, TrackerConfig
from jobs.config_checks import Rule, refuse
from training.data.templates import RENDERINGS, TEMPLATES
from training.optimizer_config import OptimizerConfig

TRAIN_ON = ("answers", "all")  # values of data.train_on
CACHES = ("auto", "none", "disk")  # values of data.cache


@dataclass
class StudentConfig:
    """Shape of a LLaMA student; a field left at 0 is taken from the target."""

    # name in tables and in the drafter's card
    name: str = "student"
    # layers: copy chosen target layers | folder: continue from `path` | random: from scratch
    init: str = "layers"
    # student folder of distill.prune, for init=folder; its shape replaces the one below
    path: str = ""
    # target layers to copy, from 0; empty: first, last and evenly spaced between
    layers: list[int] = field(default_factory=list)
    # decoder layers: the depth that sets a drafter's latency
    num_hidden_layers: int = 1
    # width of the residual stream
    hidden_size: int = 0
    # query heads
    num_attention_heads: int = 0
    # key/value heads (grouped-query attention)
    num_key_value_heads: int = 0
    # width of a head; need not be hidden_size / heads
    head_dim: int = 0
    # width of the MLP
    intermediate_size: int = 0
    # tokens that a drafter of distill.train proposes: the most frequent of the training answers,
    # and all special tokens; 0: all tokens, as in every other job
    draft_vocab_size: int = 0


@dataclass
class DomainConfig:
    """One domain of a mixture; its paths take DataConfig's forms and are relative to data.root."""

    # ShareGPT files
    chats: list[str] = field(default_factory=list)
    # plain text files or folders
    texts: list[str] = field(default_factory=list)
    # ShareGPT files that are never trained on, for the domain's held-out figures
    held_out_chats: list[str] = field(default_factory=list)
    # plain text that is never trained on, for the domain's held-out figures
    held_out_texts: list[str] = field(default_factory=list)
    # initial weight of the domain's rows, relative to the sum of all shares
    share: float = 1.0
    # target for the held-out loss, in nats per token (mixing=loss); 0: not given
    reference: float = 0.0
    # target for the held-out acceptance (mixing=acceptance); 0: the best domain's
    reference_acceptance: float = 0.0


@dataclass
class DataConfig:
    """Sources of the text and the rules for cutting it into rows."""

    # ShareGPT files (JSON array or JSONL); `embedded:chats` is the shipped set. A Hugging Face
    # dataset is `hf:NAME_OR_FOLDER[:SPLIT[:COLUMN]]`, here and in the other lists.
    chats: list[str] = field(default_factory=list)
    # plain text files or folders; `embedded:stdlib` is this Python's standard library
    texts: list[str] = field(default_factory=list)
    # ShareGPT files that are never trained on (distill.prune); distill.train uses held_out.prompts
    held_out_chats: list[str] = field(default_factory=list)
    # plain text that is never trained on (distill.pretrain, distill.prune)
    held_out_texts: list[str] = field(default_factory=list)
    # chat template: auto (the tokenizer's own) or the name of one of ours
    template: str = "auto"
    # tokens of a packed row
    max_length: int = 512
    # largest share of bad records that is skipped and counted; a larger one is an error
    max_bad: float = 0.01
    # largest number of chats, and of texts, that is used; 0: all
    max_samples: int = 0
    # answers: supervise assistant turns | all: every token of a chat
    train_on: str = "answers"
    # a mixture in place of chats and texts: name -> chats, texts, held_out_chats, held_out_texts,
    # share, reference
    domains: dict[str, DomainConfig] = field(default_factory=dict)
    # folder of a student or drafter whose card records the final shares of its training, from which
    # the domains start; empty: each domain's share
    shares_from: str = ""
    # base folder of the domains' relative paths; empty: the working folder
    root: str = ""
    # shares: fixed | loss (follow the gaps to reference losses) | acceptance (gaps in acceptance)
    mixing: str = "fixed"
    # eta: each evaluation multiplies a share by exp(eta x gap)
    mixing_rate: float = 1.0
    # weight of the previous gap in the moving average that mixing=acceptance uses
    mixing_smoothing: float = 0.9
    # count a loss below the reference as no gap, as the paper does and its code does not
    clip_gaps: bool = True
    # weight of the uniform mixture that every update adds
    uniform_share: float = 1e-4
    # smallest share of the rows that an update leaves to a domain
    floor_share: float = 0.01
    # tokens on disk, shared by ranks and later stages: auto (for files of 32 MB and more) | none
    # (in the memory of each rank) | disk
    cache: str = "auto"
    # folder of the caches; empty: SHALLOW_DRAFT_CACHE/tokens, else the user's cache
    cache_folder: str = ""
    # processes that render and tokenize; 0: on three cores and more one per core, at most 8, to
    # write a cache of files of 256 MB and more, else this process alone
    workers: int = 0
    # read `hf:` datasets row by row, without preparing them on the disk first
    streaming: bool = False
    # when a domain runs out of rows: wrap (start it again) | stop (end the run)
    when_exhausted: str = "wrap"
    # held-out tokens per domain that an evaluation reads, evenly sampled; 0: all
    held_out_tokens: int = 16384


@dataclass
class LoopConfig:
    """Length of a run, size of its batches, and intervals of evaluations and checkpoints."""

    # Fields that stages of other jobs inherit (jobs/inheritance.py); each sets its own length.
    SHARED: ClassVar = ("micro_batch_tokens", "dtype", "activation_checkpointing")

    # Maximum number of optimizer steps; 0: unlimited. The first of max_steps, max_epochs,
    # max_tokens and max_seconds that is reached ends the run; schedules follow the nearest.
    max_steps: int = 0
    # maximum number of passes over the data; null: unlimited if another bound is set, else one
    max_epochs: float | None = None
    # maximum number of tokens without padding, rounded up to a whole step; 0: unlimited
    max_tokens: int = 0
    # Maximum seconds of steps, held-out evaluations and checkpoints, summed over resumed runs;
    # 0: unlimited. Time before the first step and after the last evaluation is not counted. At
    # least one step is made.
    max_seconds: float = 0.0
    # packed tokens per optimizer step, over all ranks and accumulation steps
    tokens_per_step: int = 8192
    # packed tokens of one forward on one rank
    micro_batch_tokens: int = 8192
    # optimizer steps between held-out evaluations; 0: only at the end
    eval_every: int = 50
    # optimizer steps between checkpoints; 0: only at the end
    checkpoint_every: int = 50
    # newest checkpoints kept, besides the best one and those of keep_every
    keep: int = 1
    # optimizer steps between checkpoints that are never deleted; 0: none
    keep_every: int = 0
    # end the run after this many held-out evaluations in a row without a gain; 0: never
    patience: int = 0
    # A gain is a score that exceeds the score of the last gain by more than this. The score is the
    # figure that selects the best checkpoint.
    min_gain: float = 0.0
    # optimizer steps between two metric records
    log_every: int = 1
    # Dtype of weights and activations; bfloat16 keeps float32 master weights. auto: bfloat16 where
    # the GPU, or without one the processor, multiplies it in hardware, else float32.
    dtype: str = "float32"
    # store only the input of each decoder layer; the backward pass recomputes the layer
    activation_checkpointing: bool = False
    # Compile the decoder layers of all models with torch.compile, which takes a minute at the start
    # and makes steps on a GPU some 30 % faster. Layers that ranks shard (zero1 to zero3, fsdp) are
    # not compiled.
    compile: bool = False
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        """Choose the dtype for `auto`, so that run folders record what they were trained in."""
        if self.dtype == "auto":
            from decoding.devices import device_of  # here, as --help should not import torch
            from decoding.models.native.linear import native_dtype

            self.dtype = native_dtype(device_of("auto"))


@dataclass
class HeldOutConfig:
    """Held-out prompts: the target answers them once, and drafters are scored on its answers."""

    # prompts that are never trained on, in any format that benchmark.path accepts
    prompts: str = "embedded:held_out_chats"
    # rendering of the prompts: auto | chat (with data.template) | text (unchanged: base models)
    render: str = "auto"
    # largest number of prompts
    max_prompts: int = 48
    # largest number of tokens of an answer
    max_new_tokens: int = 96
    # temperature at which the target answers and acceptance is counted
    temperature: float = 1.0
    # Costs of a round, from which evaluations predict the speedup that selects the best checkpoint.
    # none: select without costs | measured (once, before the first step) | FILE: the
    # held_out_costs.json of another run with the same machine and shapes
    costs: str = "none"
    # seconds after which measuring ends, once three windows are measured; there are fewer if other
    # processes disturb one and further ones would end after twice as many seconds
    cost_seconds: float = 20.0


@dataclass
class TrainingJobConfig(JobConfig):
    """Fields of every training job."""

    # sustained TFLOP/s of all ranks together, from which a dry run estimates hours
    assumed_tflops: float = 100.0
    # before the first step, show a sample with its mask and what was checked, and write doctor.html
    doctor: bool = True
    data: DataConfig = field(default_factory=DataConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


@dataclass
class DrafterJobConfig(TrainingJobConfig):
    """Fields of every job that trains a drafter for a frozen target."""

    # drafter folder of another target that +experiment=retarget continues from, for its stages
    from_drafter: str = ""
    # rank of the low-rank adapters that are trained in place of a continued drafter's weights, and
    # merged into them at the end; 0: all weights are trained
    adapter_rank: int = 0


class TrainingFields(Protocol):
    """Configuration of a job that has training data and a loop."""

    data: DataConfig
    loop: LoopConfig


def check_values(config: TrainingFields, more: dict[str, tuple[bool, str]]) -> None:
    """Raise UserError for the first number of the data or of a loop that is out of range.

    more: the job's other keys -> (whether the value is valid, the expected range).
    """
    rules = [*data_rules(config.data), *((key, *rule) for key, rule in more.items())]
    for key, value in vars(config).items():
        if isinstance(value, LoopConfig):
            rules += loop_rules(key, value)
    refuse(config, rules)


LONGEST_ROW = 2**20  # tokens
LARGEST_STEP = 10**9  # tokens


def loop_rules(key: str, loop: LoopConfig) -> list[Rule]:
    """Return the rules for the options of a training loop, each under `key`."""
    optimizer, betas = loop.optimizer, loop.optimizer.betas
    others = loop.max_steps or loop.max_tokens or loop.max_seconds
    epochs = 1.0 if loop.max_epochs is None else loop.max_epochs
    no_bound = f"more than 0, or 0 if {key}.max_steps, max_tokens or max_seconds sets a bound"
    step_fits = 1 <= loop.tokens_per_step <= LARGEST_STEP
    betas_fit = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
    rules = [
        ("max_steps", loop.max_steps >= 0, "1 or more, or 0 for no bound"),
        ("max_tokens", loop.max_tokens >= 0, "1 or more, or 0 for no bound"),
        ("max_seconds", 0 <= loop.max_seconds < math.inf, "more than 0 s, or 0 for no bound"),
        ("max_epochs", 0 < epochs < math.inf or (epochs == 0 and bool(others)), no_bound),
        ("tokens_per_step", step_fits, f"1 to {LARGEST_STEP:,}"),
        ("micro_batch_tokens", loop.micro_batch_tokens >= 1, "1 or more"),
        ("eval_every", loop.eval_every >= 0, "1 or more, or 0 for only at the end"),
        ("checkpoint_every", loop.checkpoint_every >= 0, "1 or more, or 0 for only at the end"),
        ("keep", loop.keep >= 0, "0 or more"),
        ("keep_every", loop.keep_every >= 0, "1 or more, or 0 for none"),
        ("patience", loop.patience >= 0, "1 or more, or 0 for no early stop"),
        ("min_gain", 0 <= loop.min_gain < math.inf, "0 or more"),
        ("log_every", loop.log_every >= 1, "1 or more"),
        ("optimizer.lr", 0 < optimizer.lr < math.inf, "more than 0"),
        ("optimizer.betas", betas_fit, "two numbers from 0 to below 1"),
        ("optimizer.weight_decay", 0 <= optimizer.weight_decay < math.inf, "0 or more"),
        ("optimizer.warmup_steps", optimizer.warmup_steps >= 0, "0 or more"),
        ("optimizer.final_lr", 0 <= optimizer.final_lr < math.inf, "0 or more"),
        ("optimizer.clip", 0 <= optimizer.clip < math.inf, "more than 0, or 0 for no clipping"),
    ]
    return [(f"{key}.{name}", valid, expected) for name, valid, expected in rules]


def data_rules(data: DataConfig) -> list[Rule]:
    """Return the rules for the options of `data`."""
    templates, workers = ("auto", *TEMPLATES), RULES["processes"]
    return [
        ("data.max_bad", 0 <= data.max_bad <= 1, "a share from 0 to 1"),
        ("data.max_length", 2 <= data.max_length <= LONGEST_ROW, f"2 to {LONGEST_ROW:,}"),
        ("data.max_samples", data.max_samples >= 0, "1 or more, or 0 for all"),
        ("data.held_out_tokens", data.held_out_tokens >= 0, "1 or more, or 0 for all"),
        ("data.template", data.template in templates, f"one of {', '.join(templates)}"),
        ("data.train_on", data.train_on in TRAIN_ON, f"one of {', '.join(TRAIN_ON)}"),
        ("data.cache", data.cache in CACHES, f"one of {', '.join(CACHES)}"),
        ("data.workers", workers.fits(data.workers), workers.expected),
    ]


def held_out_rules(held_out: HeldOutConfig) -> dict[str, tuple[bool, str]]:
    """Return the rules of the held-out prompts: key -> (validity of its value, expected values)."""
    return {
        "held_out.max_prompts": (held_out.max_prompts > 0, "1 or more"),
        "held_out.render": (held_out.render in RENDERINGS, f"one of {', '.join(RENDERINGS)}"),
    }

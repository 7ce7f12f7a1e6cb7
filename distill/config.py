"""Configurations of the jobs in this package."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from training.config import (
    DataConfig,
    JobConfig,
    LoopConfig,
    ParallelConfig,
    StudentConfig,
    TargetConfig,
    TrackerConfig,
)


@dataclass
class LossConfig:
    """What the student is held against."""

    name: str = "forward_kl"  # forward_kl: KL(teacher || student) | cross_entropy: the text alone
    temperature: float = 1.0  # divides both sides' logits
    cache_mb: int = 0  # memory for the teacher's hidden states, so that later epochs skip its forward


@dataclass
class HeldOutConfig:
    """Prompts on which checkpoints are compared: the target answers them once, the student is scored on those answers."""

    prompts: str = "embedded:held_out_chats"  # evaluation JSONL or ShareGPT file that is never trained on
    max_prompts: int = 48  # prompts used
    max_new_tokens: int = 96  # length of the target's answer
    temperature: float = 1.0  # temperature at which the target answers and acceptance is counted


@dataclass
class QualityConfig(JobConfig):
    """`python -m distill.quality`: bits per byte on held-out modules, and the share of drawn functions that parse."""

    model: str = "embedded:target"  # model folder
    functions: int = 50  # held-out functions drawn
    temperature: float = 0.2  # at which they are drawn
    max_new_tokens: int = 320  # longest body


@dataclass
class SkipSearchConfig(JobConfig):
    """`python -m distill.skip_search`: which of the target's sub-layers to skip when it drafts for itself."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    max_skips: int = 0  # sub-layers skipped at most; 0: all but two
    candidates: int = 12  # sub-layers tried in a step: those that did best in the step before


@dataclass
class CompactConfig(JobConfig):
    """`python -m distill.compact`: a zero-padded checkpoint in its true width, accepted only with equal logits."""

    model: str = MISSING  # model folder of the padded checkpoint (safetensors)
    dtype: str = ""  # of the stored weights: float32 | bfloat16 | float16; empty: as they are
    tolerance: float = 1e-4  # largest difference of logits in float32 that is accepted, as a share of the largest logit


@dataclass
class PretrainConfig(JobConfig):
    """`python -m distill.pretrain`: a LLaMA from scratch; also the control of every pruning experiment."""

    model: StudentConfig = field(
        default_factory=StudentConfig
    )  # shape; every field must be given, as there is no target to take it from
    tokenizer: str = ""  # folder with the tokenizer files
    init_from: str = ""  # model folder of the same shape to go on from; empty: random weights
    tie_word_embeddings: bool = True  # one matrix for embedding and lm_head
    export_dtype: str = "bfloat16"  # dtype of the stored weights
    data: DataConfig = field(default_factory=DataConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


@dataclass
class TrainConfig(JobConfig):
    """`python -m distill.train`: a student of any LLaMA shape, distilled from the frozen target."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: StudentConfig = field(default_factory=StudentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

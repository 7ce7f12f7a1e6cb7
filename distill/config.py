"""Configurations of the jobs in this package."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from jobs.config import JobConfig, ParallelConfig, TargetConfig
from training.config import (
    DataConfig,
    DrafterJobConfig,
    HeldOutConfig,
    LoopConfig,
    StudentConfig,
    TrainingJobConfig,
)
from training.features.teacher_config import TeacherConfig
from training.losses.config import LossConfig
from training.on_policy import OnPolicyOptions


@dataclass
class StudentLossConfig(LossConfig):
    """Training loss of the student."""

    # memory for the teacher's hidden states, with which later epochs skip its forward pass; 0: none
    cache_mb: int = 0


@dataclass
class OnPolicyConfig(OnPolicyOptions):
    """Rows that the student writes during the training, and the target scores.

    The student answers prompts of the training data, and is distilled on its answers. They take the
    place of rows of the training data, of which a share is left.
    """

    # steps between two refreshes, at which the student writes the rows of the steps up to the next
    # one; 1: every step is on-policy, but decodes small batches
    refresh: int = 50
    # maximum length of an answer; prompts are left out if data.max_length leaves less room
    max_new_tokens: int = 128


@dataclass
class ParallelDraftingConfig:
    """Mask tokens with which the student drafts several tokens in one forward (PARD)."""

    # tokens that the student learns to draft in one forward; 0: it drafts token by token
    tokens: int = 0
    # id of the token in the place of a token to draft, which no text has; null: an unused or
    # reserved one
    mask_token: int | None = None
    # share of the positions that train the second token; that of each further one is this share of
    # the share before
    retain: float = 0.7
    # smallest share of the positions that train a token
    retain_min: float = 0.2


@dataclass
class QualityConfig(JobConfig):
    """`python -m distill.quality`: measure bits per byte and the share of valid functions."""

    # model folder
    model: str = "embedded:target"
    # number of held-out functions to generate
    functions: int = 50
    # sampling temperature
    temperature: float = 0.2
    # maximum length of a generated body
    max_new_tokens: int = 320


@dataclass
class SkipSearchConfig(JobConfig):
    """`python -m distill.skip_search`: find the sub-layers to skip in self-speculative decoding."""

    # the search always measures its costs
    UNREAD = ("held_out.costs", "held_out.cost_seconds")

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    # maximum number of skipped sub-layers; 0: all but two
    max_skips: int = 0
    # number of sub-layers that a step evaluates: the best ones of the previous step
    candidates: int = 12


@dataclass
class CompactConfig(JobConfig):
    """`python -m distill.compact`: store a zero-padded checkpoint at its true width."""

    # model folder of the padded checkpoint (safetensors)
    model: str = MISSING
    # dtype of the stored weights: float32 | bfloat16 | float16; empty: unchanged
    dtype: str = ""
    # maximum difference of the float32 logits, relative to the largest logit
    tolerance: float = 1e-4


@dataclass
class PretrainConfig(TrainingJobConfig):
    """`python -m distill.pretrain`: train a LLaMA from scratch."""

    # shape of the model; every width is required because there is no target
    model: StudentConfig = field(default_factory=StudentConfig)
    # folder with the tokenizer files
    tokenizer: str = ""
    # model folder of the same shape to start from; empty: random weights
    init_from: str = ""
    # share one matrix between the embedding and lm_head
    tie_word_embeddings: bool = True
    # dtype of the stored weights
    export_dtype: str = "bfloat16"


@dataclass
class TrainConfig(DrafterJobConfig):
    """`python -m distill.train`: distil the frozen target into a LLaMA student of any shape."""

    target: TargetConfig = field(default_factory=TargetConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    # evaluation prompts (JSONL) for the later stages of an experiment; never trained on
    benchmark_prompts: str = ""
    # how those stages render the prompts (benchmark.render): auto | chat | text
    benchmark_render: str = "auto"
    # numbers of layers that an experiment compares, such as "1,3,5" (depth_sweep)
    ladder: str = ""
    # mode of the pruning stage of an experiment: importance | l0 | random
    prune_mode: str = "importance"
    # largest_cut of the pruning stage of an experiment; 1: a single cut
    prune_largest_cut: float = 1.0
    loss: StudentLossConfig = field(default_factory=StudentLossConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    on_policy: OnPolicyConfig = field(default_factory=OnPolicyConfig)
    parallel_drafting: ParallelDraftingConfig = field(default_factory=ParallelDraftingConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    # a checkpoint RUN/checkpoints/STEP of an earlier run, whose drafter folder is written to
    # RUN/exports/STEP without training; all other settings are then those of that run
    checkpoint: str = ""


@dataclass
class RegenerateConfig(JobConfig):
    """`python -m distill.regenerate`: replace the answers in chats with the target's."""

    # an experiment's other stages read them
    UNREAD = ("data.held_out_chats", "data.held_out_texts")

    target: TargetConfig = field(default_factory=TargetConfig)
    # chats to answer: the first data.max_samples, each limited to data.max_length tokens with its
    # answers
    data: DataConfig = field(default_factory=DataConfig)
    # at most one drafter, as in eval.run: a folder, a name in conf/drafter or a mapping; it speeds
    # up decoding and does not change the answers
    drafters: list[Any] = field(default_factory=list)
    # number of tokens that the drafter proposes per round
    num_draft_tokens: int = 4
    # sampling temperature; 0 is greedy, with which small targets often loop
    temperature: float = 1.0
    # 0: off
    top_k: int = 0
    # 1: off
    top_p: float = 1.0
    # 0: off
    min_p: float = 0.0
    # maximum length of an answer; a request is skipped if data.max_length leaves less room
    max_new_tokens: int = 256
    # number of answers per chat, each sampled with independent noise
    samples: int = 1
    # number of requests decoded together, grouped by length; a server forms its own batches
    batch_size: int = 32
    # answers cut at max_new_tokens: end (kept as the last answer of the chat) | drop (discarded) |
    # go_on (kept, and the chat continues)
    on_length: str = "end"
    # discard answers that loop (distinct-4 below 0.5) and end their chat
    drop_loops: bool = False
    # skip chats whose requests equal those of an earlier chat
    drop_duplicates: bool = False
    # total over all ranks, used for the time estimate of a dry run; 0: measured on one batch
    assumed_tokens_per_second: float = 0.0
    # kind=ddp: the chats are divided among the ranks
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    # base URL of an OpenAI-compatible server of the target (http://127.0.0.1:8000/v1), which then
    # answers; of target.path only the tokenizer is read; empty: load the target
    server: str = ""
    # name of the model in requests; empty: the only one that the server lists
    server_model: str = ""
    # number of requests in flight
    server_requests: int = 16
    # tokens: send the token ids of the target's own chat template, to /completions | messages: send
    # chats to /chat/completions, where the server's template renders them
    server_prompts: str = "tokens"
    # send the fields top_k, min_p, repetition_penalty, stop_token_ids and return_token_ids, which
    # vLLM and others have added to OpenAI's
    server_extensions: bool = True
    # longest wait for an answer, in seconds
    server_timeout_s: float = 600.0
    # number of times that a request is sent again after a dropped connection, a timeout, an
    # incomplete answer, or HTTP 429 or 5xx
    server_retries: int = 6
    # seconds before the first of them; doubled for each further one, up to 60
    server_retry_s: float = 1.0


@dataclass
class ImportanceConfig:
    """Importance scores and choice of layers for mode=importance."""

    # number of rows of data.max_length tokens to score
    sequences: int = 1024
    # cache of scores by target and data; later shapes reuse them
    cache_dir: str = "runs/importance"
    # choice of layers: probe (compare the other choices by acceptance) | even | even_without_last |
    # influence | greedy | contiguous | early_exit
    choice: str = "probe"
    # number of rows for the greedy removal of layers
    greedy_sequences: int = 8
    # rescale every norm so that removing channels leaves the scale of its output unchanged
    rescale_norms: bool = True
    # number of held-out rows on which candidates are compared
    probe_sequences: int = 100
    # steps of distillation (configured by `between`) before candidates are compared; 0: none, which
    # favours sets with the last layer
    probe_steps: int = 50
    # number of candidates that are distilled: those with the highest acceptance before distillation
    probe_candidates: int = 4


@dataclass
class L0Config:
    """Masks of Sheared-LLaMA for mode=l0, trained by `loop`.

    zero1, zero2, zero3 and fsdp shard the training, but each evaluation gathers all weights on
    every rank.
    """

    # beta of the hard-concrete distribution: code (2/3, the published code) | paper (0.83, the
    # appendix)
    beta: str = "code"
    # share of the run over which the sparsity grows to its target
    warmup_share: float = 0.2
    # peak learning rate of mask logits and multipliers
    mask_lr: float = 1.0
    # train the weights together with the masks; false: frozen, which needs far less memory
    train_weights: bool = True


@dataclass
class PruneConfig(TrainingJobConfig):
    """`python -m distill.prune`: prune a target to a student of any smaller LLaMA shape."""

    target: TargetConfig = field(default_factory=TargetConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    # importance: activation scores and a probe | l0: learned masks | random: random weights
    mode: str = "importance"
    # numbers of layers after each stage but the last, such as [12, 5]; widths are cut in the first
    # stage; empty: derived from largest_cut
    depths: list[int] = field(default_factory=list)
    # maximum share of the layers that one stage removes (0.625: 32 -> 12 -> 5 -> 3)
    largest_cut: float = 1.0
    # masks.safetensors of an earlier run to apply to this target; the file holds the indices of the
    # kept units
    masks: str = ""
    # memory for the target's hidden states, shared by all candidates of a probe
    cache_mb: int = 0
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    l0: L0Config = field(default_factory=L0Config)
    # distillation between stages and of the probe's candidates; mode=l0 trains with `loop`
    between: LoopConfig = field(default_factory=LoopConfig)

"""Configurations of the jobs in this package."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from jobs.config import JobConfig, ParallelConfig, TargetConfig
from training.config import (
    DataConfig,
    HeldOutConfig,
    LoopConfig,
    StudentConfig,
    TrainingJobConfig,
)


@dataclass
class LossConfig:
    """What the student is held against."""

    name: str = "forward_kl"  # forward_kl: KL(teacher || student) | cross_entropy: the text alone
    temperature: float = 1.0  # divides both sides' logits
    # memory for the teacher's hidden states, so that later epochs skip its forward
    cache_mb: int = 0


@dataclass
class QualityConfig(JobConfig):
    """`python -m distill.quality`: bits per byte on held-out modules, and the share of drawn
    functions that parse.
    """

    model: str = "embedded:target"  # model folder
    functions: int = 50  # held-out functions drawn
    temperature: float = 0.2  # at which they are drawn
    max_new_tokens: int = 320  # longest body


@dataclass
class SkipSearchConfig(JobConfig):
    """`python -m distill.skip_search`: which of the target's sub-layers to skip when it drafts for
    itself.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    max_skips: int = 0  # sub-layers skipped at most; 0: all but two
    candidates: int = 12  # sub-layers tried in a step: those that did best in the step before


@dataclass
class CompactConfig(JobConfig):
    """`python -m distill.compact`: a zero-padded checkpoint in its true width, accepted only with
    equal logits.
    """

    model: str = MISSING  # model folder of the padded checkpoint (safetensors)
    dtype: str = ""  # of the stored weights: float32 | bfloat16 | float16; empty: as they are
    # largest difference of logits in float32 that is accepted, as a share of the largest logit
    tolerance: float = 1e-4


@dataclass
class PretrainConfig(TrainingJobConfig):
    """`python -m distill.pretrain`: a LLaMA from scratch; also the control of every pruning
    experiment.
    """

    # shape; every field must be given, as there is no target to take it from
    model: StudentConfig = field(default_factory=StudentConfig)
    tokenizer: str = ""  # folder with the tokenizer files
    init_from: str = ""  # model folder of the same shape to go on from; empty: random weights
    tie_word_embeddings: bool = True  # one matrix for embedding and lm_head
    export_dtype: str = "bfloat16"  # dtype of the stored weights


@dataclass
class TrainConfig(TrainingJobConfig):
    """`python -m distill.train`: a student of any LLaMA shape, distilled from the frozen target."""

    target: TargetConfig = field(default_factory=TargetConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    # evaluation prompts (JSONL) that an experiment's later stages decode; never trained on
    benchmark_prompts: str = ""
    # how those stages show them to the target (benchmark.render): auto | chat | text
    benchmark_render: str = "auto"
    ladder: str = ""  # numbers of layers that an experiment compares, such as "1,3,5" (depth_sweep)
    # of an experiment's pruning stage: importance | l0 | random (distill.prune's mode)
    prune_mode: str = "importance"
    prune_largest_cut: float = 1.0  # of that stage (distill.prune's largest_cut); 1: one cut
    loss: LossConfig = field(default_factory=LossConfig)
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)


@dataclass
class RegenerateConfig(JobConfig):
    """`python -m distill.regenerate`: the target's own answers to the chats' requests, as chats to
    train a drafter on.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    # Its chats are answered anew: the first data.max_samples of them, in data.max_length tokens
    # each (answers included).
    data: DataConfig = field(default_factory=DataConfig)
    # One at most, as eval.run names them: a folder, a name in conf/drafter, a mapping. The answers
    # are the same, and come faster.
    drafters: list[Any] = field(default_factory=list)
    num_draft_tokens: int = 4  # tokens that the drafter proposes in a round
    # at which the target answers; 0 is greedy, and small targets then loop
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    # An answer ends here or at a stop token; a request that leaves no room for as many in
    # data.max_length is not asked.
    max_new_tokens: int = 256
    samples: int = 1  # answers to every chat, each with noise of its own
    batch_size: int = 32  # requests answered together, those of like length
    # An answer cut at max_new_tokens: end (kept, the last of its chat) | drop (left out) | go_on
    # (fed on as if it were whole).
    on_length: str = "end"
    # leave out answers that loop (distinct-4 below 0.5); a chat ends before one
    drop_loops: bool = False
    drop_duplicates: bool = False  # skip chats whose requests are those of an earlier one
    # Of all ranks together, for the hours that a dry run tells; 0: timed on a batch.
    assumed_tokens_per_second: float = 0.0
    # kind=ddp: each rank answers chats of its own
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass
class ImportanceConfig:
    """mode=importance: what is scored, and how the layers are chosen."""

    sequences: int = 1024  # rows of data.max_length tokens that are read for the scores
    # scores by target and data: every shape after the first is free
    cache_dir: str = "runs/importance"
    # Of layers: probe (these candidates by acceptance) | even | even_without_last | influence |
    # greedy | contiguous | early_exit
    choice: str = "probe"
    greedy_sequences: int = 8  # rows on which layers are taken away one by one
    rescale_norms: bool = True  # give every norm the scale that its output had before channels went
    probe_sequences: int = 100  # held-out rows on which candidates are compared
    # Of distillation (by `between`) that a candidate gets before it is compared; 0: none, which
    # favours sets with the last layer.
    probe_steps: int = 50
    # that are distilled: those of the highest acceptance as they were cut
    probe_candidates: int = 4


@dataclass
class L0Config:
    """mode=l0: Sheared-LLaMA's masks; its training schedule is `loop`. Ranks share weights and
    states under zero kinds and fsdp, but every evaluation holds the weights whole on each.
    """

    # of the hard-concrete distribution: code (2/3, what was run) | paper (0.83, its appendix)
    beta: str = "code"
    warmup_share: float = 0.2  # share of the run over which the sparsity grows to its target
    mask_lr: float = 1.0  # peak learning rate of mask logits and multipliers
    # weights move with the masks; false: frozen, at a fraction of the memory
    train_weights: bool = True


@dataclass
class PruneConfig(TrainingJobConfig):
    """`python -m distill.prune`: cut a target down to a student of any smaller LLaMA shape."""

    target: TargetConfig = field(default_factory=TargetConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    # importance: activation scores, a probe | l0: learned masks | random: from scratch
    mode: str = "importance"
    # layers left after each stage before the last, such as [12, 5]; widths are cut in the first.
    # Empty: by largest_cut
    depths: list[int] = field(default_factory=list)
    # share of its layers that one stage may take (0.625: 32 -> 12 -> 5 -> 3)
    largest_cut: float = 1.0
    # masks.safetensors of an earlier run: cut this target by it, and choose nothing anew. It holds
    # which units stay: no weights, no logits.
    masks: str = ""
    # memory for the target's hidden states, read once for all of a probe's candidates
    cache_mb: int = 0
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    l0: L0Config = field(default_factory=L0Config)
    # distillation between stages, and of the probe's candidates; `loop` is the training of mode=l0
    between: LoopConfig = field(default_factory=LoopConfig)

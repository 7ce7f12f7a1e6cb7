"""Settings of `python -m eval.plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jobs.config import JobConfig, TargetConfig


@dataclass
class PlanConfig(JobConfig):
    """Plan of what to train for a target, on this machine and as it will serve."""

    # A plan is made anew from costs that are measured already; only these settings change them.
    UNREAD: ClassVar[tuple[str, ...]] = (
        *("depths", "widths", "heads", "shapes", "tree_nodes", "speedups"),
        *("acceptance", "runs", "curves", "costs", "training_tokens", "assumed_tflops"),
        *("prompts", "cost_seconds", "remeasure"),
    )

    # the target: a folder with weights, a folder with a config.json alone, or a published
    # configuration (target=NAME), whose weights are then random
    target: TargetConfig = field(default_factory=TargetConfig)
    # layers of the pruned LLaMA drafters; each depth is combined with each width
    depths: list[int] = field(default_factory=lambda: [1, 2, 4])
    # hidden sizes of the pruned drafters; 0: the target's
    widths: list[int] = field(default_factory=lambda: [0])
    # kinds of heads, as in heads.train head=NAME, with the options of conf/head/NAME.yaml
    heads: list[str] = field(default_factory=lambda: ["recurrent", "medusa", "eagle3", "dflash"])
    # shapes of the drafts: chain | tree (of pruned models, and of the heads that can) | parallel
    # (chains that a pruned model drafts in one forward, as PARD)
    shapes: list[str] = field(default_factory=lambda: ["chain"])
    # nodes of the trees, of which each number is planned; a recurrent head has beams of as many or
    # a few more
    tree_nodes: list[int] = field(default_factory=lambda: [8, 24, 64])
    # tokens that the drafters propose; 0, or the target's vocabulary and more: all
    draft_vocab_size: int = 8192
    # longest draft; heads that draft in one pass may end before
    max_draft_tokens: int = 8
    # rows decoded together in serving
    batch_size: int = 1
    # committed tokens of a row while the costs are measured; 0: 512, or as many as the target holds
    # besides the drafts
    context: int = 0
    # sampling temperature of serving; 0: greedy
    temperature: float = 0.0
    # speedups for which the needed acceptance is computed
    speedups: list[float] = field(default_factory=lambda: [1.0, 1.2])
    # seconds of measurement for each drafter, the target beside it included. After them a window of
    # time begins only if there are fewer than three; and if other processes disturbed one, none
    # begins that would end after twice as many seconds, by the longest one so far
    cost_seconds: float = 20.0
    # costs.jsonl of another plan of this target on this machine, whose costs are not measured again
    costs: str = ""
    # measure drafters anew whose known costs are unreliable
    remeasure: bool = False
    # file of measured acceptances, to which this job adds those that it finds in `runs`
    acceptance: str = "runs/acceptance.jsonl"
    # folders (globs) in which runs of eval.run and trainings are looked for, at any depth; their
    # acceptances are added
    runs: list[str] = field(default_factory=lambda: ["runs"])
    # further files of measured acceptances, which must hold some of this target
    curves: list[str] = field(default_factory=list)
    # set of prompts for which acceptance is predicted, as `benchmark` in the file of acceptances;
    # empty: the one on which the most drafters were measured
    prompts: str = ""
    # tokens of each training; 0: as many as the known drafters read (their median), or 100 million
    training_tokens: int = 0
    # sustained TFLOP/s of a training, for its hours; 0: those of matrix products on this machine,
    # which are measured and which no training exceeds
    assumed_tflops: float = 0.0

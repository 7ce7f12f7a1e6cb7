"""Settings of `python -m eval.run` and `python -m eval.compare`, one line a field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from jobs.config import JobConfig, TargetConfig, TrackerConfig


@dataclass
class BenchmarkConfig:
    """The prompts and how they are read."""

    name: str = ""  # the name in the tables; empty: the file's name
    # JSONL of {"turns": [...]}, {"prompt"} or {"question"}, or a ShareGPT file (its first human
    # turns)
    path: str = MISSING
    # such a file for the sweep alone (none of what is measured); empty: it takes some of these
    sweep_path: str = ""
    category: str = ""  # keep the prompts of this category alone; empty: all
    # JSON file of prompt ids to keep, in this order: a list, or {"ids": [...]}; empty: all
    ids: str = ""
    first: int = 0  # keep only the first N of these, as some published tables do; 0: all
    # where max_prompts keeps some of these, take them from all over, not the first: of every
    # category or language
    spread: bool = False
    # chat: by the chat template; text: the turn as it stands (base models); auto: text where there
    # is no template
    render: str = "chat"
    # auto (the tokenizer's own) or the name of one of ours, such as vicuna
    chat_template: str = "auto"
    strip: bool = False  # without the white space around a turn
    template: str = "{turn}"  # with render=text: what stands around a turn, such as "Q: {turn}\nA:"
    turns: str = "first"  # first | all; with all, the target's own answer stands between the turns
    # error | skip (counted): a prompt that leaves no room for max_new_tokens
    too_long: str = "error"


@dataclass
class EvalConfig(JobConfig):
    """Evaluation of one or several drafters against our own autoregressive decoding."""

    target: TargetConfig = field(default_factory=TargetConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    # Model folders (runs/*/drafter: each under its card's name), names in conf/drafter, or
    # mappings: {use: FOLDER or NAME, folder:, name:, stopping:, schedule:, lookup:, verify:,
    # max_draft_tokens:, and what the drafter takes}, or with _target_. lookup=6 copies what
    # followed where the text's last 6 tokens stood before, ahead of any model.
    drafters: list[Any] = field(default_factory=list)
    draft_model: str = ""  # a model folder that an experiment's drafters name as ${draft_model}
    # where an experiment's stages find their prompt files, as ${benchmark_folder}
    benchmark_folder: str = ""
    # what an experiment's skip search runs on; none of the benchmark
    search_prompts: str = "embedded:chats"
    prompt_lookup_control: bool = True  # adds the prompt-lookup row where the list does not name it
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # of tokens that the prompt or the answer holds already; 1: off
    # function of the tokenizer, as package.module.name, that gives
    # decoding.sampling.logits_processors.Allowed;
    # empty: any token
    allowed: str = ""
    # texts that end an answer, besides stop tokens
    stop_strings: list[str] = field(default_factory=list)
    # token | block | coupled: the rule where temperature > 0; a drafter's mapping may say
    verify: str = "token"
    # When a draft ends: fixed, confidence, assisted, adaptive_confidence, entropy, thompson or
    # cost_ratio; null: cost_ratio for a model's chains, else fixed; a drafter's mapping may say.
    stopping: str | None = None
    stopping_threshold: float | None = None  # of the policies that have one; null: the policy's own
    # serial; pearl_virtual, pearl_wall (both _wo_pre, _wo_post too), pearl_plus_virtual or
    # pearl_plus_wall: draft while the target verifies, on a virtual clock or in two workers; alone:
    # the drafter's own text. A drafter's mapping may say.
    schedule: str = "serial"
    # gammas; empty: each drafter's best of the sweep
    num_draft_tokens: list[int] = field(default_factory=list)
    # gammas tried on the sweep's prompts
    sweep: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 8])
    # The most tokens of a draft that its stopping rule ends by itself (confidence, assisted,
    # adaptive_confidence, entropy, thompson), whatever gammas are given or swept for the others; a
    # drafter's mapping may say, for cost_ratio too. Targets that record their steps go by gammas.
    max_draft_tokens: int = 16
    # For the sweep alone, spread over all prompts taken, so that the best gamma is not chosen on
    # its test.
    sweep_prompts: int = 8
    batch_sizes: list[int] = field(default_factory=lambda: [1])  # prompts decoded together
    # prompts taken from the benchmark, the sweep's included unless it has its own file; 0: all
    max_prompts: int = 64
    # Seconds of measuring at most, what is timed beforehand and resumed runs included; 0: all
    # prompts. Of the prompts, in an order shuffled by `seed`, as many are measured as fit, each
    # under every condition and by every drafter: 2 of the sweep and 5 of the rest at least.
    max_seconds: float = 0.0
    # generations of every prompt where temperature > 0, each with noise of its own
    samples: int = 1
    repeats: int = 1  # times that every generation is run; the fastest counts, for noisy machines
    max_new_tokens: int = 128  # a generation ends here or at a stop token
    stop_at_eos: bool = True  # false: always max_new_tokens, for timing alone
    # times that each part is timed in a slice, between units all through the run
    timing_repeats: int = 3
    # prompts whose texts the report shows, token by token: drafted, or the target's own
    show_texts: int = 0
    bootstrap_resamples: int = 2000  # of the 95 % interval of the speedup
    # ends with an error, after the report, when an output differs from the target's
    require_lossless: bool = True
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


@dataclass
class CompareConfig(JobConfig):
    """Comparison of any number of evaluated drafters in one report."""

    # Finished run folders of eval.run, or globs: runs=[runs/one,"runs/sweep/*/eval.run"].
    runs: list[str] = field(default_factory=list)
    # Drafter (as the table names it), run or run folder -> its series, whose points are joined:
    # labels={runs/one: wide, runs/two: wide}.
    labels: dict[str, str] | None = None
    # Or by what drafters share: bytes_per_step, training_tokens (each within 3 %), or fields of the
    # card, such as shape.hidden_size.
    group_by: list[str] = field(default_factory=list)
    # which prompts count: headline (those whose text does not loop) | all
    prompts: str = "headline"
    bootstrap_resamples: int = 2000  # of the 95 % interval of one speedup over another
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

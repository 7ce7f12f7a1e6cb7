"""Settings of `python -m recurrent_drafting.generate`, one line a field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jobs.config import JobConfig, TargetConfig


@dataclass
class GenerateConfig(JobConfig):
    """Chat with a target and its drafter, or run a file of prompts through both. What is said is
    the target's own, whatever drafts.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    tokenizer: str = ""  # folder of the tokenizer, where the target's has none; empty: the target's
    # {use: FOLDER or NAME, and what it takes}: a recurrent head, a language model of the same
    # tokenizer, a name in conf/drafter, or none; drafter=FOLDER is short for {use: FOLDER}; {}:
    # prompt_lookup.
    drafter: dict[str, Any] = field(default_factory=dict)
    beam_width: int = 10  # beams of a recurrent head; the most, where by_cost is set
    # Tokens of a beam, the target's own first one among them; so one fewer is drafted, by other
    # drafters too.
    beam_length: int = 5
    # beams of a head where answers are sampled: sampled (without replacement) | top_k (its
    # likeliest)
    children: str = "sampled"
    # a head's width and length follow the measured costs of a round; false: they are fixed
    by_cost: bool = True
    # token | block | coupled: the rule where temperature > 0; greedy at temperature 0
    verify: str = "token"
    # when a chain ends, as in eval.run; null: the drafter's usual policy
    stopping: str | None = None
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    max_new_tokens: int = 256  # an answer ends here, at a stop token or where the context is full
    # of a prompt with all turns before it, as rendered; 0: as many as the context holds
    max_prompt_tokens: int = 0
    # system turn before every conversation; empty: none, or what the chat template writes by itself
    system: str = ""
    # Chat template: one of ours by name, or auto: the tokenizer's own; without one the head's, or
    # Vicuna's
    template: str = "auto"
    # JSONL of {"turns": [...]}, {"prompt"} or {"question"}, a ShareGPT file, or mt_bench; empty: an
    # interactive chat
    prompts: str = ""
    turns: str = "all"  # of the prompts: all (an answer stands between two turns) | first
    max_prompts: int = 0  # prompts taken from the file; 0: all
    batch_size: int = 1  # prompts decoded together; the last batch may have fewer
    # prompts: decode them plainly too, in turn, for the speedup and to compare the outputs
    baseline: bool = True
    # Chat: tokens of each answer that are decoded again plainly, for the speedup; 0: none is told.
    baseline_tokens: int = 16
    # JSONL file for the answers of prompts= and their counts; empty: they are only printed
    output: str = ""

"""Settings of `python -m recurrent_drafting.generate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jobs.config import JobConfig, TargetConfig


@dataclass
class GenerateConfig(JobConfig):
    """Chat with a target and its drafter, or answer a file of prompts with both.

    The drafter does not change the target's answers.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    # tokenizer folder if the target's folder has none; empty: the target's
    tokenizer: str = ""
    # {use: FOLDER or NAME, and its options}: a recurrent head, a language model with the same
    # tokenizer, a name in conf/drafter, or none; drafter=FOLDER is short for {use: FOLDER}; {}:
    # prompt_lookup
    drafter: dict[str, Any] = field(default_factory=dict)
    # number of beams of a recurrent head; the maximum if by_cost is set
    beam_width: int = 10
    # tokens per beam including the first one, which the target chooses; every drafter proposes one
    # token fewer
    beam_length: int = 5
    # beams of a head when answers are sampled: sampled (without replacement) | top_k
    children: str = "sampled"
    # adapt a head's beam width and length to the measured costs of a round; false: fixed
    by_cost: bool = True
    # verification rule at temperature > 0: token | block | coupled, or a lossy one: typical |
    # lossy_lenience:L; temperature 0 is greedy
    verify: str = "token"
    # stopping policy of a chain, as in eval.run; null: the drafter's default
    stopping: str | None = None
    # 0 is greedy
    temperature: float = 1.0
    # 0: off
    top_k: int = 0
    # 1: off
    top_p: float = 1.0
    # 0: off
    min_p: float = 0.0
    # maximum length of an answer, which also ends at a stop token or when the context is full
    max_new_tokens: int = 256
    # maximum length of a rendered prompt with all previous turns; 0: the size of the context
    max_prompt_tokens: int = 0
    # system turn of every conversation; empty: the chat template's default
    system: str = ""
    # chat template: a built-in one by name, or auto: the tokenizer's; if it has none, the head's or
    # Vicuna's
    template: str = "auto"
    # JSONL of {"turns": [...]}, {"prompt"} or {"question"}, a ShareGPT file, or mt_bench; empty: an
    # interactive chat
    prompts: str = ""
    # turns of the prompts: all (with an answer between two turns) | first
    turns: str = "all"
    # number of prompts from the file; 0: all
    max_prompts: int = 0
    # number of prompts decoded together; the last batch may be smaller
    batch_size: int = 1
    # also decode the prompts without the drafter to measure the speedup and compare outputs
    baseline: bool = True
    # chat: number of tokens per answer that are decoded again without the drafter to measure the
    # speedup; 0: no speedup
    baseline_tokens: int = 16
    # JSONL file for the answers to prompts= and their counts; empty: they are only printed
    output: str = ""

"""The published tool's flags: what each takes, its defaults there and here, what it becomes, and
where its meaning differs.

Source: the flags of `recurrent_drafting/cmd/generate.py` of apple/ml-recurrent-drafter.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from decoding.errors import UserError

TRUE, FALSE = ("true", "t", "1", "yes", "y"), ("false", "f", "0", "no", "n")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Flag:
    """One published flag: what it takes, its default there and here, and what it becomes."""

    name: str
    takes: str  # text | number | true or false, and which texts
    published: str  # the published default
    here: str  # ours
    meaning: str
    differs: str  # from the published meaning; empty: in nothing
    overrides: Callable[[str], list[str]]  # of a checked value

    @property
    def is_switch(self) -> bool:
        """Whether it may stand alone."""
        return self.takes.startswith("true")


def is_truth(value: str) -> bool:
    """Whether a text says true or false."""
    return value.lower() in TRUE + FALSE


def truth(value: str) -> bool:
    """Whether a text says true."""
    return value.lower() in TRUE


def quoted(value: str) -> str:
    """A text as Hydra's grammar takes any: in quotes, where a backslash means itself unless quotes
    or the end follow.
    """
    doubled = re.sub(r"(\\+)('|$)", r"\1\1\2", value)
    return "'" + doubled.replace("'", "\\'") + "'"


def _key(key: str) -> Callable[[str], list[str]]:
    return lambda value: [f"{key}={value}"]


def _text(key: str) -> Callable[[str], list[str]]:
    return lambda value: [f"{key}={quoted(value)}"]


def _when_true(override: str) -> Callable[[str], list[str]]:
    return lambda value: [override] if truth(value) else []


def _mt_bench(value: str) -> list[str]:
    if is_truth(value):
        return ["prompts=mt_bench"] if truth(value) else []
    return [f"prompts={quoted(value)}"]


def _most(flag: str, key: str, without_limit: str) -> Callable[[str], list[str]]:
    """A limit of at least one; negative: none, which is 0 to our key."""

    def overrides(value: str) -> list[str]:
        if int(value) == 0:
            raise UserError(
                f"--{flag} is 0, which leaves nothing: expected 1 or more, or a negative number "
                f"({without_limit})."
            )
        return [f"{key}={max(int(value), 0)}"]

    return overrides


def _device(value: str) -> list[str]:
    return [f"target.device={'cpu' if int(value) < 0 else f'cuda:{int(value)}'}"]


# In the order in which they are applied: greedy_search overrules temperature, autoregression the
# drafter.
FLAGS = (
    Flag(
        "hf_tokenizer",
        "text",
        "lmsys/vicuna-7b-v1.3",
        "the target's",
        "folder of the tokenizer",
        "a folder on this machine, no name on the Hub",
        _text("tokenizer"),
    ),
    Flag(
        "hf_llm",
        "text",
        "lmsys/vicuna-7b-v1.3",
        "the embedded target",
        "folder of the target",
        "a folder on this machine; its own chat template is used where it has one, not Vicuna's "
        "for all",
        _text("target.path"),
    ),
    Flag(
        "hf_drafter",
        "text",
        "(required)",
        "prompt_lookup",
        "folder of the recurrent head",
        "may also be the folder of a language model, or a name in conf/drafter",
        lambda value: [f"++drafter={{use: {quoted(value)}}}"],
    ),
    Flag(
        "eval_mt_bench",
        "true, false or a file",
        "false",
        "false",
        "answer MT-bench instead of chatting",
        "both turns of every question, not the first alone; a file is read instead of the cache of "
        "`datasets`",
        _mt_bench,
    ),
    Flag(
        "max_num_prompts",
        "number",
        "-1",
        "all",
        "prompts to answer; negative: all",
        "fewer prompts than that are no error",
        _most("max_num_prompts", "max_prompts", "all"),
    ),
    Flag(
        "max_prompt_length",
        "number",
        "50",
        "the context",
        "longest prompt, in tokens; longer ones are left out and counted; negative: as long as the "
        "context",
        "counts tokens of the rendered prompt, not characters, and adds nothing to what may be "
        "generated",
        _most("max_prompt_length", "max_prompt_tokens", "as long as the context"),
    ),
    Flag(
        "max_generation_length",
        "number",
        "60",
        "256",
        "most tokens of an answer",
        "of the answer alone; nothing behind its end token is emitted or counted",
        _key("max_new_tokens"),
    ),
    Flag(
        "beam_width",
        "number",
        "10",
        "10",
        "beams of a recurrent head",
        "the most; by_cost=false fixes it",
        _key("beam_width"),
    ),
    Flag(
        "beam_length",
        "number",
        "-1 (refused)",
        "5",
        "tokens of a beam, the target's own first one among them",
        "has a default, which -1 stands for; the most, unless by_cost=false",
        lambda value: [] if int(value) == -1 else [f"beam_length={int(value)}"],
    ),
    Flag(
        "temperature",
        "number",
        "1.0",
        "1.0",
        "of sampling",
        "sampling is lossless here",
        _key("temperature"),
    ),
    Flag(
        "greedy_search",
        "true or false",
        "false",
        "false",
        "always the target's likeliest token; overrules --temperature",
        "",
        _when_true("temperature=0"),
    ),
    Flag(
        "rng_seed",
        "number",
        "123",
        "123",
        "seed of what is drawn",
        "gives other draws than there; verify=coupled gives those of plain decoding",
        _key("seed"),
    ),
    Flag(
        "batch_size",
        "number",
        "1",
        "1",
        "prompts decoded together",
        "the last batch may have fewer and is not dropped; a finished row stops costing",
        _key("batch_size"),
    ),
    Flag(
        "dtype",
        " | ".join(DTYPES),
        "bf16",
        "fp32",
        "of weights and activations",
        "float32 unless asked for: in half precision outputs differ from plain decoding's where "
        "two tokens are nearly tied. With float32 the head drafts in bfloat16 where the machine "
        "multiplies it natively, which changes no word",
        lambda value: [f"target.dtype={DTYPES[value]}"],
    ),
    Flag(
        "use_gpu",
        "number",
        "0",
        "a card where there is one",
        "which card; negative: the CPU",
        "",
        _device,
    ),
    Flag(
        "autoregression",
        "true or false",
        "false",
        "false",
        "decode without a drafter",
        "at the temperature asked for, not always greedy, and its tokens/s are told",
        _when_true("++drafter={use: none}"),
    ),
)

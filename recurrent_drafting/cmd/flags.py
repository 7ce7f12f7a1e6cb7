"""The published tool's command-line flags, converted to Hydra overrides.

Source: `recurrent_drafting/cmd/generate.py` of apple/ml-recurrent-drafter. Flags can be mixed with
Hydra overrides, which take precedence.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from decoding.errors import UserError
from jobs.syntax import expand_drafter, quoted
from serving.config import GenerateConfig

SETTINGS = {field.name for field in fields(GenerateConfig)}
ON_FILE = "--config-file"  # of jobs.job, for a saved configuration
TRUE, FALSE = ("true", "t", "1", "yes", "y"), ("false", "f", "0", "no", "n")
NUMBERS: dict[str, Callable[[str], float]] = {"a number": float, "a whole number": int}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _mt_bench(value: str) -> str:
    file = "mt_bench" if value.lower() in TRUE else quoted(value)
    return "" if value.lower() in FALSE else f"prompts={file}"


def _limit(flag: str, key: str, unlimited: str) -> Callable[[str], str]:
    """Return a function that converts a limit to an override; negative values become 0, no limit.

    It raises UserError for 0. unlimited: what a negative value means, for the message.
    """

    def override(value: str) -> str:
        if int(value) == 0:
            raise UserError(
                f"--{flag} is 0, expected 1 or more, or a negative number ({unlimited})."
            )
        return f"{key}={max(int(value), 0)}"

    return override


class Flag(NamedTuple):
    """One published flag."""

    name: str
    takes: str
    # the default here, and the published one
    default: str
    published: str
    # the override with {} for the value, or a function of the value that returns it; empty: none
    override: str | Callable[[str], str]
    help: str

    @property
    def is_switch(self) -> bool:
        """Whether the flag needs no value."""
        return self.takes.startswith("true")

    def override_of(self, value: str) -> str:
        """Return the override for a value. Raises UserError for an invalid value."""
        valid = bool(value)
        if self.takes in NUMBERS:
            try:
                NUMBERS[self.takes](value)
            except ValueError:
                valid = False
        elif self.name == "dtype":
            valid = value in DTYPES
        elif self.takes == "true or false":
            valid = value.lower() in TRUE + FALSE
        if not valid:
            raise UserError(f"--{self.name} is '{value}', expected {self.takes}")
        if callable(self.override):
            return self.override(value)
        if self.is_switch:
            return self.override if value.lower() in TRUE else ""
        return self.override.replace("{}", quoted(value) if self.takes == "text" else value)


# In the order of application: greedy_search overrides temperature, autoregression the drafter.
# fmt: off
FLAGS = (
    Flag("hf_tokenizer", "text", "the target's", "lmsys/vicuna-7b-v1.3", "tokenizer={}",
         "folder of the tokenizer, or a name on the Hub"),
    Flag("hf_llm", "text", "the embedded target", "lmsys/vicuna-7b-v1.3", "target.path={}",
         "folder of the target or its name on the Hub; its own chat template replaces Vicuna's"),
    Flag("hf_drafter", "text", "prompt_lookup", "(required)", "++drafter={use: {}}",
         "folder of a recurrent head or a language model, or a name in conf/drafter"),
    Flag("eval_mt_bench", "true, false or a file", "false", "false", _mt_bench,
         "answer MT-bench instead of chatting: both turns of every question, not the first alone; "
         "a file is read instead of the cache of `datasets`"),
    Flag("max_num_prompts", "a whole number", "all", "-1",
         _limit("max_num_prompts", "max_prompts", "all"),
         "number of prompts to answer; negative: all; having fewer prompts is not an error"),
    Flag("max_prompt_length", "a whole number", "the context", "50",
         _limit("max_prompt_length", "max_prompt_tokens", "as long as the context"),
         "longest prompt; counts tokens of the rendered prompt, not characters; longer ones are "
         "left out and counted; negative: as long as the context; it does not extend answers"),
    Flag("max_generation_length", "a whole number", "256", "60", "max_new_tokens={}",
         "most tokens of an answer, without its prompt; tokens after its end token are neither "
         "emitted nor counted"),
    Flag("beam_width", "a whole number", "10", "10", "beam_width={}",
         "largest number of beams of a recurrent head; by_cost=false fixes it"),
    Flag("beam_length", "a whole number", "5", "-1 (refused)",
         lambda value: "" if int(value) == -1 else f"beam_length={int(value)}",
         "most tokens of a beam, including the target's first one; -1 selects the default; "
         "by_cost=false fixes it"),
    Flag("temperature", "a number", "1.0", "1.0", "temperature={}",
         "temperature of sampling, which is lossless here"),
    Flag("greedy_search", "true or false", "false", "false", "temperature=0",
         "take the target's likeliest token; overrides --temperature"),
    Flag("rng_seed", "a whole number", "123", "123", "seed={}",
         "seed of sampling; samples differ from the published tool's; verify=coupled gives those "
         "of plain decoding"),
    Flag("batch_size", "a whole number", "1", "1", "batch_size={}",
         "prompts decoded together; the last batch may have fewer and is not dropped; finished "
         "rows cost nothing"),
    Flag("dtype", " | ".join(DTYPES), "fp32", "bf16", lambda value: f"target.dtype={DTYPES[value]}",
         "dtype of weights and activations; in half precision outputs differ from plain decoding's "
         "where two tokens nearly tie; with fp32 the head drafts in bfloat16 if the machine "
         "multiplies it natively, which changes no output"),
    Flag("use_gpu", "a whole number", "a GPU if there is one", "0",
         lambda value: f"target.device={'cpu' if int(value) < 0 else f'cuda:{int(value)}'}",
         "which GPU; negative: the CPU"),
    Flag("autoregression", "true or false", "false", "false", "++drafter={use: none}",
         "decode without a drafter, at the given temperature, and report its tokens/s"),
)
# fmt: on


def to_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line with every flag converted to a Hydra override.

    Overrides, -h, --help, -m and --multirun are kept. Raises UserError for an unknown flag, naming
    the nearest one, and for a missing or invalid value.
    """
    if ON_FILE in arguments[:1]:
        return list(arguments)
    flags = {flag.name: flag for flag in FLAGS}
    given: dict[str, str] = {}
    others: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word in ("-h", "--help", "-m", "--multirun"):
            others.append(expand_drafter(word))
            continue
        name, equals, value = word.lstrip("-").partition("=")
        flag, negated = flags.get(name), flags.get(name.removeprefix("no"))
        # --nogreedy_search
        if flag is None and negated is not None and negated.is_switch and not equals:
            given[negated.name] = ""
            continue
        if flag is None or not word.startswith("--"):
            if name not in flags and name.partition(".")[0] in SETTINGS:
                raise UserError(
                    f"'{word}' is a setting, not a flag. Use {name}={value or 'VALUE'} (--help "
                    f"lists both)"
                )
            near = get_close_matches(name, list(flags), n=1, cutoff=0.0)[0]
            raise UserError(f"flag '{word}' is unknown. The nearest is --{near}; --help lists all.")
        given[name] = flag.override_of(value if equals else _next_value(flag, rest))
    return [*(given[flag.name] for flag in FLAGS if given.get(flag.name)), *others]


def _next_value(flag: Flag, rest: list[str]) -> str:
    """Remove a flag's value from the rest of the command line and return it.

    Raises UserError if there is none and the flag needs one.
    """
    following = rest[0] if rest else None
    if flag.is_switch:
        # A word that is neither a flag nor an override can only be the file.
        takes_file = following is not None and "file" in flag.takes and "=" not in following
        if following is not None and (
            following.lower() in TRUE + FALSE or (takes_file and not following.startswith("-"))
        ):
            return rest.pop(0)
        return "true"
    if following is None or following.startswith("--"):
        examples = {"text": "FOLDER", **dict.fromkeys(NUMBERS, flag.published.split()[0])}
        raise UserError(
            f"--{flag.name} has no value, expected {flag.takes}, such as --{flag.name} "
            f"{examples.get(flag.takes, flag.takes.split()[0])}"
        )
    return rest.pop(0)


def print_flags(console: Console) -> None:
    """Print the flags with their defaults here and in the published tool."""
    console.print(
        "Flags of the published tool, as --flag VALUE or --flag=VALUE; flags of true or false need "
        "no value:"
    )
    for flag in FLAGS:
        other = "" if flag.default == flag.published else f" (published: {flag.published})"
        default = (f"  default {flag.default}{other}", "dim")
        console.print(Text.assemble((f"  --{flag.name}", "bold"), f" {flag.takes}", default))
        console.print(Padding(flag.help, (0, 0, 0, 6)))

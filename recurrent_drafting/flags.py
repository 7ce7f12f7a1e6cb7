"""The published tool's flags, by name: each becomes Hydra overrides, so that there is one path from the command line to the job.

Source: the flags of `recurrent_drafting/cmd/generate.py` of apple/ml-recurrent-drafter. They may stand beside Hydra overrides, which then
have the last word.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from rich.console import Console
from rich.table import Table

from decoding.errors import UserError

TRUE, FALSE = ("true", "t", "1", "yes", "y"), ("false", "f", "0", "no", "n")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ON_FILE = "--config-file"  # of training.job: what a saved configuration is run by


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


def quoted(value: str) -> str:
    """A text as Hydra's grammar takes any."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _key(key: str) -> Callable[[str], list[str]]:
    return lambda value: [f"{key}={value}"]


def _text(key: str) -> Callable[[str], list[str]]:
    return lambda value: [f"{key}={quoted(value)}"]


def _when_true(override: str) -> Callable[[str], list[str]]:
    return lambda value: [override] if _truth(value) else []


def _mt_bench(value: str) -> list[str]:
    if _is_truth(value):
        return ["prompts=mt_bench"] if _truth(value) else []
    return [f"prompts={quoted(value)}"]


def _device(value: str) -> list[str]:
    return [f"target.device={'cpu' if int(value) < 0 else f'cuda:{int(value)}'}"]


# In the order in which they are applied: greedy_search overrules temperature, autoregression the drafter.
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
        "a folder on this machine; its own chat template is used (template=vicuna for Vicuna's), not Vicuna's for all",
        _text("target.path"),
    ),
    Flag(
        "hf_drafter",
        "text",
        "(required)",
        "prompt_lookup",
        "folder of the recurrent head",
        "may also be the folder of a language model, or a name in conf/drafter",
        lambda value: [f"drafter={{use: {quoted(value)}}}"],
    ),
    Flag(
        "eval_mt_bench",
        "true, false or a file",
        "false",
        "false",
        "answer MT-bench instead of chatting",
        "both turns of every question, not the first alone; a file is read instead of the cache of `datasets`",
        _mt_bench,
    ),
    Flag(
        "max_num_prompts",
        "number",
        "-1",
        "all",
        "prompts to answer; negative: all",
        "fewer prompts than that are no error",
        lambda value: [f"max_prompts={max(int(value), 0)}"],
    ),
    Flag(
        "max_prompt_length",
        "number",
        "50",
        "the context",
        "longest prompt, in tokens; longer ones are left out and counted",
        "counts tokens of the rendered prompt, not characters, and adds nothing to what may be generated",
        lambda value: [f"max_prompt_tokens={max(int(value), 0)}"],
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
    Flag("temperature", "number", "1.0", "1.0", "of sampling", "sampling is lossless here", _key("temperature")),
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
        "float32 unless asked for: in half precision outputs differ from plain decoding's where two tokens are nearly tied",
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
        _when_true("drafter={use: none}"),
    ),
)


def to_overrides(arguments: Sequence[str]) -> list[str]:
    """The command line with every flag replaced by Hydra overrides; -h, --help, -m and --multirun stay as they are.

    Raises UserError for an unknown flag, with the nearest one, and for a value that a flag does not take.
    """
    if ON_FILE in arguments[:1]:
        return list(arguments)
    flags = {flag.name: flag for flag in FLAGS}
    given: dict[str, list[str]] = {}
    others: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word in ("-h", "--help", "-m", "--multirun"):
            others.append(_with_short_drafter(word))
            continue
        name, equals, value = word.lstrip("-").partition("=")
        flag, negated = flags.get(name), flags.get(name.removeprefix("no"))
        if flag is None and negated is not None and negated.is_switch and not equals:  # --nogreedy_search
            given[negated.name] = []
            continue
        if flag is None or not word.startswith("--"):
            near = get_close_matches(name, list(flags), n=1, cutoff=0.0)[0]
            raise UserError(f"unknown flag '{word}'; the nearest is --{near} (--help lists all)")
        if not equals:
            value = _next_value(flag, rest)
        given[name] = flag.overrides(_checked(flag, value))
    return [*(override for flag in FLAGS for override in given.get(flag.name, [])), *others]


def _next_value(flag: Flag, rest: list[str]) -> str:
    """The value that stands behind a flag, taken off the rest of the command line."""
    following = rest[0] if rest else None
    if flag.is_switch:
        takes_file = following is not None and "file" in flag.takes and following.endswith((".json", ".jsonl"))
        if following is not None and (_is_truth(following) or (takes_file and not following.startswith("-"))):
            return rest.pop(0)
        return "true"
    if following is None or following.startswith("--"):
        raise UserError(f"--{flag.name} has no value, expected {flag.takes}, such as --{flag.name} {_example(flag)}")
    return rest.pop(0)


def _example(flag: Flag) -> str:
    return {"text": "FOLDER", "number": flag.published.split()[0]}.get(flag.takes, flag.takes.split()[0])


def _checked(flag: Flag, value: str) -> str:
    """The value as it stands, if the flag takes it."""
    fine = bool(value)
    if flag.takes == "number":
        try:
            float(value) if flag.name == "temperature" else int(value)
        except ValueError:
            fine = False
    elif flag.name == "dtype":
        fine = value in DTYPES
    elif flag.is_switch and "file" not in flag.takes:
        fine = _is_truth(value)
    if not fine:
        raise UserError(f"--{flag.name} is '{value}', expected {flag.takes}")
    return value


def _is_truth(value: str) -> bool:
    return value.lower() in TRUE + FALSE


def _truth(value: str) -> bool:
    return value.lower() in TRUE


def _with_short_drafter(word: str) -> str:
    """`drafter=NAME` written out: conf/drafter is a group, and Hydra would look for a file of that name there."""
    key, equals, value = word.partition("=")
    if key in ("drafter", "+drafter", "++drafter") and equals and not value.startswith("{"):
        return f"drafter={{use: {quoted(value)}}}"
    return word


def print_flags(console: Console) -> None:
    """The flags with their defaults, and where their meaning differs from the published tool's."""
    console.print(
        "Flags of the published tool, as --flag VALUE or --flag=VALUE; those of true or false may stand alone:"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("  flag", "takes", "default (published)", "what it is; where it differs from the published tool"):
        table.add_column(title, overflow="fold")
    for flag in FLAGS:
        default = flag.here if flag.here == flag.published else f"{flag.here} ({flag.published})"
        differs = f"; differs: {flag.differs}" if flag.differs else ""
        table.add_row(f"  --{flag.name}", flag.takes, default, flag.meaning + differs)
    console.print(table)

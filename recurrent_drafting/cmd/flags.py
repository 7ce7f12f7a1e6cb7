"""The published tool's flags on the command line: each becomes Hydra overrides, so that there is
one path from the command line to the job.

They may stand beside Hydra overrides, which then have the last word.
"""

from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from decoding.errors import UserError
from recurrent_drafting.cmd.published_flags import DTYPES, FLAGS, Flag, is_truth, quoted
from serving.config import GenerateConfig

SETTINGS = {field.name for field in fields(GenerateConfig)}
ON_FILE = "--config-file"  # of jobs.job: what a saved configuration is run by


def to_overrides(arguments: Sequence[str]) -> list[str]:
    """The command line with every flag replaced by Hydra overrides; -h, --help, -m and --multirun
    stay as they are.

    Raises UserError for an unknown flag, with the nearest one, and for a value that a flag does not
    take.
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
        # --nogreedy_search
        if flag is None and negated is not None and negated.is_switch and not equals:
            given[negated.name] = []
            continue
        if flag is None or not word.startswith("--"):
            if name not in flags and name.partition(".")[0] in SETTINGS:
                raise UserError(
                    f"'{word}' is a setting, not a flag: give {name}={value or 'VALUE'} (--help "
                    f"lists both)"
                )
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
        # A word that is neither a flag nor an override can only be the file.
        takes_file = following is not None and "file" in flag.takes and "=" not in following
        if following is not None and (
            is_truth(following) or (takes_file and not following.startswith("-"))
        ):
            return rest.pop(0)
        return "true"
    if following is None or following.startswith("--"):
        raise UserError(
            f"--{flag.name} has no value, expected {flag.takes}, such as --{flag.name} "
            f"{_example(flag)}"
        )
    return rest.pop(0)


def _example(flag: Flag) -> str:
    return {"text": "FOLDER", "number": flag.published.split()[0]}.get(
        flag.takes, flag.takes.split()[0]
    )


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
        fine = is_truth(value)
    if not fine:
        raise UserError(f"--{flag.name} is '{value}', expected {flag.takes}")
    return value


def _with_short_drafter(word: str) -> str:
    """`drafter=NAME` written out: conf/drafter is a group, and Hydra would look for a file of that
    name there.

    Added by force (++), as the mapping takes whatever the drafter's class does.
    """
    key, equals, value = word.partition("=")
    key = key.lstrip("+")
    if not equals or (key != "drafter" and not key.startswith("drafter.")):
        return word
    if key == "drafter" and not value.startswith("{"):
        value = f"{{use: {quoted(value)}}}"
    return f"++{key}={value}"


def print_flags(console: Console) -> None:
    """The flags with their defaults, and where their meaning differs from the published tool's."""
    console.print(
        "Flags of the published tool, as --flag VALUE or --flag=VALUE; those of true or false may "
        "stand alone:"
    )
    for flag in FLAGS:
        default = (
            flag.here
            if flag.here == flag.published
            else f"{flag.here} (published: {flag.published})"
        )
        console.print(
            Text.assemble(
                (f"  --{flag.name}", "bold"), f" {flag.takes}", (f"  default {default}", "dim")
            )
        )
        differs = f"; differs: {flag.differs}" if flag.differs else ""
        console.print(Padding(flag.meaning + differs, (0, 0, 0, 6)))

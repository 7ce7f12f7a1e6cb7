"""Readable errors for overrides and configurations that Hydra rejects.

Hydra's messages use the terms of a grammar, lack the position and end with advice on stack traces.
"""

import re

from antlr4 import Token
from antlr4.error.Errors import LexerNoViableAltException, RecognitionException
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigKeyError

from decoding.errors import UserError

EXPECTED = (
    "Expected KEY=VALUE. VALUE is a word, a number, a list [a,b] or a mapping {a: 1, b: x}. Quote "
    "a value with spaces, commas, brackets or quotes, inside the quotes of the shell: "
    "'KEY=\"a, b\"'."
)
ENDS = "it is incomplete; a closing bracket or quote may be missing"
# flags without a value; any other flag may be followed by one
WITHOUT_VALUE = ("-m", "--multirun", "-h", "--help")


def quoted(value: str) -> str:
    """Quote a string for Hydra, where a backslash is literal except before a quote or the end."""
    doubled = re.sub(r"(\\+)('|$)", r"\1\1\2", value)
    return "'" + doubled.replace("'", "\\'") + "'"


def expand_drafter(word: str) -> str:
    """Expand `drafter=NAME` to a mapping, since Hydra would look for a file of the group.

    The override is forced (++), since the mapping accepts all options of the drafter's class.
    """
    key, equals, value = word.partition("=")
    key = key.lstrip("+")
    if not equals or (key != "drafter" and not key.startswith("drafter.")):
        return word
    if key == "drafter" and not value.startswith("{"):
        value = f"{{use: {quoted(value)}}}"
    return f"++{key}={value}"


def check_syntax(arguments: list[str]) -> None:
    """Raise UserError for an argument that is neither a flag nor a valid override."""
    parser = OverridesParser.create()
    for before, text in zip(["", *arguments], arguments, strict=False):
        if text.startswith("-") or (
            before.startswith("-") and "=" not in before and before not in WITHOUT_VALUE
        ):
            continue
        if "=" not in text and not text.startswith("~"):
            raise UserError(f"'{text}' is not a setting: it has no '='. {EXPECTED}")
        try:
            parser.parse_override(text)
        except HydraException as error:
            raise UserError(
                f"'{text}' cannot be read: {_place(text, error)}. {EXPECTED}"
            ) from error


def _place(text: str, error: HydraException) -> str:
    """Describe a syntax error in `text` and, if the parser reports it, its position."""
    cause, message = error.__cause__, " ".join(str(error).split())
    if isinstance(cause, LexerNoViableAltException):
        return (
            f"no value can begin with {text[cause.startIndex :]!r}, at character "
            f"{cause.startIndex + 1}"
        )
    if isinstance(cause, RecognitionException):
        token = cause.offendingToken
        return (
            ENDS
            if token.type == Token.EOF
            else f"{token.text!r} at character {token.start + 1} is unexpected"
        )
    # Errors from which the parser recovers (a missing or extra token) have no position.
    mended = re.fullmatch(r"(?:extraneous input|missing .+ at) '(.+?)'(?: expecting .+)?", message)
    if mended is None:
        return message
    return ENDS if mended[1] == "<EOF>" else f"{mended[1]!r} is unexpected"


def composition_error(error: Exception) -> UserError:
    """Return the error for overrides and files of conf/ that do not compose.

    error: the exception of Hydra, OmegaConf or YAML.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group = error.missing_cfg_file.rpartition("/")[0]
        return UserError(
            f"{error.missing_cfg_file.replace('/', '=')}: there is no "
            f"conf/{error.missing_cfg_file}.yaml. Set {group}= to one of "
            f"{', '.join(error.options)}"
        )
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        return UserError(
            f"unknown configuration key '{cause.full_key}', expected one of "
            f"{', '.join(map(str, cause.parent_node))}"
        )
    message = str(error) if error.__cause__ is None else f"{error} ({error.__cause__})"
    return UserError(
        f"the configuration does not compose: {' '.join(message.split())}. --help lists all keys"
    )

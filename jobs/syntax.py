"""Readable errors for overrides and configurations that Hydra rejects.

Hydra's own messages are those of a grammar, name no place and end in advice on stack traces.
"""

import re

from antlr4 import Token
from antlr4.error.Errors import LexerNoViableAltException, RecognitionException
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException

from decoding.errors import UserError

EXPECTED = (
    "Expected KEY=VALUE. VALUE is a word, a number, a list [a,b] or a mapping {a: 1, b: x}; one "
    "with spaces, commas, brackets or quotes of its own stands in quotes, inside those of the "
    "shell: 'KEY=\"a, b\"'."
)
ENDS = "it ends where more is expected, such as a closing bracket or quote"
# flags; behind any other one a word of its own may stand
WITHOUT_VALUE = ("-m", "--multirun", "-h", "--help")


def check_syntax(arguments: list[str]) -> None:
    """Raise UserError for an argument that is no override."""
    parser = OverridesParser.create()
    for before, text in zip(["", *arguments], arguments, strict=False):
        if text.startswith("-") or (
            before.startswith("-") and "=" not in before and before not in WITHOUT_VALUE
        ):
            continue
        if "=" not in text and not text.startswith("~"):
            raise UserError(f"'{text}' is no setting: it has no '='. {EXPECTED}")
        try:
            parser.parse_override(text)
        except HydraException as error:
            raise UserError(
                f"'{text}' cannot be read: {_place(text, error)}. {EXPECTED}"
            ) from error


def _place(text: str, error: HydraException) -> str:
    """Describe the syntax error and its position."""
    cause, said = error.__cause__, " ".join(str(error).split())
    if isinstance(cause, LexerNoViableAltException):
        return (
            f"nothing can begin with what stands at character {cause.startIndex + 1}, "
            f"{text[cause.startIndex :]!r}"
        )
    if isinstance(cause, RecognitionException):
        token = cause.offendingToken
        return (
            ENDS
            if token.type == Token.EOF
            else f"{token.text!r} at character {token.start + 1} is not expected there"
        )
    # What the grammar could mend by itself comes without a place: one token too many, or too few.
    mended = re.fullmatch(r"(?:extraneous input|missing .+ at) '(.+?)'(?: expecting .+)?", said)
    if mended is None:
        return said
    return ENDS if mended[1] == "<EOF>" else f"{mended[1]!r} is not expected where it stands"


def composition_error(error: Exception) -> UserError:
    """Return the error for conf/ and a command line that do not compose."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group = error.missing_cfg_file.rpartition("/")[0]
        return UserError(
            f"{error.missing_cfg_file.replace('/', '=')}: there is no "
            f"conf/{error.missing_cfg_file}.yaml; of {group} there are: {', '.join(error.options)}"
        )
    told = str(error) if error.__cause__ is None else f"{error} ({error.__cause__})"
    return UserError(
        f"the configuration cannot be put together: {' '.join(told.split())}. --help lists all "
        f"keys."
    )

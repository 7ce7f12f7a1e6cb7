"""Valid values of settings, in one table for `Settings`, the warpers, the jobs and the server.

A bool is neither an int nor a float here, and NaN and infinity are never valid.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decoding.errors import UserError

# noise is keyed by 64 bits, so a larger seed would repeat a smaller one
LARGEST_SEED = 2**64 - 1
# logits / temperature overflow float32 below COLDEST; temperature 0 is greedy decoding
COLDEST, HOTTEST = 1e-5, 1e5
LARGEST = 2**31 - 1  # the largest count
MAX_QUOTED = 60  # maximum characters of a value in a message


@dataclass(frozen=True)
class ValueRule:
    """A test of values, and a description of the values that pass it."""

    fits: Callable[[Any], bool]
    expected: str


def is_int(value: Any) -> bool:
    """Return whether the value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether the value is a finite int or float and not a bool."""
    if not (is_int(value) or isinstance(value, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def whole_number(least: int, most: int = LARGEST, note: str = "") -> ValueRule:
    """Return the rule for whole numbers from `least` to `most`.

    note: words that a message appends to the range, such as " (0 is off)".
    """
    return ValueRule(
        lambda value: is_int(value) and least <= value <= most,
        f"a whole number from {least} to {most}{note}",
    )


def number_where(fits: Callable[[float], bool], bounds: str) -> ValueRule:
    """Return the rule for finite numbers that `fits` accepts.

    bounds: the words that follow "a number" in a message, such as "from 0 to 1".
    """
    return ValueRule(lambda value: is_number(value) and fits(value), f"a number {bounds}")


def is_text(value: Any) -> bool:
    """Return whether the value is a string that UTF-8 can encode, without lone surrogates."""
    return isinstance(value, str) and lone_surrogate(value) is None


_SURROGATE = re.compile("[\ud800-\udfff]")


def lone_surrogate(text: str) -> int | None:
    """Return the index of the first lone surrogate (such as a cut emoji), None if there is none."""
    found = _SURROGATE.search(text)
    return None if found is None else found.start()


def is_text_list(value: Any) -> bool:
    """Return whether the value is a list or tuple of nonempty strings that pass `is_text`."""
    return isinstance(value, list | tuple) and all(is_text(one) and one for one in value)


def is_id_collection(value: Any) -> bool:
    """Return whether the value is a list, tuple or set of whole numbers of 0 or more."""
    return isinstance(value, list | tuple | set | frozenset) and all(
        is_int(one) and one >= 0 for one in value
    )


def optional(rule: ValueRule) -> ValueRule:
    """Return the rule that accepts None as well as the values of `rule`."""
    return ValueRule(lambda value: value is None or rule.fits(value), f"{rule.expected}, or None")


SWITCH = ValueRule(lambda value: isinstance(value, bool), "True or False")
FUNCTION = ValueRule(callable, "a function")

# name of a setting, in `Settings` and in the jobs' configurations -> its valid values
RULES: dict[str, ValueRule] = {
    "max_new_tokens": whole_number(1),
    "temperature": ValueRule(
        lambda value: is_number(value) and (value == 0 or COLDEST <= value <= HOTTEST),
        f"0 (greedy), or a number from {COLDEST:g} to {HOTTEST:g}",
    ),
    "top_k": whole_number(0, note=" (0 is off)"),
    "top_p": number_where(lambda value: 0 < value <= 1, "more than 0 and at most 1 (off)"),
    "min_p": number_where(lambda value: 0 <= value <= 1, "from 0 (off) to 1"),
    "num_draft_tokens": whole_number(0, note=" (0 is no drafting)"),
    "seed": whole_number(0, LARGEST_SEED),
    "stop_token_ids": ValueRule(
        is_id_collection, "a tuple of token ids, whole numbers of 0 or more"
    ),
    "stopping_threshold": optional(number_where(lambda value: 0 <= value <= 1, "from 0 to 1")),
    "repetition_penalty": number_where(
        lambda value: 0.01 <= value <= 100, "from 0.01 to 100 (1 is off)"
    ),
    "allowed": optional(FUNCTION),
    "stop_strings": ValueRule(is_text_list, "a tuple of nonempty strings"),
    "text_of": optional(FUNCTION),
    "ignore_eos": SWITCH,
    "stream": SWITCH,
    # of `load` and `load_target`
    "device": ValueRule(
        lambda value: (
            isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", value) is not None
        ),
        "auto, cpu, cuda or cuda:N",
    ),
    "max_length": optional(whole_number(2)),
    "processes": whole_number(0, 4096),
    "batch_size": optional(whole_number(1)),
    "trust_remote_code": SWITCH,
}


def check_value(name: str, value: Any, rule: ValueRule | None = None, key: str = "") -> None:
    """Raise UserError for a value that is invalid for this setting.

    rule: None takes the rule of this name in `RULES`. key: the setting's name in the message, if it
    is not `name`.
    """
    rule = rule or RULES[name]
    if not rule.fits(value):
        raise UserError(f"{key or name} is {quote(value)}, expected {rule.expected}.")


def check_values(values: Mapping[str, Any]) -> None:
    """Raise UserError for the first value that is invalid for the setting of its name."""
    for name, value in values.items():
        check_value(name, value)


def check_settings(config: Any, names: Sequence[str]) -> None:
    """Raise UserError for an invalid value in one of these fields of a job's configuration."""
    check_values({name: vars(config)[name] for name in names})


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raise UserError for a value that is not one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise UserError(f"{name} {quote(value)} is unknown, expected one of {', '.join(choices)}.")


def quote(value: Any) -> str:
    """Return the repr of a value for a message, cut to `MAX_QUOTED` characters."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        is_long = isinstance(value, int)
        text = f"a number of {value.bit_length()} bits" if is_long else f"a {type(value).__name__}"
    return _cut(text)


def quote_json(value: Any) -> str:
    """Return a value of a JSON text as JSON for a message, cut to `MAX_QUOTED` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "a value that is nested too deeply"
    return _cut(text.encode(errors="backslashreplace").decode())  # half a surrogate pair as \udXXX


def _cut(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."

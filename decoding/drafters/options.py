"""Valid values of drafters' options, in one table for the front door and the jobs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoding.values import (
    RULES,
    SWITCH,
    ValueRule,
    check_value,
    is_int,
    is_text,
    number_where,
    optional,
    whole_number,
)

MOST_NODES = 4096  # of a proposed tree; a forward pass over more has no use
MOST_TOKENS = 64  # of a phrase, an n-gram, or a path of a tree


def _is_layers(value: Any) -> bool:
    """Return whether the value is a list of layers' numbers."""
    return isinstance(value, list | tuple) and all(is_int(one) and one >= 0 for one in value)


def _is_choices(value: Any) -> bool:
    """Return whether the value is a nonempty list of paths of ranks."""
    return (
        isinstance(value, list | tuple)
        and 1 <= len(value) <= MOST_NODES
        and all(_is_layers(path) and len(path) <= MOST_TOKENS for path in value)
    )


def _is_branching(value: Any) -> bool:
    """Return whether the value is a list of numbers of children that make a tree of valid size."""
    if not _is_layers(value) or not 1 <= len(value) <= MOST_TOKENS or 0 in value:
        return False
    nodes, level = 0, 1
    for children in value:
        level *= children
        nodes += level
        if nodes > MOST_NODES:
            return False
    return True


_TEXT = ValueRule(lambda value: is_text(value) and value != "", "a nonempty string")
_NODES, _TOKENS = whole_number(1, MOST_NODES), whole_number(1, MOST_TOKENS)
_SHARE = number_where(lambda value: 0 <= value <= 1, "from 0 to 1")
_LAYERS = ValueRule(_is_layers, "a list of layers, such as [0, 3]")
_PATH = ValueRule(
    lambda value: isinstance(value, Path) or (is_text(value) and value != ""), "a path"
)

# name of an option, of every drafter that has it -> its valid values
OPTIONS: dict[str, ValueRule] = {
    # where and how a drafter runs
    "folder": _PATH,
    "name": optional(_TEXT),
    "backend": optional(_TEXT),
    "dtype": _TEXT,
    "device": RULES["device"],
    "execution": optional(_TEXT),
    "layout": optional(_TEXT),
    "trust_remote_code": SWITCH,
    "rule": ValueRule(
        lambda value: is_text(value) and value in ("tokens", "strings"), "'tokens' or 'strings'"
    ),
    "draft_cores": whole_number(0, 4096),
    # shapes of proposals
    "shape": _TEXT,
    "children": _TEXT,
    "by_cost": SWITCH,
    "max_nodes": _NODES,
    "frontier": _TOKENS,
    "beam_width": _NODES,
    "choices": optional(
        ValueRule(
            _is_choices,
            f"1 to {MOST_NODES} paths of at most {MOST_TOKENS} ranks >= 0, such as [[0, 0], [1]]",
        )
    ),
    "branching": ValueRule(
        _is_branching,
        f"numbers of children, each at least 1, such as [3, 2], with at most {MOST_NODES} nodes",
    ),
    "match": whole_number(0, MOST_TOKENS),
    "sibling_threshold": _SHARE,
    "leaf_threshold": _SHARE,
    "stop_below": _SHARE,
    # a folder has further bounds of these four
    "tokens": optional(whole_number(0)),
    "mask_token": optional(whole_number(0)),
    "slots": optional(whole_number(0)),
    "denoising_steps": optional(whole_number(0)),
    "one_forward": SWITCH,
    # lookups
    "max_ngram": _TOKENS,
    "min_ngram": _TOKENS,
    "min_match": whole_number(1),
    "ngram": whole_number(2, MOST_TOKENS),
    "columns": _TOKENS,
    "candidates": _TOKENS,
    "suffixes": whole_number(0, MOST_TOKENS),
    "from_text": SWITCH,
    # self-speculation
    "skips": optional(_PATH),
    "attention": _LAYERS,
    "mlp": _LAYERS,
}


def check_options(where: str, options: Mapping[str, Any]) -> None:
    """Raise UserError for the first option with an invalid value; other names are not checked.

    where: the beginning of the message.
    """
    for name, value in options.items():
        if name in OPTIONS:
            check_value(name, value, OPTIONS[name], f"{where}: {name}")

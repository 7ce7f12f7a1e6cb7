"""Names of earlier versions and their current names; each works for one release.

A command line is rewritten before Hydra composes, a configuration before it is checked.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from decoding.drafters.build import options_of
from decoding.drafters.registry import imported

# Modules of classes that a configuration names by `_target_`.
MODULES = {
    "decoding.chain": "decoding.drafters.chain",
    "decoding.graph": "decoding.drafters.trees.graph",
    "decoding.lookahead": "decoding.drafters.lookahead",
    "decoding.multi_candidate": "decoding.drafters.trees.multi_candidate",
    "decoding.ouroboros": "decoding.drafters.ouroboros",
    "decoding.prompt_lookup": "decoding.drafters.prompt_lookup",
    "decoding.self_speculation": "decoding.drafters.self_speculation",
    "decoding.static_tree": "decoding.drafters.trees.static",
    "decoding.trees": "decoding.drafters.trees.ranked",
    "decoding.with_lookup": "decoding.drafters.with_lookup",
    "decoding.worker": "decoding.drafters.remote",
    "training.drafters": "jobs.drafters",
}

# Keys of measured costs in JSON (decoding.interfaces.RoundCosts).
COSTS = {"beams": "frontier", "t_draft_by_beams_ms": "t_draft_by_frontier_ms"}

# Keys, and groups of conf/, of a job.
KEYS = {
    "distill.train": {"drafter": "student"},
    "distill.prune": {"drafter": "student"},
    "recurrent_drafting.generate": {"draws": "children"},
}

# Options of the drafters in decoding/drafters/registry.py.
OPTIONS = {"draws": "children"}

# Values of these keys and options, by today's name.
VALUES = {"children": {"drawn": "sampled", "picked": "top_k"}}


def current_costs(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return measured costs with today's keys."""
    return {COSTS.get(key, key): value for key, value in entry.items()}


def current_target(name: str) -> str:
    """Return today's dotted name of a class that `_target_` names."""
    module, _, leaf = name.rpartition(".")
    return f"{MODULES.get(module, module)}.{leaf}"


def current_arguments(job: str, arguments: Sequence[str]) -> list[str]:
    """Return a job's command line, or the overrides of its stage, with today's keys.

    Prints one note for each renamed key.
    """
    for old, new in OPTIONS.items():  # `typed` renames them, where no command line is left
        if any(re.match(rf"\+*drafters?\b.*\b{old}\s*[:=]", argument) for argument in arguments):
            _print_note(old, new)
    return [_current_override(job, argument, _print_note) for argument in arguments]


def current_config(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a configuration with today's keys.

    Keys of its drafters and of the overrides of its stages are renamed too.
    """
    job = str(saved.get("job"))
    found = _rename_keys(saved, KEYS.get(job, {}))
    if isinstance(found.get("drafters"), list):
        found["drafters"] = [_current_drafter(entry) for entry in found["drafters"]]
    if "drafter" in found:
        found["drafter"] = _current_drafter(found["drafter"])
    if isinstance(found.get("stage_overrides"), dict):
        found["stage_overrides"] = {
            stage: [
                _current_override(
                    str(stage).partition(":")[0], _rename_interpolations(job, text, "$")
                )
                for text in overrides
            ]
            for stage, overrides in found["stage_overrides"].items()
        }
    return found


def _current_drafter(entry: Any) -> Any:
    """Return an entry of `drafters=` with today's options.

    A class that still has an old option keeps it.
    """
    if not isinstance(entry, dict):
        return entry
    old = OPTIONS.keys() & entry.keys()
    if old and "_target_" in entry:
        try:
            taken = options_of(imported(current_target(str(entry["_target_"]))))
        except ImportError:  # jobs/drafters.py reports it
            return entry
        if taken is None or old & taken:
            return entry
    return _rename_keys(entry, OPTIONS)


def _rename_keys(values: Mapping[Any, Any], names: Mapping[str, str]) -> dict[Any, Any]:
    """Return a mapping with today's keys, and with today's values of the renamed ones."""
    return {
        names.get(key, key): _current_value(names[key], value) if key in names else value
        for key, value in values.items()
    }


def _current_value(key: str, value: Any) -> Any:
    return VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


def _current_override(
    job: str, argument: str, note: Callable[[str, str], None] = lambda old, new: None
) -> str:
    """Return an override with today's keys.

    note: called with the old and the new key.
    """
    match = re.match(r"(\+\+|\+|~)?([\w/]+)(?=[.=@])", argument)
    known = KEYS.get(job, {})
    if match and match[2] in known:
        key, rest = known[match[2]], argument[match.end() :]
        note(match[2], key)
        if rest.startswith("="):
            rest = "=" + ",".join(_current_value(key, value) for value in rest[1:].split(","))
        argument = f"{match[1] or ''}{key}{rest}"
    return _rename_interpolations(job, _rename_interpolations(job, argument, "$"), "@")


def _rename_interpolations(job: str, text: str, sign: str) -> str:
    """Return a text whose interpolations use today's keys of a job.

    sign: `$`, or `@` for a stage's own keys.
    """
    known = KEYS.get(job, {})
    pattern = re.escape(sign) + r"\{(\w+)(?=[.}])"
    return re.sub(pattern, lambda match: f"{sign}{{{known.get(match[1], match[1])}", text)


@cache
def _print_note(old: str, new: str) -> None:
    print(f"note: the key {old} is called {new} now; the old name works until the next release")

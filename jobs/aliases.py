"""Old names of keys, options and classes with their current names.

An old name works for one release. A command line is rewritten before Hydra composes it, a
configuration before it is checked.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from decoding.drafters.build import options_of
from decoding.drafters.registry import imported

# modules of the classes that a configuration names by `_target_`
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

# classes and functions whose name changed within their module
RENAMED = {"jobs.drafters.looked_up": "jobs.drafters.build_with_lookup"}

# keys of measured costs in JSON (decoding.interfaces.RoundCosts).
COSTS = {"beams": "frontier", "t_draft_by_beams_ms": "t_draft_by_frontier_ms"}

# job -> its keys and groups of conf/
KEYS = {
    "distill.train": {"drafter": "student"},
    "distill.prune": {"drafter": "student"},
    "recurrent_drafting.generate": {"draws": "children"},
}

# options of the drafters in decoding/drafters/registry.py.
OPTIONS = {"draws": "children"}

# current key or option -> its values
VALUES = {"children": {"drawn": "sampled", "picked": "top_k"}}

# job -> key -> its values
JOB_VALUES = {
    "heads.train": {
        "kind": dict.fromkeys(
            ("dflash", "dspark", "domino", "dflash2", "jetspec", "specdiff"), "block"
        )
    }
}


def current_costs(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return measured costs with the current keys."""
    return {COSTS.get(key, key): value for key, value in entry.items()}


def current_target(name: str) -> str:
    """Return the current dotted name of a class that `_target_` names."""
    module, _, leaf = name.rpartition(".")
    found = f"{MODULES.get(module, module)}.{leaf}"
    return RENAMED.get(found, found)


def current_arguments(job: str, arguments: Sequence[str]) -> list[str]:
    """Return the overrides of a job with the current keys; print a note for each renamed key.

    Options of drafters are only noted here; `current_config` renames them.
    """
    for old, new in {**OPTIONS, **KEYS.get(job, {})}.items():
        uses = re.compile(rf"[+~]*({old}[.=@]|drafters?\b.*\b{old}\s*[:=])")
        if any(map(uses.match, arguments)):
            _print_note(old, new)
    return [_current_override(job, argument) for argument in arguments]


def current_config(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a configuration with current names, also in its drafters and stage overrides."""
    job = str(saved.get("job"))
    found = _rename_keys(saved, KEYS.get(job, {}))
    for key, values in JOB_VALUES.get(job, {}).items():
        if key in found:
            found[key] = values.get(found[key], found[key])
    if isinstance(found.get("drafters"), list):
        found["drafters"] = [_current_drafter(entry) for entry in found["drafters"]]
    if "drafter" in found:
        found["drafter"] = _current_drafter(found["drafter"])
    if isinstance(found.get("stage_overrides"), dict):
        found["stage_overrides"] = {
            stage: [
                # `${key}` names a key of the experiment, whatever the job of the stage.
                _current_override(
                    str(stage).partition(":")[0], _rename_interpolations(job, text, "$")
                )
                for text in overrides
            ]
            for stage, overrides in found["stage_overrides"].items()
        }
    return found


def _current_drafter(entry: Any) -> Any:
    """Return an entry of `drafters=` with the current names of its options.

    An option keeps its name if the entry's class accepts it, or cannot be imported.
    """
    if not isinstance(entry, dict):
        return entry
    old = OPTIONS.keys() & entry.keys()
    if old and "_target_" in entry:
        try:
            accepted = options_of(imported(current_target(str(entry["_target_"]))))
        except ImportError:  # jobs/drafters.py reports it
            return entry
        if accepted is None or old & accepted:
            return entry
    return _rename_keys(entry, OPTIONS)


def _rename_keys(values: Mapping[Any, Any], names: Mapping[str, str]) -> dict[Any, Any]:
    """Return a mapping with its old keys renamed, and with the current values of these keys.

    names: old key -> current key.
    """
    return {
        names.get(key, key): _current_value(names[key], value) if key in names else value
        for key, value in values.items()
    }


def _current_value(key: str, value: Any) -> Any:
    return VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value


def _current_override(job: str, argument: str) -> str:
    names = KEYS.get(job, {})
    match = re.match(r"(\+\+|\+|~)?([\w/]+)(?=[.=@])", argument)
    if match and match[2] in names:
        key, rest = names[match[2]], argument[match.end() :]
        if rest.startswith("="):
            rest = "=" + ",".join(_current_value(key, value) for value in rest[1:].split(","))
        argument = f"{match[1] or ''}{key}{rest}"
    return _rename_interpolations(job, argument, "$@")


def _rename_interpolations(job: str, text: str, signs: str) -> str:
    """Rename a job's keys in interpolations.

    signs: characters that may begin an interpolation: `$` (`${key}`, a key of the experiment), `@`
    (`@{key}`, a key of the stage), or both.
    """
    names = KEYS.get(job, {})
    return re.sub(
        rf"([{signs}]\{{)(\w+)(?=[.}}])",
        lambda match: match[1] + names.get(match[2], match[2]),
        text,
    )


@cache
def _print_note(old: str, new: str) -> None:
    print(f"note: the key {old} is now called {new}; the old name works until the next release")

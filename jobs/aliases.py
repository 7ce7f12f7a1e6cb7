"""Names of earlier versions and what they are called now; each works for one release.

Three places hold such names: the command line, saved configurations (`jobs.saved_config`), and the
mappings in `drafters=`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

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
}


def current_costs(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return measured costs with today's keys."""
    return {COSTS.get(key, key): value for key, value in entry.items()}


def current_target(name: str) -> str:
    """Return today's dotted name of a class that `_target_` names."""
    module, _, leaf = name.rpartition(".")
    return f"{MODULES.get(module, module)}.{leaf}"


def current_arguments(job: str, arguments: Sequence[str]) -> list[str]:
    """Return a job's command line, or the overrides of its stage, with today's keys. Prints one
    note for each key that was renamed.
    """
    return [_current_override(job, argument, note=True) for argument in arguments]


def current_config(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a saved configuration with today's keys, in the overrides of its stages too."""
    job = str(saved.get("job"))
    found = {KEYS.get(job, {}).get(key, key): value for key, value in saved.items()}
    if isinstance(found.get("stage_overrides"), dict):
        found["stage_overrides"] = {
            stage: [
                _current_override(str(stage).partition(":")[0], _interpolated(job, text, "$"))
                for text in overrides
            ]
            for stage, overrides in found["stage_overrides"].items()
        }
    return found


def _current_override(job: str, argument: str, note: bool = False) -> str:
    """An override with today's key, and with today's keys where its value is another key's."""
    match = re.match(r"(\+\+|\+|~)?([\w/]+)(?=[.=@])", argument)
    known = KEYS.get(job, {})
    if match and match[2] in known:
        if note:
            _note(match[2], known[match[2]])
        argument = f"{match[1] or ''}{known[match[2]]}{argument[match.end() :]}"
    return _interpolated(job, _interpolated(job, argument, "$"), "@")


def _interpolated(job: str, text: str, sign: str) -> str:
    """A text whose interpolations name today's keys of a job. sign: `$` or, for the own keys of a
    stage, `@`.
    """
    known = KEYS.get(job, {})
    pattern = re.escape(sign) + r"\{(\w+)(?=[.}])"
    return re.sub(pattern, lambda match: f"{sign}{{{known.get(match[1], match[1])}", text)


@cache
def _note(old: str, new: str) -> None:
    print(f"note: the key {old} is called {new} now; the old name works until the next release")

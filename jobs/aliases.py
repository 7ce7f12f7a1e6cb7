"""Names of earlier versions and what they are called now; each works for one release."""

from collections.abc import Mapping
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


def current_costs(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return measured costs with today's keys."""
    return {COSTS.get(key, key): value for key, value in entry.items()}


def current_target(name: str) -> str:
    """Return today's dotted name of a class that `_target_` names."""
    module, _, leaf = name.rpartition(".")
    return f"{MODULES.get(module, module)}.{leaf}"

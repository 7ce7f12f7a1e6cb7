"""Names of earlier versions and what they are called now; each works for one release."""

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


def current_target(name: str) -> str:
    """Return today's dotted name of a class that `_target_` names."""
    module, _, leaf = name.rpartition(".")
    return f"{MODULES.get(module, module)}.{leaf}"

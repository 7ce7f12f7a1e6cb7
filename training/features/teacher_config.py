"""Settings of the teacher's cache and their rules."""

from dataclasses import dataclass

from training.losses.config import CROSS_ENTROPY, LossConfig, parts_of

NONE, SAMPLED, TOP_K = "none", "sampled", "top_k"
KINDS = (NONE, SAMPLED, TOP_K)


@dataclass
class TeacherConfig:
    """Cache of the teacher's distributions, with which training steps do not run the teacher."""

    # none | sampled (draws from the distribution: an unbiased gradient) | top_k (the likeliest
    # tokens, and one bucket for all others)
    cache: str = NONE
    # folder of the caches, whose size is printed before they are written
    folder: str = "runs/teacher"
    # cache=sampled: draws for each token
    draws: int = 64
    # cache=top_k: number of likeliest tokens
    top_k: int = 64


def cache_rules(
    config: TeacherConfig, loss: LossConfig, shared: bool, domains: bool, on_policy: bool
) -> dict[str, tuple[bool, str]]:
    """Return the rules of the settings: key -> (validity of its value, expected values).

    shared: whether ranks share the target's weights. domains: whether the data are a mixture.
    on_policy: whether the student writes rows.
    """
    fitting = {"forward_kl"} | ({CROSS_ENTROPY} if config.cache == SAMPLED else set())
    refused = ""
    if not {"forward_kl"} <= {*parts_of(loss)} <= fitting:
        refused = (
            "with this loss. A cache serves forward_kl and, with teacher.cache=sampled, mixtures "
            "of it with cross_entropy"
        )
    elif shared:
        refused = "where ranks share the target's weights (zero3, fsdp). Use parallel=ddp"
    elif domains:
        refused = "with data.domains, whose rows are not known before the training"
    elif on_policy:
        refused = "with on_policy.share, as the target has to score what the student writes"
    known = config.cache in KINDS
    return {
        "teacher.cache": (
            config.cache == NONE or (known and not refused),
            f"none {refused}" if known and refused else f"one of {', '.join(KINDS)}",
        ),
        "teacher.draws": (config.draws >= 1, "1 or more"),
        "teacher.top_k": (config.top_k >= 1, "1 or more"),
    }

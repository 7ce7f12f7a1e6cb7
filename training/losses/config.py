"""Settings of a drafter's loss and their rules, in a module that imports no Hydra packages."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf

CROSS_ENTROPY, MIXTURE = "cross_entropy", "mixture"
# losses against the target's distribution
TEACHER_LOSSES = (
    "forward_kl",
    "reverse_kl",
    "jsd",
    "skewed_kl",
    "skewed_reverse_kl",
    "tv",
    "lk",
    "lk_hybrid",
)
PARTS = (*TEACHER_LOSSES, CROSS_ENTROPY)
LOSSES = (*PARTS, MIXTURE)


@dataclass
class LossConfig:
    """Loss of a drafter on the target's distribution, on the text's tokens, or on both."""

    # against the target's distribution: forward_kl | reverse_kl | jsd | skewed_kl |
    # skewed_reverse_kl | tv (total variation) | lk (-log acceptance) | lk_hybrid; on the text:
    # cross_entropy; weighted sum of `parts`: mixture
    name: str = "forward_kl"
    # mixture: weights of losses, such as {forward_kl: 0.9, cross_entropy: 0.1}; others stay 0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    # serving temperature: divides the logits of drafter and target in losses against the target
    temperature: float = 1.0
    # divides the target's logits instead of `temperature`; null: `temperature`
    teacher_temperature: float | None = None
    # lk_hybrid: rate at which KL gives way to acceptance as acceptance grows
    lk_eta: float = 3.0
    # jsd: near 0 the gradient resembles forward_kl's, near 1 reverse_kl's
    jsd_beta: float = 0.5
    # skewed_kl, skewed_reverse_kl: share of the first distribution that is mixed into the second
    skew_alpha: float = 0.1


def parts_of(loss: LossConfig) -> dict[str, float]:
    """Return the losses that are summed, with their weights above 0."""
    if loss.name != MIXTURE:
        return {loss.name: 1.0}
    return {name: weight for name, weight in loss.parts.items() if weight > 0}


def uses_teacher(loss: LossConfig) -> bool:
    """Return whether the loss needs the target's distribution for every prediction."""
    return any(name in TEACHER_LOSSES for name in parts_of(loss))


def teacher_temperature(loss: LossConfig) -> float:
    """Return the temperature at which the target's distribution is taken."""
    return loss.temperature if loss.teacher_temperature is None else loss.teacher_temperature


def describe_loss(loss: LossConfig) -> str:
    """Return the name of a loss; of a mixture, its losses with their weights."""
    weighted = " + ".join(f"{weight:g} {name}" for name, weight in parts_of(loss).items())
    return weighted if loss.name == MIXTURE else loss.name


def loss_rules(
    loss: LossConfig, names: Sequence[str] = LOSSES, reason: str = ""
) -> dict[str, tuple[bool, str]]:
    """Return the rules of the settings: key -> (validity of its value, expected values).

    names: the losses that the job accepts. reason: words that follow them in a message.
    """
    wrong, softens, softer = _wrong_parts(loss), uses_teacher(loss), loss.teacher_temperature
    share = "a share above 0 and below 1"
    return {
        "loss.name": (loss.name in names, _one_of(loss.name, names, reason)),
        "loss.parts": (not wrong, wrong),
        "loss.temperature": (
            0 < loss.temperature < inf and (softens or loss.temperature == 1),
            "more than 0, and 1 for losses on tokens, which have no distribution to soften",
        ),
        "loss.teacher_temperature": (
            softer is None or (softens and 0 < softer < inf),
            "more than 0, and null for losses on tokens, which have no teacher",
        ),
        "loss.lk_eta": (0 <= loss.lk_eta < inf, "0 or more"),
        "loss.jsd_beta": (0 < loss.jsd_beta < 1, share),
        "loss.skew_alpha": (0 < loss.skew_alpha < 1, share),
    }


def _one_of(name: str, names: Sequence[str], reason: str = "") -> str:
    """Describe the accepted names, and the one nearest to an unknown name."""
    near = [] if name in LOSSES else get_close_matches(name, names, n=1)
    nearest = f"; the nearest is {near[0]}" if near else ""
    return f"one of {', '.join(names)}{reason}{nearest}"


def _wrong_parts(loss: LossConfig) -> str:
    """Return the expected value of invalid `parts`; "" if they are valid."""
    if loss.name != MIXTURE:
        return f"weights of 0, or loss.name={MIXTURE}" if any(loss.parts.values()) else ""
    for name in loss.parts:
        if name not in PARTS:
            return f"weights of losses; '{name}' is not {_one_of(name, PARTS)}"
    if not all(0 <= weight < inf for weight in loss.parts.values()):
        return "weights of 0 or more"
    if not uses_teacher(loss):
        return (
            "a weight above 0 for at least one loss against the target, such as "
            f"{{forward_kl: 0.9, {CROSS_ENTROPY}: 0.1}}; for the text alone loss={CROSS_ENTROPY}"
        )
    return ""

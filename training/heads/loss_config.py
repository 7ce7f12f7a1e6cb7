"""What the head's loss goes by. It stands by itself, so that a training step can be had without the
packages that compose configurations.
"""

from dataclasses import dataclass


@dataclass
class HeadLossConfig:
    """What every head's prediction is held against."""

    # cross_entropy: the text's tokens | continuations: the target's own behind each position (the
    # paper's distillation) | forward_kl | lk (-log acceptance) | lk_hybrid
    name: str = "cross_entropy"
    predict_n_tokens: int = 5  # heads: tokens behind the next one that are predicted
    decay: float = 1.0  # weight of a head's loss beside that of the head before it
    temperature: float = 1.0  # divides both sides' logits; the text's tokens are held against at 1
    lk_eta: float = 3.0  # lk_hybrid: how fast KL gives way to acceptance as that grows
    # training-time test: share of the drafts that go on from the head's own tokens
    own_tokens: float = 0.0


CONTINUATIONS = "continuations"


LOSSES = ("cross_entropy", CONTINUATIONS, "forward_kl", "lk", "lk_hybrid")


def judged(loss: HeadLossConfig) -> bool:
    """Whether a loss asks for the target's distribution of every prediction."""
    return loss.name not in ("cross_entropy", CONTINUATIONS)


def tokens_said(loss: HeadLossConfig) -> int:
    """Tokens that the target itself goes on with behind each position, for this loss: the first one
    is its own choice, no head's.
    """
    return loss.predict_n_tokens + 1 if loss.name == CONTINUATIONS else 0

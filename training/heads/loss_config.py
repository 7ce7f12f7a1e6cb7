"""Settings of the head's loss, in a module that imports no Hydra packages."""

from dataclasses import dataclass


@dataclass
class HeadLossConfig:
    """The labels or distributions that a head learns, and the weights of the losses."""

    # cross_entropy: the text's tokens | continuations: the target's greedy tokens at each position
    # (the paper's distillation) | forward_kl | lk (-log acceptance) | lk_hybrid
    name: str = "cross_entropy"
    # number of heads, which predict the tokens after the next one
    predict_n_tokens: int = 5
    # weight of a head's loss relative to the previous head's
    decay: float = 1.0
    # divides the logits of head and target; must be 1 for losses on tokens
    temperature: float = 1.0
    # lk_hybrid: rate at which KL gives way to acceptance as acceptance grows
    lk_eta: float = 3.0
    # training-time test: share of the drafts that continue from the head's own tokens
    own_tokens: float = 0.0


CONTINUATIONS = "continuations"


LOSSES = ("cross_entropy", CONTINUATIONS, "forward_kl", "lk", "lk_hybrid")


def uses_teacher(loss: HeadLossConfig) -> bool:
    """Return whether the loss needs the target's distribution for every prediction."""
    return loss.name not in ("cross_entropy", CONTINUATIONS)


def num_continued_tokens(loss: HeadLossConfig) -> int:
    """Return the number of tokens of the continuations that the loss needs; 0: it needs none.

    The first token of a continuation is the target's own choice, which no head predicts.
    """
    return loss.predict_n_tokens + 1 if loss.name == CONTINUATIONS else 0

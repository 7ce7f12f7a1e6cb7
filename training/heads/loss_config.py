"""Settings of the head's loss, in a module that imports no Hydra packages."""

from collections.abc import Sequence
from dataclasses import dataclass

from training.losses.config import LOSSES, LossConfig, describe_loss, loss_rules, uses_teacher

CONTINUATIONS = "continuations"
DECAY, D_PACE = "decay", "d_pace"
HEAD_LOSSES = (*LOSSES, CONTINUATIONS)


@dataclass
class HeadLossConfig(LossConfig):
    """The labels or distributions that a head learns, and the weights of the losses."""

    # against the target's distribution: forward_kl | reverse_kl | jsd | skewed_kl |
    # skewed_reverse_kl | tv | lk (-log acceptance) | lk_hybrid | cross_entropy: the text's tokens |
    # continuations: the target's greedy tokens at each position (the paper's distillation) |
    # weighted sum of `parts`: mixture
    name: str = "forward_kl"
    # number of heads, which predict the tokens after the next one
    predict_n_tokens: int = 5
    # weights of the heads' losses: decay | d_pace (from the chances of acceptance, in its place)
    depth_weights: str = "decay"
    # weight of a head's loss relative to the previous head's
    decay: float = 1.0
    # d_pace: smallest factor of a head's chance in the weights; 1: all heads count as accepted
    d_pace_alpha: float = 0.5
    # training-time test: share of the drafts that continue from the head's own tokens
    own_tokens: float = 0.0
    # share of a depth's drafts that train at the next depth too, sampled anew in each step, as in
    # P-EAGLE; 1: all
    depth_share: float = 1.0
    # smallest share of all drafts at any depth
    least_depth_share: float = 0.2
    # drafts of a row that train in a step, for heads that attend to the text; 0: all
    drafts_per_row: int = 0
    # head.correction of gru or markov: share of the uncorrected logits' loss in the first step; it
    # falls to 0 over the run
    base_weight: float = 0.0
    # head=eagle1: first depths at which the head trains; 0: all of predict_n_tokens
    train_depths: int = 0
    # head=eagle1: weight of the loss of tokens, which `name` selects, beside that of states
    token_weight: float = 1.0
    # head=eagle1: weight of the smooth L1 distance of predicted states from the target's
    state_weight: float = 0.0
    # head=eagle1: width of uniform noise on the states that the head reads in training, for texts
    # of 512 tokens; that of others is in inverse proportion to their tokens
    state_noise: float = 0.0


def head_loss_rules(
    loss: HeadLossConfig,
    names: Sequence[str],
    reason: str,
    max_length: int,
    reads_tokens: bool,
    reads_context: bool,
    predicts_states: bool = False,
) -> dict[str, tuple[bool, str]]:
    """Return the rules of the settings: key -> (validity of its value, expected values).

    names, reason: the losses that the job accepts, and words that follow them in a message.
    max_length: tokens of a row. reads_tokens, reads_context, predicts_states: see `HeadKind`.
    """
    alone = "no draft reads its own tokens"
    if reads_tokens and trained_depths(loss) == 1:
        reads_tokens, alone = False, "with loss.train_depths=1 no draft reads its own tokens"
    return {
        "loss.predict_n_tokens": (
            2 <= loss.predict_n_tokens <= max_length - 2,
            "2 or more, and at most data.max_length less 2",
        ),
        "loss.decay": (loss.decay > 0, "more than 0"),
        "loss.depth_weights": (
            loss.depth_weights in (DECAY, D_PACE),
            f"one of {DECAY}, {D_PACE}",
        ),
        "loss.d_pace_alpha": (0 <= loss.d_pace_alpha <= 1, "a share from 0 to 1"),
        "loss.own_tokens": (
            0 <= loss.own_tokens <= 1 and (reads_tokens or not loss.own_tokens),
            "a share from 0 to 1" if reads_tokens else f"0: {alone}",
        ),
        "loss.depth_share": (
            0 < loss.depth_share <= 1 and (reads_context or loss.depth_share == 1),
            "a share above 0 and at most 1"
            if reads_context
            else "1: this head trains at all depths",
        ),
        "loss.least_depth_share": (
            0 <= loss.least_depth_share <= 1,
            "a share from 0 to 1",
        ),
        "loss.drafts_per_row": (
            loss.drafts_per_row >= 0 and (reads_context or not loss.drafts_per_row),
            "1 or more, or 0 for all" if reads_context else "0: this head trains on all drafts",
        ),
        "loss.base_weight": (
            loss.base_weight == 0,
            "0 with this head, which has no head.correction of gru or markov",
        ),
        **_state_rules(loss, predicts_states),
        **loss_rules(loss, names, reason),
    }


def _state_rules(loss: HeadLossConfig, predicts_states: bool) -> dict[str, tuple[bool, str]]:
    """Return the rules of the settings of heads that predict the target's states."""
    if not predicts_states:
        why = "with this head, which predicts no state of the target"
        return {
            "loss.train_depths": (loss.train_depths == 0, f"0 {why}"),
            "loss.token_weight": (loss.token_weight == 1, f"1 {why}"),
            "loss.state_weight": (loss.state_weight == 0, f"0 {why}"),
            "loss.state_noise": (loss.state_noise == 0, f"0 {why}"),
        }
    continued = loss.name == CONTINUATIONS
    return {
        "loss.train_depths": (
            0 <= loss.train_depths <= loss.predict_n_tokens,
            "1 to loss.predict_n_tokens, or 0 for all depths",
        ),
        "loss.token_weight": (
            loss.token_weight >= 0 and loss.token_weight + loss.state_weight > 0,
            "0 or more, and more than 0 without loss.state_weight",
        ),
        "loss.state_weight": (
            loss.state_weight >= 0 and not (continued and loss.state_weight),
            f"0 with loss.name={CONTINUATIONS}, whose tokens are not those of the states"
            if continued
            else "0 or more",
        ),
        "loss.state_noise": (loss.state_noise >= 0, "0 or more"),
    }


def describe_head_loss(loss: HeadLossConfig) -> str:
    """Return the name of a loss, with the weights of its parts if it has several."""
    tokens = describe_loss(loss)
    if loss.base_weight:
        tokens += f", at first with the weight {loss.base_weight:g} of the uncorrected logits"
    if not loss.state_weight:
        return tokens
    return f"{loss.token_weight:g} {tokens} + {loss.state_weight:g} smooth L1 of states"


def trained_depths(loss: HeadLossConfig) -> int:
    """Return the number of first depths at which a head trains that predicts at all depths."""
    return loss.train_depths or loss.predict_n_tokens


def reads_final(loss: HeadLossConfig) -> bool:
    """Return whether the loss needs the target's state from which it predicts each token."""
    return loss.state_weight > 0 or uses_teacher(loss)


def depth_shares(loss: HeadLossConfig, depths: int) -> list[float]:
    """Return the share of all drafts that train at each depth."""
    return [max(loss.depth_share**depth, loss.least_depth_share) for depth in range(depths)]


def num_continued_tokens(loss: HeadLossConfig) -> int:
    """Return the number of tokens of the continuations that the loss needs; 0: it needs none.

    The first token of a continuation is the target's own choice, which no head predicts.
    """
    return loss.predict_n_tokens + 1 if loss.name == CONTINUATIONS else 0

"""Interface between a head's predictions and its objective and evaluation, without Hydra.

Shapes: R rows, T tokens of a row, M drafts, N predictions of all depths, P positions, K drafted
tokens, C channels of the states that a head reads, E features, V drafted vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from training.data.packing import PackedBatch
from training.features.states import TargetStates
from training.heads.candidates import Candidates, RestrictedOutputs
from training.heads.positions import Positions
from training.losses.chunked import Outputs, Weight
from training.losses.heads import chunked_argmax

# chooses a token of each draft, as indices [M] of the logits, from features [M, E], output weights
# [V, E] and the depth (from 0)
Choose = Callable[[Tensor, Weight, int], Tensor]


def choose_likeliest(features_ME: Tensor, weight_VE: Weight, depth: int) -> Tensor:
    """Return the index [M] of every row's largest logit."""
    return chunked_argmax(features_ME, weight_VE)


@dataclass(frozen=True)
class Context:
    """The text in which drafts start, for heads that attend to all its states."""

    batch: PackedBatch
    kept_P: Tensor  # places of all tokens in documents, in the flattened batch, rising
    states_PC: Tensor  # the target's states there
    # place of each tip; a tip that is the first token of its document has no states before it
    tips_M: Tensor

    def spread(self) -> Tensor:
        """Return the states [R, T, C] of all places, zero outside documents."""
        return spread(self.batch, self.kept_P, self.states_PC)


def spread(batch: PackedBatch, kept_P: Tensor, states_PC: Tensor) -> Tensor:
    """Return the states [R, T, C] of a batch's places from those at kept_P, zero elsewhere."""
    full_FC = states_PC.new_zeros(batch.ids_RT.numel(), states_PC.shape[1])
    return full_FC.index_copy(0, kept_P, states_PC).unflatten(0, batch.ids_RT.shape)


@dataclass(frozen=True)
class DraftStarts:
    """Starts of drafts: the tips, and the target's states of the tokens before them."""

    tokens_M: Tensor  # ids of the tips
    states_MC: Tensor  # the target's state of the token before each tip, or zeros
    context: Context | None = None  # for heads with `reads_context`


class PredictingHead(Protocol):
    """Predictions of one kind of head.

    A head is an nn.Module with the attribute `token_ids_V`: the ids [V] of its draft vocabulary,
    rising, or None (training/draft_vocabulary.py).
    """

    label: str  # prefix of a depth's figures: `{label}0_loss`
    # predictions depend on the target's states of all earlier tokens, which training then keeps
    reads_context: bool = False
    # the drafter computes the target's states of the tokens that it drafts, and a prediction reads
    # those of all tokens before the predicted one. Given the text, it is then the same at every
    # depth, so training predicts depth 0 only
    computes_states: bool = False
    # number of first depths at which the draft is the target's own prediction, which no training
    # changes
    target_depths: int = 0
    # predictions run the layers of `TargetStates.target`
    runs_target: bool = False
    # the features of a prediction are the target's next state after its final norm, as in EAGLE-1
    predicts_states: bool = False

    def outputs(self, head: Any, states: TargetStates) -> Sequence[Weight]:
        """Return the output layers [V, E]: a single one that all depths share, or one per depth.

        That of a head with a correction is a `SplitWeight`, whose frozen part is the target's.
        """
        ...

    def layer_per_depth(self, head: Any) -> bool:
        """Return whether `outputs` returns a layer for each depth, without building any."""
        return False

    def features(
        self,
        head: Any,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        """Return the inputs of the output layers for all predictions of a batch, [N, E].

        states_PC: the target's states at where.kept_P.
        """
        ...

    def candidates(self, head: Any) -> Candidates | None:
        """Return how the head restricts a prediction to its likeliest tokens; None: to no list.

        A head with candidates has a single output layer, a `SplitWeight`.
        """
        return None

    def corrects(self, head: Any) -> bool:
        """Return whether the trained part of a `SplitWeight` corrects the logits of the frozen one.

        A head with a correction has a single output layer. Its first features predict alone in the
        loss with `HeadLossConfig.base_weight`.
        """
        return False

    def random_masks(self, head: Any) -> bool:
        """Return whether the head learns to fill blocks some of whose slots have their tokens.

        It then reads `Positions.filled_MK`, and has `reads_context`.
        """
        return False

    def chance_logits(self, head: Any, features_NE: Tensor) -> Tensor | None:
        """Return the logits [N] of each prediction's chance of acceptance; None: not predicted."""
        return None

    def has_confidence(self, head: Any) -> bool:
        """Return whether `chance_logits` predicts chances that drafting reads as training does."""
        return False

    def other_layouts(self, head: Any) -> Mapping[str, Any]:
        """Return the head as other layouts of its slots read it, by their names in files."""
        return {}

    def draft(
        self,
        head: Any,
        states: TargetStates,
        tips: DraftStarts,
        count: int,
        choose: Choose = choose_likeliest,
    ) -> Tensor:
        """Return the ids [M, K] of the head's chain of `count` = K tokens after each tip.

        choose: by default the chain is greedy. A head with `computes_states` returns the chain up
        to its first token that differs from the text, and then what it predicts after the text's
        tokens.
        """
        ...


def output_layers(
    kind: PredictingHead, head: Any, states: TargetStates, where: Positions
) -> Outputs:
    """Return the output layers of a batch's predictions, with the logits that are drafted from."""
    weights, candidates = kind.outputs(head, states), kind.candidates(head)
    return RestrictedOutputs(weights, where.heads if len(weights) > 1 else None, candidates)


def count_depths(kind: PredictingHead, drafted: int) -> int:
    """Return the number of depths at which training predicts, for drafts of `drafted` tokens."""
    return 1 if kind.computes_states else drafted

"""The early-exit head as a kind of trained head (training/heads/kind.py).

The trained layer reads the target's states after layer N at all tokens up to a position, and
predicts the next token. In a draft, it reads the states of drafted tokens, which the target's first
layers compute. As long as a text continues as drafted, these are the text's own states, so the
prediction of a token is the same from whichever position the draft begins.

Shapes: R rows, T tokens of a row, N predictions, P positions, C = H the target's hidden size, M
drafts, K drafted tokens, V drafted vocabulary.
"""

import shlex
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.interfaces import Drafter
from decoding.models.native.linear import rms_norm
from heads.early_exit.checkpoint import LAYOUT, load_head, read_head_config
from heads.early_exit.config import EarlyExitOptions, EarlyExitTrainConfig
from heads.early_exit.drafter import EarlyExitDrafter
from heads.early_exit.model import EarlyExitConfig, EarlyExitHead
from heads.layers import rope_at, rope_tables
from jobs.paths import name_anywhere
from training.data.packing import PackedBatch
from training.features.states import TargetStates
from training.features.taps import Layers
from training.heads.checkpoint import FolderLayout
from training.heads.config import HeadJobConfig
from training.heads.kind import DraftingSetup, HeadKind, ReadmeParts
from training.heads.loss_config import DECAY
from training.heads.positions import Positions
from training.heads.predicting import Choose, DraftStarts, choose_likeliest, spread
from training.models.attention import inside_documents, packed_attention

LAST, RANDOM = "last", "random"


class EarlyExitKind(HeadKind):
    """Early-exit heads (EESD) as a kind of trained head."""

    name, label = "early_exit", "early_exit"
    reads_context, computes_states = True, True
    config: type[HeadJobConfig] = EarlyExitTrainConfig
    layout: FolderLayout = LAYOUT

    def outputs(self, head: EarlyExitHead, states: TargetStates) -> tuple[Tensor]:
        """Return the target's lm_head, or its rows of the draft vocabulary."""
        ids_V = head.token_ids_V
        return (states.lm_head if ids_V is None else states.lm_head[ids_V],)

    def features(
        self,
        head: EarlyExitHead,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        """Return the inputs [N, H] of the lm_head at the tokens before the predicted ones."""
        read_RTH = read_text(head, spread(batch, where.kept_P, states_PC), batch)
        places_N = where.kept_P[where.drafts_M[where.draft_N]] + 1 + where.head_N
        return read_RTH.flatten(0, 1).index_select(0, places_N)

    def draft(
        self,
        head: EarlyExitHead,
        states: TargetStates,
        tips: DraftStarts,
        count: int,
        choose: Choose = choose_likeliest,
    ) -> Tensor:
        """Return the chain after each tip, given the text: see `PredictingHead.draft`."""
        context = tips.context
        assert context is not None, "the trained layer reads the whole text"
        read_FH = read_text(head, context.spread(), context.batch).flatten(0, 1)
        read_FH = F.pad(read_FH, (0, 0, 0, count - 1))  # a tip may be the last token of the rows
        (weight_VH,) = self.outputs(head, states)
        drafted = [choose(read_FH[context.tips_M + k], weight_VH, k) for k in range(count)]
        ids_MK = torch.stack(drafted, dim=1)
        return ids_MK if head.token_ids_V is None else head.token_ids_V[ids_MK]

    def taps(self, shape: EarlyExitConfig) -> Layers:
        return (shape.exit_layer,)

    def cached_numbers(self, shape: EarlyExitConfig) -> int:
        return 2 * shape.num_kv_heads * shape.head_dim  # of the trained layer

    def shape(self, config: EarlyExitTrainConfig, target: Any) -> EarlyExitConfig:
        options = config.head
        return EarlyExitConfig.of_target(
            target.to_dict(), options.exit_layer, options.draft_vocab_size
        )

    def read_shape(self, folder: Path) -> EarlyExitConfig:
        return read_head_config(folder)

    def load(self, folder: Path) -> EarlyExitHead:
        return load_head(folder)

    def rules(
        self, config: EarlyExitTrainConfig, shape: EarlyExitConfig
    ) -> dict[str, tuple[bool, str]]:
        options, loss = config.head, config.loss
        deepest = shape.num_layers - 1
        alike = "because a token's prediction is the same at every depth"
        return {
            "head.exit_layer": (
                1 <= shape.exit_layer <= deepest,
                f"1 to {deepest}, fewer than the target's {shape.num_layers} layers",
            ),
            "head.start": (
                options.start in (LAST, RANDOM),
                f"one of {LAST}, {RANDOM}",
            ),
            "head.draft_vocab_size": (
                options.draft_vocab_size >= 0,
                "1 or more, or 0 for all tokens",
            ),
            "loss.decay": (loss.decay == 1, f"1, {alike}"),
            "loss.depth_weights": (loss.depth_weights == DECAY, f"{DECAY}, {alike}"),
        }

    def empty(self, shape: EarlyExitConfig) -> EarlyExitHead:
        return EarlyExitHead(shape)

    def initialize(
        self, head: EarlyExitHead, options: EarlyExitOptions, lm_head_VH: Tensor
    ) -> None:
        """Do nothing: the head starts from the target's layers, and has no output layer."""

    def start_from_target(
        self, head: EarlyExitHead, options: EarlyExitOptions, target: Any
    ) -> None:
        if options.start == LAST:
            head.copy_layer(target.model.layers[-1])
        with torch.no_grad():
            head.norm.copy_(target.model.norm.weight)

    def part_of(self, name: str, shape: EarlyExitConfig) -> str:
        return "norm" if name == "norm" else "layer"

    def describe(self, shape: EarlyExitConfig) -> str:
        return f"a layer and a norm after {shape.exit_layer} of the target's layers"

    def drafter(
        self,
        head: EarlyExitHead,
        shape: EarlyExitConfig,
        config: EarlyExitTrainConfig,
        sampled: bool,
    ) -> Drafter:
        return EarlyExitDrafter(head=head)

    def chain_drafter(self, head: EarlyExitHead) -> Drafter:
        return EarlyExitDrafter(head=head)

    def drafting(self, config: EarlyExitTrainConfig, shape: EarlyExitConfig) -> DraftingSetup:
        return DraftingSetup("with a chain", "chain_block_efficiency")

    def readme(self, card: dict[str, Any]) -> ReadmeParts:
        target = shlex.quote(name_anywhere(card["target"]))
        shape = EarlyExitConfig(**card["shape"])
        return ReadmeParts(
            tag="early-exit",
            title="An early-exit head (EESD, arXiv 2406.03853)",
            form=self.describe(shape),
            reads=f"hidden states after layer {shape.exit_layer}",
            layout=f"this project's own layout (model_type {LAYOUT.model_type})",
            launch=(
                f"python -m eval.run target.path={target} drafters=[.]",
                f"python -m eval.run target.path={target} drafters=[.] stopping=thompson_published",
            ),
            remarks=f"A draft runs the target's first {shape.exit_layer} layers on the target's "
            f"keys and values, then the head's layer and the target's lm_head. Servers do not read "
            f"this layout.",
        )


def read_text(head: EarlyExitHead, states_RTC: Tensor, batch: PackedBatch) -> Tensor:
    """Return the inputs [R, T, H] of the lm_head at all tokens of a batch, from the tapped states.

    A token attends to itself and to the earlier tokens of its document.
    """
    config, layer = head.config, head.layer()
    tables = rope_tables(
        config.rope, config.head_dim, config.max_positions, states_RTC.shape[1], states_RTC
    )
    projected = layer.project(config, states_RTC, *rope_at(tables, batch.positions_RT))
    query, key, value = (heads.transpose(1, 2) for heads in projected)
    mixed, _ = packed_attention(head, query, key, value, None, **inside_documents(head, batch))
    x_RTC = states_RTC + layer.out(mixed.flatten(2))
    x_RTC = x_RTC + layer.feed_forward(config, x_RTC)
    return rms_norm(x_RTC, head.norm, config.norm_eps)


KIND = EarlyExitKind()

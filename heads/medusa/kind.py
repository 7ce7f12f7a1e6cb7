"""Medusa's heads as a kind of trained head (training/heads/kind.py).

Shapes: M drafts, N predictions of all heads, P positions, K heads, H the target's hidden size, V
drafted vocabulary.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.interfaces import Drafter
from heads.medusa.checkpoint import load_heads
from heads.medusa.config import MedusaOptions, MedusaTrainConfig
from heads.medusa.drafter import MedusaDrafter
from heads.medusa.layouts import CONTRACT, VLLM, unreadable_in_vllm
from heads.medusa.model import MedusaConfig, MedusaHeads
from heads.rank_trees import RANKS
from jobs.paths import name_anywhere
from training.data.packing import PackedBatch
from training.features.states import TargetStates
from training.heads.checkpoint import FolderLayout
from training.heads.config import HeadJobConfig
from training.heads.kind import DraftingSetup, HeadKind, ReadmeParts
from training.heads.positions import Positions
from training.heads.predicting import Choose, DraftStarts, choose_likeliest
from training.heads.published import Contract

STARTS = ("lm_head", "random")
MOST_BLOCKS = 16


class MedusaKind(HeadKind):
    """Medusa heads as a kind of trained head."""

    name, label = "medusa", "medusa"
    ranks = RANKS  # number of ranks whose accuracies choose the trees
    config: type[HeadJobConfig] = MedusaTrainConfig
    layout: FolderLayout = VLLM
    contract: Contract | None = CONTRACT

    def outputs(self, head: MedusaHeads, states: TargetStates) -> Sequence[Tensor]:
        return [head.projection(k) for k in range(len(head.projections))]

    def layer_per_depth(self, head: MedusaHeads) -> bool:
        return len(head.projections) > 1

    def features(
        self,
        head: MedusaHeads,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        """Return the inputs (N, H) of the projections, which do not depend on drafted tokens."""
        states_MH = states_PC[where.drafts_M]
        of_head = [head.features(states_MH, k) for k in range(len(where.counts_K))]
        places_N = where.head_N * len(where.drafts_M) + where.draft_N
        return torch.cat(of_head).index_select(0, places_N)

    def draft(
        self,
        head: MedusaHeads,
        states: TargetStates,
        tips: DraftStarts,
        count: int,
        choose: Choose = choose_likeliest,
    ) -> Tensor:
        drafted = []
        for k in range(count):
            best_M = choose(head.features(tips.states_MC, k), head.projection(k), k)
            drafted.append(best_M if head.token_ids_V is None else head.token_ids_V[best_M])
        return torch.stack(drafted, dim=1)

    def shape(self, config: MedusaTrainConfig, target: Any) -> MedusaConfig:
        options = config.head
        return MedusaConfig(
            target.vocab_size,
            target.hidden_size,
            config.loss.predict_n_tokens,
            options.num_layers,
            options.shared,
            options.draft_vocab_size,
        )

    def read_shape(self, folder: Path) -> MedusaConfig:
        return self.load(folder).config

    def load(self, folder: Path) -> MedusaHeads:
        return load_heads(folder)

    def longest_draft(self, shape: MedusaConfig) -> int:
        return shape.num_heads

    def rules(self, config: MedusaTrainConfig, shape: MedusaConfig) -> dict[str, tuple[bool, str]]:
        heads = config.loss.predict_n_tokens
        return {
            "head.start": (config.head.start in STARTS, f"one of {', '.join(STARTS)}"),
            "head.path": (
                shape.num_heads == heads,
                f"a folder of {heads} heads (loss.predict_n_tokens), not {shape.num_heads}",
            ),
            "head.num_layers": (
                1 <= config.head.num_layers <= MOST_BLOCKS,
                f"1 to {MOST_BLOCKS} residual blocks",
            ),
            "head.draft_vocab_size": (
                config.head.draft_vocab_size >= 0,
                "1 or more, or 0 for all tokens",
            ),
        }

    def empty(self, shape: MedusaConfig) -> MedusaHeads:
        return MedusaHeads(shape)

    def initialize(self, head: MedusaHeads, options: MedusaOptions, lm_head_VH: Tensor) -> None:
        if options.start == "lm_head":
            head.start_from(lm_head_VH.float().cpu())

    def measured(self, shape: MedusaConfig, figures: Mapping[str, Any]) -> MedusaConfig:
        """Return the shape with each head's accuracies, from the best checkpoint's figures.

        The accuracy of a rank is the difference between two top-k accuracies. The shape is returned
        unchanged if a head has no figures.
        """
        rows = []
        for head in range(shape.num_heads):
            names = (f"accuracy/{self.label}{head}_top{rank + 1}" for rank in range(self.ranks))
            tops = [float(figures[name]) for name in names if name in figures]
            rows.append(
                tuple(max(0.0, high - low) for low, high in zip([0.0, *tops], tops, strict=False))
            )
        return replace(shape, accuracy=tuple(rows)) if all(rows) else shape

    def part_of(self, name: str, shape: MedusaConfig) -> str:
        return "output" if name.startswith("projections") else "blocks"

    def describe(self, shape: MedusaConfig) -> str:
        of = "one shared projection" if shape.shared else "a projection each"
        return f"{shape.num_heads} heads of {shape.num_layers} residual blocks with {of}"

    def drafter(
        self, head: MedusaHeads, shape: MedusaConfig, config: MedusaTrainConfig, sampled: bool
    ) -> Drafter:
        """Return a drafter of the largest tree for the measured accuracies in `shape`."""
        head.config = shape
        return MedusaDrafter(heads=head, children="sampled" if sampled else "top_k")

    def chain_drafter(self, head: MedusaHeads) -> Drafter:
        return MedusaDrafter(heads=head, shape="chain", children="top_k")

    def drafting(self, config: MedusaTrainConfig, shape: MedusaConfig) -> DraftingSetup:
        return DraftingSetup("with a static tree", "tree_block_efficiency")

    def readme(self, card: dict[str, Any]) -> ReadmeParts:
        target, shape = shlex.quote(name_anywhere(card["target"])), MedusaConfig(**card["shape"])
        served = CONTRACT.servers[0].launch_of(target, VLLM.name, shape)
        return ReadmeParts(
            tag="medusa",
            title="Medusa heads (Medusa-1, arXiv 2401.10774)",
            form=self.describe(shape),
            reads="last hidden state",
            layout="vLLM's layout (model_type medusa)",
            launch=[
                f"python -m eval.run target.path={target} drafters=[.]",
                *([served.command] if served else []),
            ],
            remarks="The tree is chosen from the measured accuracies (`medusa_accuracy` in "
            "config.json) and by the measured costs of a round. "
            + (
                "vLLM drafts a chain of best tokens."
                if served
                else f"vLLM does not load the heads: {unreadable_in_vllm(shape)}."
            ),
        )


KIND = MedusaKind()

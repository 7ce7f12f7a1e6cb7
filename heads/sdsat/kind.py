"""SDSAT's slots as a kind of trained head (training/heads/kind.py)."""

import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.interfaces import Drafter
from heads.sdsat.checkpoint import LAYOUT, load_head, read_head_config
from heads.sdsat.config import SdsatOptions, SdsatTrainConfig
from heads.sdsat.drafter import SdsatDrafter
from heads.sdsat.model import LowRank, SdsatConfig, SdsatHead
from heads.sdsat.predictions import SdsatPredictions
from jobs.paths import name_anywhere
from training.features.taps import Layers
from training.heads.checkpoint import FolderLayout
from training.heads.config import HeadJobConfig
from training.heads.kind import DraftingSetup, HeadKind, ReadmeParts

LEAST_LAYERS, MOST_RANK = 2, 4096


class SdsatKind(SdsatPredictions, HeadKind):
    """Slot embeddings (SDSAT) as a kind of trained head."""

    name = "sdsat"
    config: type[HeadJobConfig] = SdsatTrainConfig
    layout: FolderLayout = LAYOUT

    def taps(self, shape: SdsatConfig) -> Layers:
        """Return the states that enter each layer but the first, which reads the embeddings."""
        return tuple(range(1, shape.target_layers))

    def longest_draft(self, shape: SdsatConfig) -> int:
        return shape.num_drafts

    def shape(self, config: SdsatTrainConfig, target: Any) -> SdsatConfig:
        slots = config.loss.predict_n_tokens - 1
        return SdsatConfig.of_target(target.to_dict(), slots, config.head.rank)

    def read_shape(self, folder: Path) -> SdsatConfig:
        return read_head_config(folder)

    def load(self, folder: Path) -> SdsatHead:
        return load_head(folder)

    def rules(self, config: SdsatTrainConfig, shape: SdsatConfig) -> dict[str, tuple[bool, str]]:
        drafted, path = config.loss.predict_n_tokens, config.head.path
        return {
            "target.path": (
                shape.target_layers >= LEAST_LAYERS,
                f"a target of {LEAST_LAYERS} layers or more",
            ),
            "head.rank": (0 <= config.head.rank <= MOST_RANK, f"0 (none) to {MOST_RANK}"),
            "head.path": (
                not path or drafted <= shape.num_drafts,
                f"{drafted - 1} slots for loss.predict_n_tokens={drafted}, found {shape.num_slots}",
            ),
        }

    def empty(self, shape: SdsatConfig) -> SdsatHead:
        return SdsatHead(shape)

    def initialize(self, head: SdsatHead, options: SdsatOptions, lm_head_VH: Tensor) -> None:
        """Start without a change to the target's products."""
        with torch.no_grad():
            for module in head.modules():
                if isinstance(module, LowRank):
                    module.up.weight.zero_()

    def start_from_target(self, head: SdsatHead, options: SdsatOptions, target: Any) -> None:
        """Start every slot from the mean of the target's embeddings."""
        with torch.no_grad():
            head.slots.copy_(target.get_input_embeddings().weight.float().mean(0))

    def part_of(self, name: str, shape: SdsatConfig) -> str:
        return "slots" if name == "slots" else "low rank"

    def describe(self, shape: SdsatConfig) -> str:
        change = f", and a change of rank {shape.rank} to the target's layers at their rows"
        return f"{shape.num_slots} slot embeddings" + (change if shape.rank else "")

    def drafter(
        self, head: SdsatHead, shape: SdsatConfig, config: SdsatTrainConfig, sampled: bool
    ) -> Drafter:
        return SdsatDrafter(head=head)

    def chain_drafter(self, head: SdsatHead) -> Drafter:
        return SdsatDrafter(head=head)

    def drafting(self, config: SdsatTrainConfig, shape: SdsatConfig) -> DraftingSetup:
        return DraftingSetup("with a chain", "chain_block_efficiency")

    def readme(self, card: dict[str, Any]) -> ReadmeParts:
        target = shlex.quote(name_anywhere(card["target"]))
        shape = SdsatConfig(**card["shape"])
        return ReadmeParts(
            tag="sdsat",
            title="Slot embeddings (SDSAT, arXiv 2403.18647)",
            form=self.describe(shape),
            reads="keys and values of all layers",
            layout=f"this project's own layout (model_type {LAYOUT.model_type})",
            launch=(f"python -m eval.run target.path={target} drafters=[.]",),
            remarks="A draft is a forward of the target over the last token and the slots, and a "
            "second forward verifies it. Servers do not read this layout.",
        )


KIND = SdsatKind()

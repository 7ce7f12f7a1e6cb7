"""Block drafters as a kind of trained heads (training/heads/kind.py).

Published drafters are presets of it: files in conf/head that differ only in their values.
"""

import copy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from decoding.interfaces import Drafter
from decoding.models.native.weights import NativeConfig
from heads.block.checkpoint import load_head
from heads.block.config import BlockOptions, BlockTrainConfig
from heads.block.drafter import BlockDrafter
from heads.block.layouts import SERVED
from heads.block.model import BlockHead
from heads.block.predictions import BlockPredictions
from heads.block.read_config import names_layout, read_head_config
from heads.block.servers import CONTRACT
from heads.block.shape import (
    CORRECTIONS,
    EMBEDDING,
    FC,
    FILL_IN,
    FUSIONS,
    GRU,
    LAYOUTS,
    MARKOV,
    MASKS,
    NONE,
    SELECTOR,
    BlockConfig,
    spread_taps,
)
from jobs.paths import name_anywhere
from training.features.taps import Layers
from training.heads.build import mask_token_of
from training.heads.checkpoint import FolderLayout
from training.heads.config import HeadJobConfig
from training.heads.kind import DraftingSetup, HeadKind, ReadmeParts
from training.heads.loss_config import DECAY
from training.heads.published import Contract
from training.heads.temperatures import read_temperatures

MOST_LAYERS, MOST_RANK = 16, 4096
# name of a published drafter -> title of a README
TITLES = {
    "dflash": "A block drafter (DFlash, arXiv 2602.06036)",
    "dspark": "A block drafter with a Markov head (DSpark, arXiv 2607.05147)",
    "domino": "A block drafter with a GRU (Domino, arXiv 2605.29707)",
    "dflash2": "A block drafter with a selector (DFlash2, z-lab 2026)",
    "specdiff": "A masked diffusion drafter (SpecDiff, arXiv 2408.05636)",
    "jetspec": "A causal block drafter (JetSpec, arXiv 2606.18394)",
}


class BlockKind(BlockPredictions, HeadKind):
    """Block drafters as a kind of trained head."""

    name = "block"
    config: type[HeadJobConfig] = BlockTrainConfig
    layout: FolderLayout = SERVED
    contract: Contract | None = CONTRACT
    _assumed: str | None = None  # layout of folders without one

    def shape(self, config: BlockTrainConfig, target: Any) -> BlockConfig:
        options, sizes = config.head, NativeConfig.from_dict(target.to_dict())
        return BlockConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            target_layers=sizes.num_layers,
            taps=tuple(options.taps) or spread_taps(options.num_taps, sizes.num_layers),
            block_size=config.loss.predict_n_tokens + (options.layout == FILL_IN),
            mask_token_id=mask_token_of(config, options.mask_token_id, target),
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            intermediate_size=sizes.intermediate_size,
            num_layers=options.num_layers,
            layout=options.layout,
            in_block_mask=options.in_block_mask,
            fusion=options.fusion,
            correction=options.correction,
            rank=0 if options.correction == NONE else options.rank,
            gru_size=options.gru_size if options.correction == GRU else 0,
            candidates=options.candidates if options.correction == SELECTOR else 0,
            denoising_steps=options.denoising_steps,
            conv_taps=options.conv_taps,
            conv_group=options.conv_group if options.conv_taps else 0,
            confidence=options.confidence,
            norm_eps=sizes.norm_eps,
            rope_theta=float(sizes.rope["rope_theta"]),
            draft_vocab_size=options.draft_vocab_size,
        )

    def read_shape(self, folder: Path) -> BlockConfig:
        return read_head_config(folder, self._assumed)

    def load(self, folder: Path) -> BlockHead:
        return load_head(folder, layout=self._assumed)

    def assume(self, layout: str | None = None, target_layers: int = 0) -> HeadKind:
        kind = copy.copy(self)
        kind._assumed = layout
        return kind

    def open_layouts(self, folder: Path) -> Sequence[str]:
        return () if names_layout(folder) else LAYOUTS

    def taps(self, shape: BlockConfig) -> Layers:
        return shape.taps

    def reads_tokens(self, shape: BlockConfig) -> bool:
        return shape.correction != NONE

    def mask_token(self, shape: BlockConfig) -> int:
        return shape.mask_token_id

    def longest_draft(self, shape: BlockConfig) -> int:
        return shape.num_drafts

    def cached_numbers(self, shape: BlockConfig) -> int:
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim

    def rules(self, config: BlockTrainConfig, shape: BlockConfig) -> dict[str, tuple[bool, str]]:
        options, last = config.head, shape.target_layers - 1
        drafts = config.loss.predict_n_tokens
        taps_fit = all(EMBEDDING <= tap <= last for tap in shape.taps)
        return {
            "head.layout": (options.layout in LAYOUTS, f"one of {', '.join(LAYOUTS)}"),
            "head.in_block_mask": (options.in_block_mask in MASKS, f"one of {', '.join(MASKS)}"),
            "head.fusion": (options.fusion in FUSIONS, f"one of {', '.join(FUSIONS)}"),
            "head.correction": (
                options.correction in CORRECTIONS,
                f"one of {', '.join(CORRECTIONS)}",
            ),
            "head.rank": (1 <= options.rank <= MOST_RANK, f"1 to {MOST_RANK}"),
            "head.gru_size": (1 <= options.gru_size <= MOST_RANK, f"1 to {MOST_RANK}"),
            "head.candidates": (
                2 <= options.candidates <= shape.num_drafted,
                f"2 to {shape.num_drafted}, the number of drafted tokens",
            ),
            "head.conv_taps": (
                0 <= options.conv_taps <= shape.block_size,
                f"1 to {shape.block_size}, the slots of a block, or 0 for no convolution",
            ),
            "head.conv_group": (
                options.conv_group >= 1
                and not (options.conv_taps and shape.hidden_size % options.conv_group),
                f"a divisor of {shape.hidden_size}, the target's hidden size",
            ),
            **_denoising_rules(config, shape),
            **_base_rules(config, shape),
            "head.num_layers": (1 <= options.num_layers <= MOST_LAYERS, f"1 to {MOST_LAYERS}"),
            "head.num_taps": (options.num_taps >= 1, "1 or more"),
            "head.taps": (
                taps_fit and len(set(shape.taps)) == len(shape.taps),
                f"different layers of the target from {EMBEDDING} to {last}",
            ),
            "head.draft_vocab_size": (
                options.draft_vocab_size >= 0,
                "1 or more, or 0 for all tokens",
            ),
            "head.path": (
                shape.num_drafts == drafts,
                f"a folder whose block drafts {drafts} tokens (loss.predict_n_tokens), not "
                f"{shape.num_drafts}",
            ),
        }

    def empty(self, shape: BlockConfig) -> BlockHead:
        return BlockHead(shape)

    def initialize(self, head: BlockHead, options: BlockOptions, lm_head_VH: Tensor) -> None:
        """Do nothing: the layers start at random, and a correction without effect."""

    def part_of(self, name: str, shape: BlockConfig) -> str:
        parts = dict.fromkeys(("fc", "hidden_norm", "fusion"), "fusion")
        parts |= {"correction": "correction", "confidence": "correction"}
        return parts.get(name.partition(".")[0], "layers")

    def describe(self, shape: BlockConfig) -> str:
        corrected = "" if shape.correction == NONE else f", {shape.correction} correction"
        if shape.fusion != FC:
            corrected += f", fusion {shape.fusion}"
        if shape.conv_taps:
            corrected += f", convolution of {shape.conv_taps} slots"
        if shape.denoising_steps:
            corrected += f", {shape.denoising_steps} denoising steps"
        reads = f"target layers {', '.join(map(str, shape.taps))}"
        if shape.taps == (EMBEDDING,):
            reads = "embedded tokens in place of target layers"
        return (
            f"blocks of {shape.block_size} slots ({shape.layout}, {shape.in_block_mask}), "
            f"{shape.num_layers} layers, {reads}, mask token {shape.mask_token_id}{corrected}"
        )

    def measured(self, shape: BlockConfig, figures: Mapping[str, Any]) -> BlockConfig:
        """Return the shape with the fitted temperatures of the confidence, if figures have them."""
        found = read_temperatures(figures)
        return replace(shape, temperatures=found) if found else shape

    def drafter(
        self, head: BlockHead, shape: BlockConfig, config: BlockTrainConfig, sampled: bool
    ) -> Drafter:
        shape_drafted = "tree" if _drafts_trees(shape) else "chain"
        children = "sampled" if sampled else "top_k"
        return BlockDrafter(head=head, shape=shape_drafted, children=children)

    def chain_drafter(self, head: BlockHead) -> Drafter:
        return BlockDrafter(head=head, children="top_k")

    def drafting(self, config: BlockTrainConfig, shape: BlockConfig) -> DraftingSetup:
        if _drafts_trees(shape):
            return DraftingSetup("of a tree", "tree_block_efficiency")
        return DraftingSetup("of a chain", "chain_block_efficiency")

    def readme(self, card: dict[str, Any]) -> ReadmeParts:
        target = shlex.quote(name_anywhere(card["target"]))
        shape = BlockConfig(**{**card["shape"], "taps": tuple(card["shape"]["taps"])})
        drafter = "{use: block, folder: ., shape: tree}" if _drafts_trees(shape) else "."
        launch = [f'python -m eval.run target.path={target} "drafters=[{drafter}]"']
        passes = "One pass drafts" if shape.denoising_steps < 2 else "A few passes draft"
        remarks = (
            f"{passes} a whole block. `shape=tree` drafts a tree of the likeliest "
            "tokens from it, for heads without a correction."
        )
        if shape.is_dflash and not shape.draft_vocab_size:
            served = CONTRACT.servers[0].launch_of(target, SERVED.name, shape)
            launch += [served.command] if served else []
            remarks += " vLLM drafts a chain."
        return ReadmeParts(
            tag=_family(shape),
            title=TITLES[_family(shape)],
            form=self.describe(shape),
            reads="embedding and lm_head"
            if shape.taps == (EMBEDDING,)
            else f"hidden states after {len(shape.taps)} of its layers, embedding and lm_head",
            layout="the published layout of DFlash (config.json with dflash_config, and "
            "model.safetensors), with the layout of the block (sample_from_anchor)",
            launch=launch,
            remarks=remarks,
        )


def _drafts_trees(shape: BlockConfig) -> bool:
    """Return whether a head is measured by trees, as JetSpec's are."""
    return shape.correction == NONE and shape.causal


def _family(shape: BlockConfig) -> str:
    """Return the name of the published drafter that is nearest to a shape."""
    if shape.denoising_steps:
        return "specdiff"
    return "jetspec" if _drafts_trees(shape) else shape.projector


def _denoising_rules(config: BlockTrainConfig, shape: BlockConfig) -> dict[str, tuple[bool, str]]:
    """Return the rules of training with random masks: see `HeadKind.rules`."""
    steps, plain = config.head.denoising_steps, shape.layout == FILL_IN
    plain = plain and shape.correction == NONE
    rules = {
        "head.denoising_steps": (
            steps == 0 or (plain and 1 <= steps <= shape.num_drafts),
            f"1 to {shape.num_drafts}, the number of drafted tokens, or 0 for masks alone"
            if plain
            else f"0 with head.layout={shape.layout} and head.correction={shape.correction}",
        )
    }
    if steps:
        rules["loss.depth_weights"] = (
            config.loss.depth_weights == DECAY,
            f"{DECAY} with head.denoising_steps, whose masks have weights of their own",
        )
    return rules


def _base_rules(config: BlockTrainConfig, shape: BlockConfig) -> dict[str, tuple[bool, str]]:
    """Return the rule of the loss of uncorrected logits, for heads that correct them all."""
    if shape.correction not in (GRU, MARKOV):
        return {}
    return {"loss.base_weight": (0 <= config.loss.base_weight <= 1, "a share from 0 to 1")}


KIND = BlockKind()

"""Rows of block drafters."""

from typing import Any

import torch

from heads.block.drafter import BlockDrafter
from tests.decoding.row_kinds.kit import DrafterRow
from tests.support.block_heads import (
    LAW_3_SIZES,
    block_of,
    corrected_block,
    gru_block,
    random_block,
    selecting_block,
    unsure_block,
)

DIFFUSION: dict[str, Any] = {"taps": (0,), "denoising_steps": 3}
TWO_PASSES = DIFFUSION | {"denoising_steps": 2}  # as in the preset
ROWS = [
    DrafterRow(
        "dflash",
        make=lambda kit: BlockDrafter(head=block_of(kit.target, kit.draft_model)),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(head=random_block(LAW_3_SIZES, 2.0)),
        slow=True,
    ),
    DrafterRow(
        "dspark",
        make=lambda kit: BlockDrafter(head=corrected_block(kit.target, kit.draft_model)),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(LAW_3_SIZES, 2.0, layout="anchor_first", correction="markov", rank=4)
        ),
    ),
    DrafterRow(
        "dspark_bfloat16",
        make=lambda kit: BlockDrafter(
            head=corrected_block(kit.target, kit.draft_model).to(torch.bfloat16)
        ),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(LAW_3_SIZES, 2.0, correction="markov", rank=4).to(torch.bfloat16)
        ),
        slow=True,
    ),
    DrafterRow(
        "dspark_by_cost",
        make=lambda kit: BlockDrafter(
            head=corrected_block(kit.target, kit.draft_model, confidence=True), by_cost=True
        ),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(head=unsure_block(), by_cost=True),
        slow=True,
    ),
    DrafterRow(
        "dspark_confident",
        make=lambda kit: BlockDrafter(
            head=corrected_block(kit.target, kit.draft_model, confidence=True), stop_below=0.5
        ),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(
            head=unsure_block(temperatures=(0.7, 2.0, 0.5, 1.0, 4.0, 1.5)), stop_below=0.4
        ),
        slow=True,
    ),
    DrafterRow(
        "dflash2",
        make=lambda kit: BlockDrafter(head=selecting_block(kit.target, kit.draft_model)),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(
                LAW_3_SIZES,
                2.0,
                correction="selector",
                rank=4,
                candidates=3,
                conv_taps=2,
                conv_group=4,
            )
        ),
    ),
    DrafterRow(
        "domino",
        make=lambda kit: BlockDrafter(head=gru_block(kit.target, kit.draft_model)),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(
                LAW_3_SIZES,
                2.0,
                layout="anchor_first",
                correction="gru",
                rank=4,
                gru_size=3,
                fusion="per_layer",
            )
        ),
    ),
    DrafterRow(
        "specdiff",  # the likeliest tokens, as point masses
        make=lambda kit: BlockDrafter(
            head=block_of(kit.target, kit.draft_model, **DIFFUSION), children="top_k"
        ),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(LAW_3_SIZES, 2.0, **DIFFUSION), children="top_k"
        ),
    ),
    DrafterRow(
        "specdiff_sampled",
        make=lambda kit: BlockDrafter(head=block_of(kit.target, kit.draft_model, **TWO_PASSES)),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: BlockDrafter(head=random_block(LAW_3_SIZES, 2.0, **TWO_PASSES)),
        slow=True,
    ),
    DrafterRow(
        "block_tree_by_cost",
        make=lambda kit: BlockDrafter(
            head=block_of(kit.target, kit.draft_model, in_block_mask="causal"),
            shape="tree",
            max_nodes=12,
            by_cost=True,
        ),
        rules=("greedy", "token", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(LAW_3_SIZES, 2.0, in_block_mask="causal"),
            shape="tree",
            max_nodes=9,
            by_cost=True,
        ),
        slow=True,
    ),
    DrafterRow(
        "block_tree",
        make=lambda kit: BlockDrafter(
            head=block_of(kit.target, kit.draft_model, in_block_mask="causal"),
            shape="tree",
            max_nodes=12,
        ),
        rules=("greedy", "token", "coupled"),
        table=lambda: BlockDrafter(
            head=random_block(LAW_3_SIZES, 2.0, in_block_mask="causal"), shape="tree", max_nodes=9
        ),
    ),
]

"""The head that training starts from: its shape and its initial weights.

By default the weights are initialized as published, by PyTorch's defaults for linear maps. Options
are an output layer that starts as the target's lm_head, residual blocks that start as the identity
(both as in Medusa, arXiv 2401.10774), and a shortlist of the vocabulary. The lm_head works best on
the channels of the drafted tokens' state. On the embedded target after 60 steps (one seed), loss
and block efficiency of a greedy chain were 21.2 and 1.22 as published, 20.8 and 1.21 with the
lm_head on the hidden state's channels, 19.2 and 1.27 on the channels of the drafted tokens' state,
and 19.5 and 1.25 on both.
"""

from typing import Any

import torch
from torch import Tensor, nn

from recurrent_drafting.config import HeadShapeConfig
from recurrent_drafting.head import MOST_BLOCKS, HeadConfig, RecurrentHead, ResidualBlock

WIDEST = 16  # in units of the target's hidden size


def head_config(shape: HeadShapeConfig, target: Any) -> HeadConfig:
    """Return the shape of a new head. target: the target's Hugging Face configuration."""
    return HeadConfig(
        target.vocab_size,
        target.hidden_size,
        shape.exit_dim or 2 * target.hidden_size,
        shape.num_draft_layers,
        shape.rnn,
        shape.draft_vocab_size,
    )


def shape_rules(shape: HeadShapeConfig, config: HeadConfig) -> dict[str, tuple[bool, str]]:
    """Return the rules for head.*: key -> (whether the value is valid, the expected range).

    Sizes are bounded, so that a typing error cannot exhaust memory. A warm start needs a head of
    width H or 2 H, because the target's lm_head reads H channels.
    """
    H, E = config.hidden_size, config.exit_dim
    starts = ["none"]
    if E in (H, 2 * H):
        starts += ["hidden", "state"]
    if E == 2 * H:
        starts += ["both"]
    return {
        "head.num_draft_layers": (
            0 <= shape.num_draft_layers <= MOST_BLOCKS,
            f"0 to {MOST_BLOCKS} residual blocks",
        ),
        "head.exit_dim": (
            0 <= shape.exit_dim <= WIDEST * H,
            f"a size from 1 to {WIDEST * H}, or 0 for {2 * H}, twice the target's hidden_size",
        ),
        "head.draft_vocab_size": (
            shape.draft_vocab_size >= 0,
            "1 or more, or 0 for all tokens",
        ),
        "head.warm_start": (
            shape.warm_start in starts,
            f"{' | '.join(starts)} for a head of width (exit_dim) {E} and a target of hidden_size "
            f"{H}",
        ),
    }


def initialize(head: RecurrentHead, shape: HeadShapeConfig, lm_head_VH: Tensor) -> None:
    """Zero the residual blocks, and start from the target's lm_head, if the options ask for it."""
    if shape.zero_blocks:
        for block in head.lm_head[:-1]:
            assert isinstance(block, ResidualBlock)
            nn.init.zeros_(block.linear.weight)
            nn.init.zeros_(block.linear.bias)
    if shape.warm_start != "none":
        start_warm(head, shape.warm_start, lm_head_VH.float().cpu())


@torch.no_grad()
def start_warm(head: RecurrentHead, half: str, lm_head_VH: Tensor) -> None:
    """Initialize the output layer with the target's lm_head on half of its channels, or on all.

    half: `hidden`, `state` or `both`. The other channels start at zero. A head as wide as the
    target's hidden state starts with an `input_proj` that selects the chosen half.
    """
    H = head.config.hidden_size
    drafted_VH = lm_head_VH if head.token_ids_V is None else lm_head_VH[head.token_ids_V]
    if head.config.projects:
        chosen = slice(0, H) if half == "hidden" else slice(H, 2 * H)
        nn.init.zeros_(head.input_proj.weight)
        nn.init.zeros_(head.input_proj.bias)
        head.input_proj.weight[:, chosen] = torch.eye(H)
        head.output.copy_(drafted_VH)
        return
    nn.init.zeros_(head.output)
    for name, channels in (("hidden", slice(0, H)), ("state", slice(H, 2 * H))):
        if half in (name, "both"):
            head.output[:, channels] = drafted_VH

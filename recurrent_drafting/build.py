"""The head that training starts from: its shape and its initial weights.

By default the weights are the published ones: PyTorch's defaults for every linear map. Options of
ours are an output layer that starts as the target's lm_head, residual blocks that start as the
identity (both as in Medusa, arXiv 2401.10774), and a shortlist of the vocabulary. The lm_head works
best on the channels of the drafted tokens' state: on the embedded target after 60 steps, loss and
block efficiency of a greedy chain were 21.2 and 1.22 as published, 20.8 and 1.21 with it on the
hidden state's channels, 19.2 and 1.27 on the state's, 19.5 and 1.25 on both (one seed).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jobs.paths import resolve
from recurrent_drafting.checkpoint import load_head, read_head_config
from recurrent_drafting.config import HeadShapeConfig
from recurrent_drafting.head import MOST_BLOCKS, HeadConfig, RecurrentHead, ResidualBlock
from training.data.packing import Sample
from training.heads.checkpoint import check_sizes
from training.heads.draft_vocabulary import choose_tokens

WIDEST = 16  # times the target's hidden size


def head_config(shape: HeadShapeConfig, target: Any) -> HeadConfig:
    """Return the head's shape for a target, or that of the folder in shape.path. Raises UserError.

    target: its Hugging Face configuration.
    """
    if shape.path:
        folder = resolve(shape.path)
        config = read_head_config(folder)
        check_sizes(folder, config, target)
        return config
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

    Sizes are bounded, so that a typing error does not fill the memory. The target's lm_head reads H
    channels, so a warm start needs a head of width H or 2 H.
    """
    H, V, E = config.hidden_size, config.vocab_size, config.exit_dim
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
            f"0 ({2 * H}, twice the target's hidden_size) to {WIDEST * H}",
        ),
        "head.draft_vocab_size": (
            0 <= shape.draft_vocab_size <= V,
            f"0 (all tokens) to {V}, the target's vocabulary",
        ),
        "head.warm_start": (
            shape.warm_start in starts,
            f"{' | '.join(starts)} for a head of width (exit_dim) {E} and a target of hidden_size "
            f"{H}",
        ),
    }


def build_head(
    shape: HeadShapeConfig,
    config: HeadConfig,
    lm_head_VH: Tensor,
    samples: Sequence[Sample],
    show: bool = True,
) -> RecurrentHead:
    """Build the head in float32 for training, with torch's random weights.

    samples: the shortlist is counted from their answers.
    """
    if shape.path:
        return load_head(resolve(shape.path)).requires_grad_(True).train()
    head = RecurrentHead(config)
    if config.draft_vocab_size:
        head.token_ids_V = choose_tokens(samples, config.vocab_size, config.draft_vocab_size, show)
    if shape.zero_blocks:
        for block in head.lm_head[:-1]:
            assert isinstance(block, ResidualBlock)
            nn.init.zeros_(block.linear.weight)
            nn.init.zeros_(block.linear.bias)
    if shape.warm_start != "none":
        start_warm(head, shape.warm_start, lm_head_VH.float().cpu())
    return head


@torch.no_grad()
def start_warm(head: RecurrentHead, half: str, lm_head_VH: Tensor) -> None:
    """Start the output layer as the target's lm_head on the hidden state's or drafted state's half.

    Channels outside start at zero. A head as wide as the target's hidden state first projects to
    the chosen half.
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

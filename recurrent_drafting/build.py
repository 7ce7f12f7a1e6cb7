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

from decoding.errors import UserError
from jobs.paths import resolve
from recurrent_drafting.checkpoint import load_head, read_head_config
from recurrent_drafting.config import HeadShapeConfig
from recurrent_drafting.head import HeadConfig, RecurrentHead, ResidualBlock
from training.data.packing import Sample
from training.heads.checkpoint import check_sizes
from training.heads.draft_vocabulary import choose_tokens

MOST_BLOCKS, WIDEST = 64, 16  # residual blocks; width in units of the target's hidden size
WARM_STARTS = ("none", "hidden", "state", "both")


def head_config(shape: HeadShapeConfig, target: Any) -> HeadConfig:
    """Return the head's shape for a target, or that of the folder in shape.path. Raises UserError.

    target: its Hugging Face configuration.
    """
    if shape.path:
        folder = resolve(shape.path)
        config = read_head_config(folder)
        check_sizes(folder, config, target)
        return config
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
    exit_dim = shape.exit_dim or 2 * target.hidden_size
    return HeadConfig(
        **sizes,
        exit_dim=exit_dim,
        num_draft_layers=shape.num_draft_layers,
        rnn=shape.rnn,
        draft_vocab_size=shape.draft_vocab_size,
    )


def ignored(shape: HeadShapeConfig, config: HeadConfig) -> str:
    """Describe options without effect, as shape.path has its own shape; empty if there are none."""
    defaults = HeadShapeConfig()
    keys = [
        f"head.{name}={getattr(shape, name)} (it has {getattr(config, name)})"
        for name in ("num_draft_layers", "rnn", "exit_dim", "draft_vocab_size")
        if getattr(shape, name) not in (getattr(defaults, name), getattr(config, name))
    ]
    keys += [
        f"head.{name}"
        for name in ("warm_start", "zero_blocks")
        if getattr(shape, name) != getattr(defaults, name)
    ]
    note = (
        f"head.path={shape.path} brings its own shape and weights: without effect here: "
        f"{', '.join(keys)}"
    )
    return note if keys else ""


def check_shape(shape: HeadShapeConfig, config: HeadConfig) -> None:
    """Raise UserError for a size that would fill the memory, and for an impossible warm start."""
    for name, most in (
        ("num_draft_layers", MOST_BLOCKS),
        ("exit_dim", WIDEST * config.hidden_size),
    ):
        if vars(config)[name] > most:
            raise UserError(
                f"head.{name} is {vars(config)[name]}, the target's hidden_size "
                f"{config.hidden_size}: expected at most {most}"
            )
    if shape.warm_start not in WARM_STARTS:
        raise UserError(
            f"head.warm_start is '{shape.warm_start}'; expected one of {', '.join(WARM_STARTS)}"
        )
    if shape.warm_start != "none" and config.exit_dim not in (
        config.hidden_size,
        2 * config.hidden_size,
    ):
        raise UserError(
            f"head.warm_start is {shape.warm_start} with a width (exit_dim) of {config.exit_dim}, "
            f"expected {config.hidden_size} or {2 * config.hidden_size}: the target's lm_head "
            f"reads {config.hidden_size} channels. Use one of those, or head.warm_start=none"
        )
    if shape.warm_start == "both" and config.exit_dim == config.hidden_size:
        raise UserError(
            f"head.warm_start is both with a width (exit_dim) of {config.exit_dim}, which holds "
            f"the hidden state or the drafted tokens' state: expected hidden or state"
        )


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

"""Folders of block drafters, in the layouts of heads/block/layouts.py."""

from pathlib import Path

import torch

from decoding.models.draft_vocabulary import T2D, check_t2d, check_tokens, is_drafted
from decoding.models.folder import WEIGHTS, load_state, read_json
from heads.block.layouts import READ_AS, layout_of
from heads.block.model import BlockHead
from heads.block.read_config import read_head_config
from heads.block.servers import CONTRACT
from training.heads import checkpoint


def load_head(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str | None = None,
) -> BlockHead:
    """Load the head of a folder, for drafting.

    layout: that of a folder without the key `sample_from_anchor`. Raises UserError for a folder of
    another kind, and for tensors that are missing, unknown, not finite, or of another shape than
    config.json describes.
    """
    config, file = read_head_config(folder, layout), folder / WEIGHTS
    with torch.device("meta"):
        head = BlockHead(config)
    published = layout_of(read_json(folder / "config.json"))
    stored = published.with_names(load_state(folder), READ_AS)
    stored = {name: each for name, each in stored.items() if name not in CONTRACT.copies}
    t2d_V = stored.pop(T2D, None)
    described = f"{config.num_layers} layers that read {len(config.taps)} layers of the target"
    checkpoint.load_weights(head, stored, published.stored_name, file, described)
    if head.token_ids_V is not None:
        check_tokens(file, "tensor 'd2t' plus its index", head.token_ids_V, config.vocab_size)
        drafted_V = is_drafted(head.token_ids_V, config.vocab_size)
        check_t2d(file, drafted_V if t2d_V is None else t2d_V, drafted_V)
    return head.to(device, dtype).requires_grad_(False).eval()

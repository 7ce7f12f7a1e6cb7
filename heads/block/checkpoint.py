"""Folders of block drafters in the layout of z-lab's DFlash and of SpecForge.

config.json has the fields of a Qwen3 model, `block_size`, and `dflash_config` with the mask token,
the target's layers, the attention inside a block, and the projector of other heads. In these files
layer i is the output of decoder layer i, from 0: the tap i + 1 of this project. A folder also holds
`taps` in our numbers, and a reader compares the two.

`sample_from_anchor` (of speculators) is the layout of a block: true for anchor_first, false for
fill_in. Published files do not all have it, and the wrong one costs nearly all acceptance without
an error, so a folder without it is read only if the layout is given. DeepSpec's files have the keys
of `dflash_config` at the top level, and copies of the target's embedding and lm_head, which are not
read. DFlash2 adds the convolutions `layers.{i}.attention_conv` and `mlp_conv`, and the tensors of
`candidate_selector`.

Our own are the key `denoising_steps`, and layer -1 for the embedding (tap 0), which is read only in
a folder with `taps`.
"""

import re
from pathlib import Path
from typing import Any

import torch

from decoding.models.draft_vocabulary import check_tokens
from decoding.models.folder import WEIGHTS, load_state, read_json
from heads.block.model import BlockHead
from heads.block.read_config import (
    CONV_TAPS,
    LAYOUT_KEY,
    OPTIONS,
    PROJECTORS,
    RANKS,
    SHIFT_KEY,
    STEPS,
    read_head_config,
)
from heads.block.shape import (
    ANCHOR_FIRST,
    CAUSAL,
    EMBEDDING,
    GRU,
    MARKOV,
    NONE,
    SELECTOR,
    BlockConfig,
)
from training.heads import checkpoint

_NAMES = {
    NONE: "DFlashDraftModel",
    MARKOV: "DSparkDraftModel",
    GRU: "DominoDraftModel",
    SELECTOR: "DFlash2DraftModel",
}
# copies of the target's weights in DeepSpec's files
_COPIES = ("embed_tokens.weight", "lm_head.weight")


class BlockLayout:
    """Keys of config.json and names of tensors."""

    def config(self, shape: BlockConfig, dtype: torch.dtype) -> dict[str, Any]:
        options: dict[str, Any] = {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in shape.taps],
            "taps": list(shape.taps),
            "taps_convention": "taps are Hugging Face's hidden_states[k]; target_layer_ids are "
            "the layers whose outputs these are",
            "causal": shape.in_block_mask == CAUSAL,
            "projector_type": PROJECTORS[shape.correction],
        }
        if shape.correction != NONE:
            options[RANKS[shape.correction]] = shape.rank
        if shape.correction == MARKOV:
            options["markov_head_type"] = "vanilla"
        if shape.correction == SELECTOR:
            options["selector_top_k"] = shape.candidates
        if shape.denoising_steps:
            options[STEPS] = shape.denoising_steps
        if shape.conv_taps:
            options |= {CONV_TAPS: shape.conv_taps, "conv_group_size": shape.conv_group}
        if shape.correction == GRU:
            options["gru_hidden_dim"] = shape.gru_size
            options |= {"pure_draft_prefix_len": 1, SHIFT_KEY: shape.layout == ANCHOR_FIRST}
        if shape.confidence:
            options |= {"enable_confidence_head": True}
            options |= {"confidence_head_with_markov": shape.correction != NONE}
        values = {
            "architectures": [_NAMES[shape.correction]],
            "model_type": "qwen3",
            OPTIONS: options,
            LAYOUT_KEY: shape.layout == ANCHOR_FIRST,
            "block_size": shape.block_size,
            "num_target_layers": shape.target_layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.intermediate_size,
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        return values | ({"draft_vocab_size": n} if (n := shape.draft_vocab_size) else {})

    def stored_name(self, name: str) -> str:
        name = re.sub(r"^correction\.markov", "markov_head.markov", name)
        name = re.sub(r"^correction\.(\w+cessor|hidden)_", r"candidate_selector.\1_", name)
        return re.sub(r"^confidence\.", "confidence_head.", name.removeprefix("correction."))

    def extensions(self, shape: BlockConfig) -> list[str]:
        found = []
        if shape.draft_vocab_size:
            found.append(f"a draft vocabulary of {shape.draft_vocab_size} tokens without lm_head")
        if shape.denoising_steps > 1:
            found.append(f"blocks that are filled in {shape.denoising_steps} passes")
        if EMBEDDING in shape.taps:
            found.append("the target's embedding (target_layer_ids -1) among the layers")
        if shape.confidence and shape.correction in (GRU, SELECTOR):
            found.append(f"a confidence head that reads the features of a {shape.correction}")
        if bool(shape.conv_taps) != (shape.correction == SELECTOR):
            parts = ("convolution", "selector")[:: 1 if shape.conv_taps else -1]
            found.append(f"a {parts[0]} without a {parts[1]}")
        if shape.correction == SELECTOR and shape.layout == ANCHOR_FIRST:
            found.append("a selector in blocks whose first slot predicts too")
        return found


LAYOUT = BlockLayout()


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
    config = read_head_config(folder, layout)
    with torch.device("meta"):
        head = BlockHead(config)
    described = f"{config.num_layers} layers that read {len(config.taps)} layers of the target"
    file, stored = folder / WEIGHTS, load_state(folder)
    if OPTIONS not in read_json(folder / "config.json"):
        stored = {name: each for name, each in stored.items() if name not in _COPIES}
    checkpoint.load_weights(head, stored, LAYOUT.stored_name, file, described)
    if head.token_ids_V is not None:
        check_tokens(file, "tensor 'd2t' plus its index", head.token_ids_V, config.vocab_size)
    return head.to(device, dtype).requires_grad_(False).eval()

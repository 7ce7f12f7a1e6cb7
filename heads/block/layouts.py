"""Published layouts of block drafters (how servers read them is in heads/block/servers.py).

served        ours, z-lab's DFlash and SpecForge's: the sizes of a Qwen3 model, and `dflash_config`
              with the mask token, the target's layers and the projector of other heads
speculators   vLLM's library; the sizes lie in an inner object
deepspec      DeepSeek's DSpark; the keys of `dflash_config` lie at the top level

`target_layer_ids` are numbers of decoder layers whose outputs are read, so that layer i is the tap
i + 1. speculators numbers them as hidden_states, under another key.

`sample_from_anchor` (of speculators) is the layout of a block: true for anchor_first, false for
fill_in. Published files do not all have it, and the wrong one costs nearly all acceptance without
an error, so a folder without it is read only if the layout is given.

DFlash2 adds the convolutions `layers.{i}.attention_conv` and `mlp_conv`, and the tensors of
`candidate_selector`. Files of speculators and DeepSpec hold copies of the target's embedding and
lm_head, which are not read; servers need the latter for a draft vocabulary.

Our own are the keys `denoising_steps`, `confidence_temperatures` and `fusion`, and layer -1 for the
embedding (tap 0), which is read only in a folder with `taps`. Other readers ignore the temperatures
and use the confidence as it was trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from heads.block.shape import (
    ANCHOR_FIRST,
    BIDIRECTIONAL,
    EMBEDDING,
    FC,
    GRU,
    MARKOV,
    NONE,
    SELECTOR,
    BlockConfig,
)
from training.heads.published import HIDDEN_STATES, OUTPUTS, PublishedLayout, put, within

OPTIONS = "dflash_config"
LAYOUT_KEY = "sample_from_anchor"
SHIFT_KEY = "shift_label"  # the same in Domino's files
# `causal` in JetSpec's files, and at the top level of others
CAUSAL_HEAD, IS_CAUSAL = "causal_head", "is_causal"
LAYERS = "target_layer_ids"
RANKS = {MARKOV: "markov_rank", GRU: "emb_dim", SELECTOR: "selector_rank"}
CONV_TAPS = "conv_kernel_size"
STEPS = "denoising_steps"  # this project's own, as the next two
TEMPERATURES = "confidence_temperatures"
FUSION = "fusion"
INNER = "transformer_layer_config"
KIND = "speculators_model_type"
SERVED_NAMES = {
    NONE: "DFlashDraftModel",
    MARKOV: "DSparkDraftModel",
    GRU: "DominoDraftModel",
    SELECTOR: "DFlash2DraftModel",
}
_SPECULATORS_NAMES = {
    NONE: "DFlashSpeculator",
    MARKOV: "DSparkSpeculator",
    SELECTOR: "DFlash2DraftModel",
}


@dataclass(frozen=True)
class BlockLayout(PublishedLayout):
    """A published layout of block drafters."""

    # corrections that it holds -> their architecture
    corrections: Mapping[str, str] = field(default_factory=lambda: SERVED_NAMES)
    options: str = ""  # before the paths of a correction's values
    extended: bool = False  # whether it holds what no publication describes

    def config(self, shape: BlockConfig, dtype: torch.dtype) -> dict[str, Any]:
        values = super().config(shape, dtype)
        for key, value in _values_of_correction(shape).items():
            put(values, self.options + key, value)
        return values | {"architectures": [self.corrections[shape.correction]]}

    def extensions(self, shape: BlockConfig) -> list[str]:
        vocabulary = f"a draft vocabulary of {shape.draft_vocab_size} tokens without lm_head"
        return [*([vocabulary] if shape.draft_vocab_size else []), *_unpublished(shape)]

    def cannot_hold(self, shape: BlockConfig) -> list[str]:
        wrong = super().cannot_hold(shape)
        if shape.correction not in self.corrections:
            wrong.append(
                f"the correction is {shape.correction}, expected one of "
                f"{', '.join(self.corrections)}"
            )
        return wrong + ([] if self.extended else _unpublished(shape))


def _values_of_correction(shape: BlockConfig) -> dict[str, Any]:
    """Return the values of config.json that describe a correction."""
    correction = shape.correction
    found: dict[str, Any] = {RANKS[correction]: shape.rank} if correction in RANKS else {}
    if correction == MARKOV:
        found["markov_head_type"] = "vanilla"
    if correction == SELECTOR:
        found["selector_top_k"] = shape.candidates
    if correction == GRU:
        found |= {"gru_hidden_dim": shape.gru_size, "pure_draft_prefix_len": 1}
        found[SHIFT_KEY] = shape.anchor_first
    return found


def _unpublished(shape: BlockConfig) -> list[str]:
    """Describe the parts of a head that no publication combines in this way."""
    found = []
    if shape.passes > 1:
        found.append(f"blocks that are filled in {shape.passes} passes")
    if shape.fusion != FC:
        found.append(f"{FUSION} {shape.fusion}, each layer's own mixture of the target's states")
    if shape.reads_embedding:
        found.append(f"the target's embedding ({LAYERS} {EMBEDDING - 1}) among the layers")
    if shape.confidence and shape.correction in (GRU, SELECTOR):
        found.append(f"a confidence head that reads the features of a {shape.correction}")
    if bool(shape.conv_taps) != (shape.correction == SELECTOR):
        parts = ("convolution", "selector")[:: 1 if shape.conv_taps else -1]
        found.append(f"a {parts[0]} without a {parts[1]}")
    if shape.correction == SELECTOR and shape.layout == ANCHOR_FIRST:
        found.append("a selector in blocks whose first slot predicts too")
    return found


_QWEN3 = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_SIZES = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "rms_norm_eps": "norm_eps",
}
_BLOCK = {
    LAYOUT_KEY: "anchor_first",
    "block_size": "block_size",
    "num_target_layers": "target_layers",
}
_CONFIDENCE = {
    "enable_confidence_head": "confidence",
    "confidence_head_with_markov": "confidence_reads_tokens",
}
_CALIBRATION = {TEMPERATURES: "temperatures"}
_CONVOLUTION = {CONV_TAPS: "conv_taps", "conv_group_size": "conv_group"}
_NAMES = (
    (r"^correction\.markov", "markov_head.markov"),
    (r"^correction\.(\w+cessor|hidden)_", r"candidate_selector.\1_"),
    (r"^correction\.", ""),
    (r"^confidence\.", "confidence_head."),
    (r"^fusion\.", ""),
)
SERVED = BlockLayout(
    "served",
    fixed={
        **_QWEN3,
        f"{OPTIONS}.taps_convention": "taps are Hugging Face's hidden_states[k]; "
        f"{LAYERS} are the layers whose outputs these are",
    },
    fields={
        **_SIZES,
        **_BLOCK,
        "rope_theta": "rope_theta",
        **within(
            OPTIONS,
            {"mask_token_id": "mask_token_id", "causal": "causal", "projector_type": "projector"},
        ),
    },
    layers={f"{OPTIONS}.{LAYERS}": OUTPUTS, f"{OPTIONS}.taps": HIDDEN_STATES},
    if_true={
        "draft_vocab_size": "draft_vocab_size",
        **within(OPTIONS, {**_CONFIDENCE, **_CONVOLUTION}),
        **within(OPTIONS, {**_CALIBRATION, STEPS: "denoising_steps", FUSION: "mixed_fusion"}),
    },
    renamed=_NAMES,
    options=f"{OPTIONS}.",
    extended=True,
)
SPECULATORS = BlockLayout(
    "speculators",
    fixed={
        "speculators_version": "0.9.0",
        "speculators_config.default_proposal_method": "greedy",
        "speculators_config.verifier.architectures": [],
        # vLLM makes blocks causal where this is false, even those without a sliding window
        "sliding_window_non_causal": True,
        **within(INNER, _QWEN3),
    },
    fields={
        **within(INNER, {**_SIZES, "rope_parameters": "rope"}),
        **_BLOCK,
        KIND: "projector",
        "speculators_config.algorithm": "projector",
        "mask_token_id": "mask_token_id",
        "target_hidden_size": "hidden_size",
        "draft_vocab_size": "num_drafted",
        **_CONFIDENCE,  # speculators takes a missing one for true
    },
    layers={"aux_hidden_state_layer_ids": HIDDEN_STATES},
    if_true={**_CALIBRATION, **_CONVOLUTION},
    only={"in_block_mask": BIDIRECTIONAL, "denoising_steps": 0},
    renamed=_NAMES,
    writes_t2d=True,
    verifier="speculators_config.verifier.name_or_path",
    proposed="num_drafts",
    inner=INNER,
    # those of Qwen3 in transformers, which are left out where they are not changed
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    corrections=_SPECULATORS_NAMES,
)
DEEPSPEC = replace(
    SERVED,
    name="deepspec",
    fixed=_QWEN3,
    fields={**_SIZES, **_BLOCK, "rope_theta": "rope_theta", "mask_token_id": "mask_token_id"},
    layers={LAYERS: OUTPUTS},
    if_true={"draft_vocab_size": "draft_vocab_size", **_CONFIDENCE, **_CALIBRATION},
    only={"layout": ANCHOR_FIRST, "in_block_mask": BIDIRECTIONAL},
    corrections={MARKOV: "Qwen3DSparkModel"},
    options="",
    extended=False,
)


def layout_of(values: Mapping[str, Any]) -> BlockLayout:
    """Return the layout of a config.json."""
    if KIND in values:
        return SPECULATORS
    return SERVED if OPTIONS in values else DEEPSPEC


READ_AS = (
    (r"^markov_head\.", "correction."),
    (r"^candidate_selector\.", "correction."),
    (r"^(prefix_gru|embed_proj)\.", r"correction.\1."),
    (r"^confidence_head\.", "confidence."),
    (r"^layer_fusion", "fusion.layer_fusion"),
)

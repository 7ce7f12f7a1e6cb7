"""Published layouts of Medusa heads, and how servers read them.

vllm          ours: `blocks.{i}.layers.{j}.weight|bias` and `lm_heads.{i}.weight` (one, with
              `original_lm_head`, if heads share it), and `token_map` for a draft vocabulary. The
              biases need `medusa_fc_bias: true`, as vLLM's loader defaults to false.
original      FasterDecoding/Medusa: `medusa_lm_head.safetensors` with `{i}.{j}.linear.weight|bias`
              and `{i}.{layers}.weight`; the sizes are those of the tensors

vLLM's code knows a draft vocabulary, but version 0.32 loads none. It makes projections of single
heads for all tokens and cuts what it loads to `token_map`, so that files of either size fail. With
one projection it loads all tensors, then misses `token_map` among those that it counted as loaded.

`medusa_accuracy`, from which trees are chosen, is an extension that other readers ignore.
"""

from collections.abc import Mapping
from typing import Any

from heads.medusa.model import MedusaConfig
from training.heads.config_keys import Key
from training.heads.published import Contract, Launch, PublishedLayout, Server, vllm_launch

MODEL_TYPE = "medusa"
ORIGINAL_WEIGHTS = "medusa_lm_head.safetensors"
ACCURACY = "medusa_accuracy"
TOKENS = "token_map"
_MEASURED = {ACCURACY: "rounded_accuracy"}

VLLM = PublishedLayout(
    "vllm",
    fixed={"architectures": ["MedusaModel"], "model_type": MODEL_TYPE, "medusa_fc_bias": True},
    fields={
        "num_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
        "truncated_vocab_size": "num_drafted",
        "original_lm_head": "shared",
    },
    if_true=_MEASURED,
    renamed=(
        (r"^blocks\.(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
        (r"^projections\.", "lm_heads."),
        (r"^token_ids_V$", TOKENS),
    ),
)
ORIGINAL = PublishedLayout(
    "original",
    fixed={"version": "2"},
    fields={"medusa_num_heads": "num_heads", "medusa_num_layers": "num_layers"},
    if_true=_MEASURED,
    only={"shared": False, "draft_vocab_size": 0},
    renamed=(
        (r"^blocks\.", ""),
        (r"^projections\.(\d+)\.", r"\1.{num_layers}."),
    ),
    verifier="base_model_name_or_path",
    weights=ORIGINAL_WEIGHTS,
)
_READ_AS = (
    (r"^medusa_heads\.", ""),
    (r"^blocks\.(\d+)\.layers\.(\d+)\.", r"blocks.\1.\2.linear."),
    (r"^lm_heads\.", "projections."),
    (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.\2.linear."),
    (r"^(\d+)\.\d+\.weight$", r"projections.\1.weight"),
    (rf"^{TOKENS}$", "token_ids_V"),
)


def unreadable_in_vllm(shape: MedusaConfig) -> str:
    """Return why vLLM does not load the heads, with its words; empty if it does."""
    if not shape.draft_vocab_size:
        return ""
    words = (
        "`ValueError: Following weights were not initialized from checkpoint: {'token_map'}`"
        if shape.shared
        else "`assert loaded_weight.shape[output_dim] == self.org_vocab_size`"
    )
    return f"it loads no draft vocabulary of Medusa heads ({words})"


def _unreadable(layout: str, shape: MedusaConfig) -> list[str]:
    return [found] if (found := unreadable_in_vllm(shape)) else []


def _launch_vllm(target: str, layout: str, shape: MedusaConfig, tokens: int) -> Launch:
    return vllm_launch(target, True, method=MODEL_TYPE, num_speculative_tokens=shape.num_heads)


def layout_of(values: Mapping[str, Any]) -> PublishedLayout:
    """Return the layout of a config.json."""
    is_original = "medusa_num_heads" in values and "hidden_size" not in values
    return ORIGINAL if is_original else VLLM


CONTRACT = Contract(
    {each.name: each for each in (VLLM, ORIGINAL)},
    layout_of,
    servers=(
        Server(
            "vLLM 0.32",
            refused=("original",),
            unreadable=_unreadable,
            launch=_launch_vllm,
            keys=(
                Key(
                    ("medusa_fc_bias",),
                    wanted=True,
                    default=False,
                    effect="it skips the biases of the blocks",
                ),
            ),
            architectures={"vllm": ("MedusaModel",)},
            skips={ACCURACY: "drafts a chain of the likeliest tokens"},
        ),
        Server(
            "FasterDecoding/Medusa",
            assumed={"num_heads": 5},
            refused=("vllm",),
            keys=(Key((ORIGINAL.verifier,), effect="it loads the target by it"),),
        ),
    ),
    read_as=_READ_AS,
)

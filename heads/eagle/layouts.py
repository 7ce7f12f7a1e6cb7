"""Published layouts of EAGLE heads (how servers read them is in heads/eagle/servers.py).

served        ours: what vLLM and SGLang read, with the layers in the numbers of both
specforge     SpecForge's exports to SGLang, and the original repository's files
modelopt      exports of NVIDIA's Model Optimizer
speculators   vLLM's library; the sizes lie in an inner object

P-EAGLE heads have the first, the second and the last of these. A state for each depth
(ParallelSpec) is an extension of ours, with the key `masks_by_depth`. SpecForge and speculators
train them with an embedding of their own, where this project reads the target's: a folder is read
only if `embed_requires_grad` is false in it, as in exports of this project. SpecForge takes the
mask token from `dflash_config`, and numbers of tokens from the settings of its training alone.

EAGLE-1 heads have one layout, whose tensors are those of the original repository.

In `eagle_config`, SGLang, SpecForge and Model Optimizer number layers by their outputs. vLLM takes
the same key for hidden_states[i], one layer earlier, but reads the key at the top level first.

`norm_output` feeds the normalized output back in vLLM, SGLang and speculators. In SpecForge 0.2.0
the key says instead whether the output is normalized before the lm_head, and the feedback never
is; there it is written only if the head needs it in SGLang.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from decoding.drafters.parallel import MASK_TOKEN, TRAINED_TOKENS
from heads.eagle.model import EagleConfig
from training.heads.config_keys import get
from training.heads.published import (
    HIDDEN_STATES,
    OUTPUTS,
    PROPOSALS,
    PublishedLayout,
    within,
)

ARCHITECTURE = "LlamaForCausalLMEagle3"
PARALLEL = "PeagleLlamaForCausalLM"  # vLLM's name of a head that drafts in one pass
SPECULATOR = "Eagle3Speculator"
PARALLEL_SPECULATOR = "PEagleSpeculator"
PARALLEL_SPECFORGE = "PEagleDraftModel"
FIRST = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle")  # EAGLE-1 in vLLM, in SGLang
MASK_IN_SPECULATORS = "mask_token_id"
BY_DEPTH = "masks_by_depth"  # this project's own
BIAS = "bias"  # whether the map of EAGLE-1 has one
PARALLELS = (PARALLEL, PARALLEL_SPECULATOR, PARALLEL_SPECFORGE)
ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", SPECULATOR, *PARALLELS, *FIRST)
CONVENTION = "hidden_states"  # of the key taps_convention
LAYERS = "eagle_aux_hidden_state_layer_ids"
SERVED_LAYERS = f"eagle_config.{LAYERS}"
INNER = "transformer_layer_config"
KIND = "speculators_model_type"
MASK_IN_SPECFORGE = f"dflash_config.{MASK_IN_SPECULATORS}"
SWITCHES = ("fc_norm", "norm_output", "norm_before_residual")
# tensors of other writers, under this project's names
READ_AS = (
    (r"^model\.", ""),
    (r"^layers\.0\.", "midlayer."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)

_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_positions",
}
_ROPE = {"rope_theta": "rope_theta", "rope_scaling": "rope_scaling"}
_OUTER = {
    **_SIZES,
    "draft_vocab_size": "num_drafted",  # without it SGLang takes the target's lm_head
    **_ROPE,
}
_ONE_BY_ONE: Mapping[str, Any] = {"parallel": 0}
ONE_STATE: Mapping[str, Any] = {BY_DEPTH: False}


@dataclass(frozen=True)
class EagleLayout(PublishedLayout):
    """The layout of this project's EAGLE-3 and P-EAGLE heads."""

    def extensions(self, shape: EagleConfig) -> list[str]:
        return ["a mask state for each depth"] if shape.masks_by_depth else []


SERVED = EagleLayout(
    "served",
    fixed={
        "architectures": [ARCHITECTURE],
        **_LLAMA,
        "eagle_config.use_aux_hidden_state": True,
        "eagle_config.norm_before_fc": False,
        "taps_convention": CONVENTION,
    },
    fields={
        **_OUTER,
        "target_hidden_size": "hidden_size",
        "num_aux_hidden_states": "num_taps",
        **{name: name for name in SWITCHES},
    },
    layers={"taps": HIDDEN_STATES, LAYERS: HIDDEN_STATES, SERVED_LAYERS: OUTPUTS},
)
SERVED_PARALLEL = replace(
    SERVED,
    # vLLM 0.32 puts `Eagle3` before its own name of such heads, and then does not know it
    fixed={**SERVED.fixed, "architectures": [ARCHITECTURE, PARALLEL]},
    fields={**SERVED.fields, MASK_TOKEN: "mask_token_id", TRAINED_TOKENS: "parallel"},
    if_true={BY_DEPTH: BY_DEPTH},
)
SERVED_FIRST = PublishedLayout(
    "served",
    fixed={"architectures": [*FIRST], **_LLAMA},
    fields={**_SIZES, **_ROPE, BIAS: "fc_bias"},
    renamed=((r"^midlayer\.", "layers.0."),),
)
SPECFORGE = PublishedLayout(
    "specforge",
    fixed={"architectures": [ARCHITECTURE], **_LLAMA},
    fields=_OUTER,
    layers={SERVED_LAYERS: OUTPUTS},
    if_true={"fc_norm": "fc_norm", "norm_output": "norm_output"},
    only={"num_taps": 3, "norm_before_residual": False, **_ONE_BY_ONE},
    full_vocabulary=True,
)
SPECFORGE_PARALLEL = replace(
    SPECFORGE,
    fixed={
        "architectures": [PARALLEL_SPECFORGE],
        **_LLAMA,
        "embed_requires_grad": False,  # this project's own, as is the number of tokens
    },
    fields={
        **_OUTER,
        "norm_before_residual": "norm_before_residual",
        MASK_IN_SPECFORGE: "mask_token_id",
        TRAINED_TOKENS: "parallel",
    },
    if_true={"norm_output": "norm_output"},  # without effect in one pass
    # it rotates by the base alone
    only={"num_taps": 3, "fc_norm": False, "rope_scaling": None, **ONE_STATE},
    renamed=((r"^midlayer\.", "layers.0."),),
    defaults={"embed_requires_grad": True},
)
MODELOPT = PublishedLayout(
    "modelopt",
    fixed={
        "architectures": [ARCHITECTURE],
        **_LLAMA,
        **within(
            "eagle_config",
            {
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
                "parallel_draft_heads_num_layers": 1,
            },
        ),
    },
    fields=_OUTER,
    layers={SERVED_LAYERS: OUTPUTS},
    only={**dict.fromkeys(SWITCHES, False), **_ONE_BY_ONE},
    renamed=((r"^midlayer\.", "layers.0."),),
    left_out=frozenset({"t2d"}),
)
SPECULATORS = PublishedLayout(
    "speculators",
    fixed={
        "architectures": [SPECULATOR],
        KIND: "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config.algorithm": "eagle3",
        "speculators_config.default_proposal_method": "greedy",
        "speculators_config.verifier.architectures": [],
        "norm_before_fc": False,
        "embed_requires_grad": False,
        **within(INNER, _LLAMA),
    },
    fields={
        **within(INNER, {**_SIZES, "rope_parameters": "rope"}),
        "draft_vocab_size": "num_drafted",
        "target_hidden_size": "hidden_size",
        **{name: name for name in SWITCHES},
    },
    layers={LAYERS: HIDDEN_STATES},
    only=_ONE_BY_ONE,
    renamed=((r"^midlayer\.", "layers.0."),),
    verifier="speculators_config.verifier.name_or_path",
    proposed="proposed_tokens",
    inner=INNER,
    # speculators takes a Qwen3 where nothing is written; sizes are LLaMA's defaults in transformers
    defaults={
        "model_type": "qwen3",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
    },
)
SPECULATORS_PARALLEL = replace(
    SPECULATORS,
    fixed={
        **SPECULATORS.fixed,
        "architectures": [PARALLEL_SPECULATOR],
        KIND: "peagle",
        "speculators_config.algorithm": "peagle",
    },
    fields={**SPECULATORS.fields, MASK_IN_SPECULATORS: "mask_token_id"},
    only=ONE_STATE,
    defaults={**SPECULATORS.defaults, "embed_requires_grad": True},
)


def is_first(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json is an EAGLE-1 head's."""
    return not {*_architectures(values)}.isdisjoint(FIRST)


def _architectures(values: Mapping[str, Any]) -> list[Any]:
    found = values.get("architectures")
    return found if isinstance(found, list) else []


def layout_of(values: Mapping[str, Any]) -> PublishedLayout:
    """Return the layout of a config.json."""
    architectures = _architectures(values)
    if KIND in values:
        return SPECULATORS_PARALLEL if values[KIND] == "peagle" else SPECULATORS
    if PARALLEL_SPECFORGE in architectures:
        return SPECFORGE_PARALLEL
    if is_first(values):
        return SERVED_FIRST
    if "taps" in values or LAYERS in values:
        return SERVED_PARALLEL if PARALLEL in architectures else SERVED
    served = values.get("eagle_config") or {}
    return MODELOPT if "use_last_layernorm" in served else SPECFORGE


def drafting_in_one_pass(layout: PublishedLayout, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mask token and the number of trained tokens, by the keys of a P-EAGLE config.json.

    Empty for a layout of other heads.
    """
    if layout is SERVED_PARALLEL:
        keys = (MASK_TOKEN, TRAINED_TOKENS)
    elif layout is SPECFORGE_PARALLEL:
        keys = (MASK_IN_SPECFORGE, TRAINED_TOKENS)
    elif layout is SPECULATORS_PARALLEL:
        methods = get(values, PROPOSALS)
        first = methods[0] if isinstance(methods, list) and methods else None
        tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
        return {MASK_IN_SPECULATORS: values.get(MASK_IN_SPECULATORS), PROPOSALS: tokens}
    else:
        return {}
    return {key: get(values, key) for key in keys}

"""Folders of EAGLE-3 heads in the layout that vLLM and SGLang read.

config.json is that of a LLaMA with one layer and the architecture `LlamaForCausalLMEagle3`. The
tensors are `midlayer.*` (or `layers.0.*`), `fc.weight`, `norm.weight`, `lm_head.weight`,
`fc_norm.{i}.weight`, and for a draft vocabulary `d2t` (row i is the token i + d2t[i]) and `t2d`
(whether a token is drafted), which SpecForge and the original repository write too. Servers take
the embedding from the target, which trains frozen in all of them, so a stored one is not read.

A head that drafts in one pass has `mask_hidden` too, its mask token as `pard_token`, and the number
of tokens that it was trained to draft as `num_parallel_tokens`, which servers do not read.

Layers are numbered in two ways. At the top level, where vLLM reads them, number i is Hugging Face's
hidden_states[i]. In `eagle_config`, where SGLang and SpecForge read the same key, it is the output
of layer i, which is hidden_states[i + 1]. Both are written. `taps`, with `taps_convention` beside
it, is for this project. A file without numbers has the default of all servers.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.drafters.parallel import MASK_TOKEN, TRAINED_TOKENS
from decoding.errors import UserError
from decoding.models.draft_vocabulary import D2T, ids_of
from decoding.models.folder import WEIGHTS, load_state, read_config
from decoding.values import is_int, quote
from heads.eagle.model import NUM_TAPS, EagleConfig, EagleHead, is_drafted, read_rope
from training.heads import checkpoint

ARCHITECTURE = "LlamaForCausalLMEagle3"
PARALLEL = "PeagleLlamaForCausalLM"  # vLLM's name of a head that drafts in one pass
ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM", PARALLEL)
CONVENTION = "hidden_states"  # layer k is Hugging Face's hidden_states[k]
_LAYERS = "eagle_aux_hidden_state_layer_ids"
# fields of config.json that this head has with one value only
_FIXED: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_fc": False,
}
_SWITCHES = ("fc_norm", "norm_output", "norm_before_residual")


class ServedLayout:
    """The keys of config.json, and tensors named like the parameters."""

    def config(self, shape: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
        rope = dict(shape.rope)
        theta = rope.pop("rope_theta")
        return {
            "architectures": [architecture(shape)],
            **(
                {MASK_TOKEN: shape.mask_token_id, TRAINED_TOKENS: shape.parallel}
                if shape.parallel
                else {}
            ),
            "model_type": "llama",
            **{key: value for key, value in _FIXED.items() if key != "norm_before_fc"},
            "vocab_size": shape.vocab_size,
            "draft_vocab_size": shape.num_drafted,  # without it SGLang takes the target's lm_head
            "hidden_size": shape.hidden_size,
            "target_hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": shape.norm_eps,
            "max_position_embeddings": shape.max_positions,
            "rope_theta": theta,
            "rope_scaling": rope if rope["rope_type"] != "default" else None,
            "tie_word_embeddings": False,
            "num_aux_hidden_states": shape.num_taps,
            _LAYERS: list(shape.taps),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "norm_before_fc": False,
                _LAYERS: [tap - 1 for tap in shape.taps],
            },
            "taps": list(shape.taps),
            "taps_convention": CONVENTION,
            **{name: getattr(shape, name) for name in _SWITCHES},
            "torch_dtype": str(dtype).removeprefix("torch."),
        }

    def stored_name(self, name: str) -> str:
        return name

    def extensions(self, shape: EagleConfig) -> list[str]:
        return []


LAYOUT = ServedLayout()


def architecture(shape: EagleConfig) -> str:
    """Return the name by which servers know a head."""
    return PARALLEL if shape.parallel else ARCHITECTURE


def load_head(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> EagleHead:
    """Load the head of a folder, for drafting.

    Raises UserError for a folder of another kind, and for tensors that are missing, unknown, not
    finite, or of another shape than config.json describes.
    """
    config, file = read_head_config(folder), folder / WEIGHTS
    with torch.device("meta"):
        head = EagleHead(config)
    stored = {
        re.sub(r"^(model\.)?(layers\.0\.)?", lambda found: "midlayer." if found[2] else "", name): (
            tensor
        )
        for name, tensor in load_state(folder).items()
    }
    stored.pop("embed_tokens.weight", None)
    _complete_vocabulary(stored, config, file)
    described = (
        f"{config.num_taps} taps, {config.num_drafted} drafted tokens, "
        f"fc_norm={str(config.fc_norm).lower()}"
    )
    checkpoint.load_weights(head, stored, LAYOUT.stored_name, file, described)
    return head.to(device, dtype).requires_grad_(False).eval()


def _complete_vocabulary(stored: dict[str, Tensor], config: EagleConfig, file: Path) -> None:
    """Check the draft vocabulary, and add `t2d`, which servers do not need, where it is missing.

    Raises UserError for ids that are not rising, and for two tensors that contradict each other.
    """
    d2t_V = stored.get(D2T)
    if not config.draft_vocab_size:
        if d2t_V is not None and not d2t_V.any():  # the full vocabulary, written as an identity
            del stored[D2T]
            stored.pop("t2d", None)
        return
    if d2t_V is None:
        return  # reported with the other missing tensors
    found_V = is_drafted(ids_of(d2t_V, config.vocab_size, file), config.vocab_size)
    if not torch.equal(stored.setdefault("t2d", found_V).bool(), found_V):
        raise UserError(
            f"{file}: the tensors t2d and d2t hold different draft vocabularies. The file is "
            f"damaged; copy it again."
        )
    stored["t2d"] = found_V


def read_head_config(folder: Path) -> EagleConfig:
    """Read the shape of a head folder.

    Raises UserError for a folder of another kind, and for missing, invalid or unsupported values.
    """
    file, values = folder / "config.json", read_config(folder)
    served = values.get("eagle_config") or {}
    found = values.get("architectures")
    if not isinstance(found, list) or not set(found) & set(ARCHITECTURES):
        raise UserError(
            f"{file}: architectures is {quote(found)}, expected ['{ARCHITECTURE}'], an EAGLE-3 "
            f"head. Use `use: chain` for a language model."
        )
    for key, only in _FIXED.items():
        given = served.get(key, values.get(key, only))
        if given != only:
            raise UserError(
                f"{file}: {key} is {json.dumps(given)}, expected {json.dumps(only)}, as this "
                f"project has no EAGLE-3 head of another form. Use a head without this option."
            )
    sizes = _read_sizes(file, values)
    taps = _read_taps(file, values, served)
    switches = {name: values.get(name, False) for name in _SWITCHES}
    for name, given in switches.items():
        if not isinstance(given, bool):
            raise UserError(
                f"{file}: {name} is {quote(given)}, expected true or false. Use the config.json "
                f"that was written with these weights."
            )
    eps = values.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, float | int) or not 0 <= eps < 1:
        raise UserError(
            f"{file}: rms_norm_eps is {quote(eps)}, expected a small number such as 1e-5. Use the "
            f"config.json that was written with these weights."
        )
    V, drafted = sizes.pop("vocab_size"), sizes.pop("draft_vocab_size")
    if PARALLEL in found:
        checkpoint.check_size(file, TRAINED_TOKENS, values.get(TRAINED_TOKENS), 2)
        checkpoint.check_size(file, MASK_TOKEN, values.get(MASK_TOKEN), 0, V - 1)
        sizes |= {"parallel": values[TRAINED_TOKENS], "mask_token_id": values[MASK_TOKEN]}
    return EagleConfig(
        vocab_size=V,
        draft_vocab_size=0 if drafted == V else drafted,
        taps=taps,
        rope=read_rope(values, str(file)),
        norm_eps=float(eps),
        **sizes,
        **switches,
    )


def _read_sizes(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes in config.json by the names of `EagleConfig`'s fields."""
    H: Any = values.get("hidden_size")
    heads: Any = values.get("num_attention_heads")
    checkpoint.check_size(file, "hidden_size", H, 1)
    checkpoint.check_size(file, "num_attention_heads", heads, 1)
    V = values.get("vocab_size")
    found = {
        "vocab_size": V,
        "num_key_value_heads": values.get("num_key_value_heads", heads),
        "head_dim": values.get("head_dim") or H // heads,
        "intermediate_size": values.get("intermediate_size"),
        "max_position_embeddings": values.get("max_position_embeddings", 2048),
    }
    for key, size in found.items():
        checkpoint.check_size(file, key, size, 1)
    drafted = values.get("draft_vocab_size") or V
    checkpoint.check_size(file, "draft_vocab_size", drafted, 1, V)
    for key, size, expected in (
        ("target_hidden_size", values.get("target_hidden_size", H), H),
        ("num_attention_heads", heads % found["num_key_value_heads"], 0),
    ):
        if size != expected:
            raise UserError(
                f"{file}: {key} is {values[key]}, which does not fit hidden_size {H} and "
                f"{found['num_key_value_heads']} key/value heads. Use the config.json that was "
                f"written with these weights."
            )
    return {
        "vocab_size": found["vocab_size"],
        "hidden_size": H,
        "num_heads": heads,
        "num_kv_heads": found["num_key_value_heads"],
        "head_dim": found["head_dim"],
        "intermediate_size": found["intermediate_size"],
        "max_positions": found["max_position_embeddings"],
        "draft_vocab_size": drafted,
    }


def _read_taps(file: Path, values: Mapping[str, Any], served: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tapped layers; empty if the file leaves them to the default.

    Raises UserError for invalid ones, and for keys that name different layers.
    """
    convention = values.get("taps_convention", CONVENTION)
    if convention != CONVENTION:
        raise UserError(
            f"{file}: taps_convention is {quote(convention)}, expected '{CONVENTION}', in which "
            f"layer k is Hugging Face's hidden_states[k]. Renumber taps."
        )
    given = {
        "taps": values.get("taps"),
        _LAYERS: values.get(_LAYERS),
        f"eagle_config.{_LAYERS}": served.get(_LAYERS) or None,
    }
    found: dict[str, Any] = {key: layers for key, layers in given.items() if layers is not None}
    outputs = found.get(f"eagle_config.{_LAYERS}")
    if isinstance(outputs, list) and all(map(is_int, outputs)):
        found[f"eagle_config.{_LAYERS}"] = [layer + 1 for layer in outputs]
    first, taps = next(iter(found.items()), ("", []))
    numbers = isinstance(taps, list) and all(is_int(tap) and tap >= 0 for tap in taps)
    count = values.get("num_aux_hidden_states", len(taps) if numbers and taps else NUM_TAPS)
    if not numbers or len(set(taps)) != len(taps) or count != (len(taps) or NUM_TAPS):
        raise UserError(
            f"{file}: the tapped layers are {quote(taps)}, expected {quote(count)} different "
            f"layers of the target, from 0 (num_aux_hidden_states). Use the config.json that was "
            f"written with these weights."
        )
    for key, layers in found.items():
        if layers != taps:
            raise UserError(
                f"{file}: {key} is {quote(given[key])}, which are the taps {quote(layers)}, but "
                f"{first} is {quote(given[first])}. One of them was changed: use the config.json "
                f"that was written with these weights."
            )
    return tuple(taps)

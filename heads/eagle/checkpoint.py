"""Folders of EAGLE heads, in the layouts of heads/eagle/layouts.py.

For a draft vocabulary a file has `d2t` (row i is the token i + d2t[i]) and mostly `t2d` (whether a
token is drafted). Servers take the embedding from the target, which trains frozen in all of them,
so a stored one is not read. A head that drafts in one pass has `mask_hidden`, its mask token
(`pard_token` in our layout), and the number of tokens that it was trained to draft
(`num_parallel_tokens`, which servers do not read). A file without the numbers of layers has the
default of all servers.

An EAGLE-1 head has neither layers nor a draft vocabulary nor an lm_head. Its `fc` has a bias where
config.json has no `bias`, as in the original repository.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.models.draft_vocabulary import D2T, T2D, check_t2d, ids_of, is_drafted
from decoding.models.folder import WEIGHTS, load_state, read_json
from decoding.values import is_int, quote
from heads.eagle.layouts import (
    ARCHITECTURE,
    ARCHITECTURES,
    BIAS,
    BY_DEPTH,
    CONVENTION,
    LAYERS,
    READ_AS,
    SWITCHES,
    drafting_in_one_pass,
    is_first,
    layout_of,
)
from heads.eagle.model import NUM_TAPS, EagleConfig, EagleHead, read_rope
from training.heads import checkpoint
from training.heads.config_keys import get
from training.heads.published import EMBEDDING_COPY, PublishedLayout

# fields of config.json that this head has with one value only
ONLY: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_fc": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "embed_requires_grad": False,
    "layer_types": ["full_attention"],
}
# the same of an EAGLE-1 head; None: no value
_ONLY_FIRST: dict[str, Any] = {
    **dict.fromkeys(SWITCHES, False),
    **dict.fromkeys(("taps", LAYERS, "num_aux_hidden_states")),
}


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
    layout = layout_of(read_json(folder / "config.json"))
    stored = layout.with_names(load_state(folder), READ_AS)
    stored.pop(EMBEDDING_COPY, None)
    _complete_vocabulary(stored, config, file)
    described = (
        f"{config.num_taps} taps, {config.num_drafted} drafted tokens, "
        f"fc_norm={str(config.fc_norm).lower()}"
    )
    checkpoint.load_weights(head, stored, layout.stored_name, file, described)
    return head.to(device, dtype).requires_grad_(False).eval()


def _complete_vocabulary(stored: dict[str, Tensor], config: EagleConfig, file: Path) -> None:
    """Check the draft vocabulary, and add `t2d`, which servers do not need, where it is missing.

    Raises UserError for ids that are not rising, and for two tensors that contradict each other.
    """
    d2t_V = stored.get(D2T)
    if not config.draft_vocab_size:
        if d2t_V is not None and not d2t_V.any():  # the full vocabulary, written as an identity
            del stored[D2T]
            stored.pop(T2D, None)
        return
    if d2t_V is None:
        return  # reported with the other missing tensors
    found_V = is_drafted(ids_of(d2t_V, config.vocab_size, file), config.vocab_size)
    check_t2d(file, stored.get(T2D, found_V), found_V)
    stored[T2D] = found_V


def read_head_config(folder: Path) -> EagleConfig:
    """Read the shape of a head folder.

    Raises UserError for a folder of another kind, and for missing, invalid or unsupported values.
    """
    file = folder / "config.json"
    stored = read_json(file)
    layout = layout_of(stored)
    values, served = layout.flatten(stored), stored.get("eagle_config") or {}
    found = values.get("architectures")
    if not isinstance(found, list) or not set(found) & set(ARCHITECTURES):
        raise UserError(
            f"{file}: architectures is {quote(found)}, expected ['{ARCHITECTURE}'], an EAGLE-3 "
            f"head. Use `use: chain` for a language model."
        )
    first, fixed, kind = is_first(values), ONLY, "EAGLE-3"
    if first:
        kind, whole = "EAGLE-1", {"draft_vocab_size": values.get("vocab_size")}
        fixed = ONLY | _ONLY_FIRST | whole
    for key, only in fixed.items():
        given = served.get(key, values.get(key, only))
        # Model Optimizer writes null for what its training left at the default
        if given not in (only, None):
            raise UserError(
                f"{file}: {key} is {json.dumps(given)}, expected {json.dumps(only)}, as this "
                f"project has no {kind} head of another form. Use a head without this option."
            )
    sizes = _read_sizes(file, values)
    taps = _read_taps(file, values, layout)
    switches = {name: values.get(name, False) for name in SWITCHES}
    if first:
        switches[BIAS] = values.get(BIAS, True)
    one_pass = drafting_in_one_pass(layout, values)
    if one_pass:
        switches[BY_DEPTH] = values.get(BY_DEPTH, False)
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
    fc_bias = switches.pop(BIAS, False)
    if one_pass:
        (mask_key, mask), (tokens_key, tokens) = one_pass.items()
        checkpoint.check_size(file, tokens_key, tokens, 2)
        checkpoint.check_size(file, mask_key, mask, 0, V - 1)
        sizes |= {"parallel": tokens, "mask_token_id": mask}
    config = EagleConfig(
        vocab_size=V,
        draft_vocab_size=0 if drafted == V else drafted,
        taps=taps,
        rope=read_rope(values, str(file)),
        norm_eps=float(eps),
        predicts_states=first,
        fc_bias=fc_bias,
        **sizes,
        **switches,
    )
    checkpoint.check_trained(folder, config)
    return config


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


def _read_taps(file: Path, values: Mapping[str, Any], layout: PublishedLayout) -> tuple[int, ...]:
    """Return the tapped layers; empty if the file leaves them to the default.

    Raises UserError for invalid ones, and for keys that name different layers.
    """
    convention = values.get("taps_convention", CONVENTION)
    if convention != CONVENTION:
        raise UserError(
            f"{file}: taps_convention is {quote(convention)}, expected '{CONVENTION}', in which "
            f"layer k is Hugging Face's hidden_states[k]. Renumber taps."
        )
    stored = {path: found for path in layout.layers if (found := get(values, path)) is not None}
    taps: dict[str, list[int]] = {}
    for path, found in stored.items():
        numbers = isinstance(found, list) and all(map(is_int, found))
        read = [layer - layout.layers[path] for layer in found] if numbers else []
        expected = values.get("num_aux_hidden_states", len(read) or NUM_TAPS)
        valid = numbers and min(read, default=0) >= 0 and len(set(read)) == len(read)
        if not valid or expected != (len(read) or NUM_TAPS):
            raise UserError(
                f"{file}: the tapped layers are {quote(found)}, expected {quote(expected)} "
                f"different layers of the target, from {layout.layers[path]} ({path}, "
                f"num_aux_hidden_states). Use the config.json that was written with these weights."
            )
        taps[path] = read
    first = next(iter(taps), "")
    for path, read in taps.items():
        if read != taps[first]:
            raise UserError(
                f"{file}: {path} {stored[path]} are hidden_states {read}, but {first} is "
                f"{taps[first]}. Servers would read other layers than the head was trained on: "
                f"correct one of them, or use the config.json that was written with these weights."
            )
    return tuple(taps[first]) if taps else ()

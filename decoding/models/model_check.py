"""Check that a model folder's config.json describes its weights, by the safetensors headers alone.

Loaders accept contradictions: they skip layers and tensors that the configuration does not
describe, so that a different model runs. Every tensor's shape is therefore compared with the
configuration before weights are read. For other families (hf backend) only the number of layers is
compared, and the report of `transformers` is checked after loading.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decoding.errors import UserError
from decoding.models.draft_vocabulary import D2T
from decoding.models.folder import Tensors, load_state, read_config, read_headers
from decoding.models.native.weights import FAMILIES
from decoding.values import (
    ValueRule,
    check_value,
    is_int,
    is_number,
    number_where,
    optional,
    quote,
    whole_number,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors spells them
# computed on loading; older versions of transformers stored them
HARMLESS = re.compile(r".*rotary_emb\.inv_freq")
_INDEXED = re.compile(r"\.(\d+)\.")

_COUNT = whole_number(1)
_POSITIVE = number_where(lambda value: value > 0, "more than 0")
_TRUTH = ValueRule(lambda value: isinstance(value, bool), "true or false")
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_DTYPE = ValueRule(lambda value: value in _DTYPES, "float64, float32, float16 or bfloat16")
_OBJECT = ValueRule(lambda value: isinstance(value, dict), "an object with named fields")
_WORDS = ValueRule(
    lambda value: isinstance(value, list) and all(isinstance(word, str) for word in value),
    "a list of strings",
)
_TOKENS = ValueRule(
    lambda value: is_int(value) or (isinstance(value, list) and all(map(is_int, value))),
    "a token id, or a list of them",
)
_REQUIRED = dict.fromkeys(
    ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    _COUNT,
)
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "use_sliding_window")
_OPTIONAL = {
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), _COUNT),
    **dict.fromkeys(_SWITCHES, _TRUTH),
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("architectures", "layer_types"), _WORDS),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _OBJECT),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKENS),
    "draft_vocab_size": whole_number(0),
    "max_position_embeddings": whole_number(2),
    "rms_norm_eps": number_where(lambda value: 0 < value < 1, "more than 0 and less than 1"),
    "rope_theta": _POSITIVE,
    "hidden_act": ValueRule(lambda value: isinstance(value, str), "a string such as 'silu'"),
    "initializer_range": number_where(lambda value: value >= 0, "of 0 or more"),
    "attention_dropout": number_where(lambda value: 0 <= value < 1, "from 0 to less than 1"),
}
_ROPE_KINDS = ("default", *sorted(ROPE_INIT_FUNCTIONS))
_ROPE_KIND = ValueRule(
    lambda value: isinstance(value, str) and value in _ROPE_KINDS,
    f"one of {', '.join(_ROPE_KINDS)}",
)
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_ROPE = {
    **dict.fromkeys(("rope_theta", *_LLAMA3, "original_max_position_embeddings"), _POSITIVE),
    **dict.fromkeys(("rope_type", "type"), _ROPE_KIND),
}
# required fields of a kind of rope
_OF_KIND = {"llama3": _LLAMA3, **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",))}


class Expected(NamedTuple):
    """A tensor that the configuration describes."""

    name: str
    shape: list[int]
    # the fields that determine the shape
    why: str


def check_model(folder: str | Path) -> None:
    """Raise UserError for the first contradiction between a folder's config.json and its weights.

    Also raises UserError for a folder that cannot be read, and for an invalid field of config.json.
    No weights are read.
    """
    folder = Path(folder)
    config, tensors = read_config(folder), read_headers(folder)
    check_config(folder, config)
    _check_layers(folder, config, tensors)
    if config["model_type"] not in FAMILIES:
        return
    wanted = {tensor.name: tensor for tensor in expected_tensors(config)}
    if config.get("tie_word_embeddings") and HEAD in tensors:
        wanted[HEAD] = Expected(HEAD, *wanted[EMBEDDING][1:])
    for tensor in wanted.values():
        _check_tensor(folder, tensor, tensors)
    unused = sorted(name for name in tensors if name not in wanted and not HARMLESS.fullmatch(name))
    if unused:
        raise UserError(
            f"{tensors[unused[0]].file}: tensor '{unused[0]}' has no place in the "
            f"{config['model_type']} model of {folder / 'config.json'} ({_count(len(unused))}), "
            f"expected every tensor to be used. Use config.json and weights of the same model."
        )


def _check_finite(file: Path, values: Mapping[str, Any], prefix: str = "") -> None:
    """Raise UserError for a NaN or infinity in a configuration, which Python's JSON accepts."""
    for key, value in values.items():
        if isinstance(value, dict):
            _check_finite(file, value, f"{prefix}{key}.")
        elif isinstance(value, float) and not is_number(value):
            raise UserError(f"{file}: {prefix}{key} is {value}, expected a finite number.")


def _check_quantization(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError for a quantization that `transformers` does not support and would ignore."""
    found = config.get("quantization_config")
    if found is None:
        return
    # imported here: it takes seconds, and few models are quantized
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    method = found.get("quant_method") if isinstance(found, dict) else None
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise UserError(
            f"{folder / 'config.json'}: quantization_config is {quote(found)}, expected one with a "
            f"quant_method that transformers supports. Use one of "
            f"{', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}."
        )


def check_config(folder: Path, config: Mapping[str, Any], *, complete: bool = True) -> None:
    """Raise UserError for an invalid value in config.json.

    complete: also raise for a missing field of a known family's model.
    """
    _check_finite(folder / "config.json", config)
    if config["model_type"] in FAMILIES:
        _check_fields(folder, config, complete)
    else:
        _check_quantization(folder, config)


def check_end_tokens(file: Path, eos_token_id: Any, vocab_size: Any) -> None:
    """Raise UserError for an end token outside the vocabulary, with which no text would end.

    file: the file with this eos_token_id, an id or a list of them. Nothing is checked without a
    vocabulary size, which some families keep elsewhere.
    """
    ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    if is_int(vocab_size) and any(is_int(one) and not 0 <= one < vocab_size for one in ids):
        raise UserError(
            f"{file}: eos_token_id is {quote(eos_token_id)}, expected ids from 0 to "
            f"{vocab_size - 1}, as vocab_size is {vocab_size}. Use the file that was published "
            f"with these weights, or correct the id: no text would end with it."
        )


def _check_fields(folder: Path, config: Mapping[str, Any], complete: bool) -> None:
    """Raise UserError for an invalid field of a known family's config.json.

    complete: also raise for a missing field that every model needs.
    """
    file = folder / "config.json"
    missing = [key for key in _REQUIRED if key not in config]
    if missing and complete:
        raise UserError(f"{file} has no {missing[0]}, expected {_REQUIRED[missing[0]].expected}.")
    for key, rule in _REQUIRED.items():
        if key in config:
            check_value(key, config[key], rule, f"{file}: {key}")
    for key, rule in _OPTIONAL.items():
        check_value(key, config.get(key), optional(rule), f"{file}: {key}")
    check_end_tokens(file, config.get("eos_token_id"), config.get("vocab_size"))
    _check_rope(file, config)
    if config.get("quantization_config") is not None:
        raise UserError(
            f"{file}: quantization_config is {quote(config['quantization_config'])}, expected "
            f"none: quantized weights are not read here. Use the model before it was quantized."
        )
    if missing:
        return
    hidden, heads, groups = config["hidden_size"], config["num_attention_heads"], _groups(config)
    if config.get("head_dim") is None and hidden % heads:
        raise UserError(
            f"{file}: hidden_size is {hidden}, expected a multiple of num_attention_heads {heads}. "
            f"Correct one of them, or set head_dim."
        )
    _check_draft_vocabulary(file, config)
    if heads % groups:
        raise UserError(
            f"{file}: num_attention_heads is {heads}, expected a multiple of num_key_value_heads "
            f"{groups}. Correct one of them."
        )
    if _head_dim(config) % 2:
        raise UserError(
            f"{file}: head_dim is {_head_dim(config)}, expected an even number, since rotary "
            f"positions rotate pairs of channels. Correct head_dim or the number of heads."
        )


def _check_draft_vocabulary(file: Path, config: Mapping[str, Any]) -> None:
    """Raise UserError for a draft vocabulary that is too large or has no lm_head of its own."""
    size, vocabulary = config.get("draft_vocab_size") or 0, config["vocab_size"]
    if size > vocabulary:
        raise UserError(
            f"{file}: draft_vocab_size is {size}, expected at most vocab_size {vocabulary}. Use "
            f"the config.json that was written with these weights."
        )
    if size and config.get("tie_word_embeddings"):
        raise UserError(
            f"{file}: tie_word_embeddings is true, expected false with draft_vocab_size {size}, "
            f"since the lm_head has fewer rows than the embedding. Use the config.json that was "
            f"written with these weights."
        )


def _check_rope(file: Path, config: Mapping[str, Any]) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        for name, rule in _ROPE.items():
            check_value(name, rope.get(name), optional(rule), f"{file}: {key}.{name}")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        for name in _OF_KIND.get(kind, ()):
            check_value(name, rope.get(name), _POSITIVE, f"{file}: {key}.{name}")
        if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
            raise UserError(
                f"{file}: {key}.high_freq_factor is {rope['high_freq_factor']}, expected more than "
                f"low_freq_factor {rope['low_freq_factor']}. Use the config.json that was "
                f"published with these weights."
            )


def expected_tensors(config: Mapping[str, Any]) -> Iterator[Expected]:
    """Yield every tensor of a known family's model by its Hugging Face name."""
    V, C = config["vocab_size"], config["hidden_size"]
    yield Expected(EMBEDDING, [V, C], "vocab_size, hidden_size")
    yield Expected("model.norm.weight", [C], "hidden_size")
    N = config.get("draft_vocab_size")
    if N:
        yield Expected(HEAD, [N, C], "draft_vocab_size, hidden_size")
        yield Expected(D2T, [N], "draft_vocab_size")
    elif not config.get("tie_word_embeddings"):
        yield Expected(HEAD, [V, C], "vocab_size, hidden_size; tie_word_embeddings is false")
    for index in range(config["num_hidden_layers"]):
        for name, shape, why in _layer_tensors(config):
            yield Expected(f"model.layers.{index}.{name}", shape, why)


def _layer_tensors(config: Mapping[str, Any]) -> Iterator[Expected]:
    family, C, F = config["model_type"], config["hidden_size"], config["intermediate_size"]
    D = _head_dim(config)
    queries, keys = config["num_attention_heads"] * D, _groups(config) * D
    of_queries, of_keys = "num_attention_heads x head_dim", "num_key_value_heads x head_dim"
    # Qwen2 always has biases at queries, keys and values, Mistral never.
    attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias"))
    mlp_bias = family == "llama" and bool(config.get("mlp_bias"))
    for name, rows, columns, why, has_bias in (
        ("self_attn.q_proj", queries, C, of_queries, attention_bias or family == "qwen2"),
        ("self_attn.k_proj", keys, C, of_keys, attention_bias or family == "qwen2"),
        ("self_attn.v_proj", keys, C, of_keys, attention_bias or family == "qwen2"),
        ("self_attn.o_proj", C, queries, of_queries, attention_bias),
        ("mlp.gate_proj", F, C, "intermediate_size", mlp_bias),
        ("mlp.up_proj", F, C, "intermediate_size", mlp_bias),
        ("mlp.down_proj", C, F, "intermediate_size", mlp_bias),
    ):
        yield Expected(f"{name}.weight", [rows, columns], f"{why}, hidden_size")
        if has_bias:
            yield Expected(f"{name}.bias", [rows], f"a bias of a {family} model; {why}")
    yield Expected("input_layernorm.weight", [C], "hidden_size")
    yield Expected("post_attention_layernorm.weight", [C], "hidden_size")
    if family == "qwen3":
        yield Expected("self_attn.q_norm.weight", [D], "head_dim")
        yield Expected("self_attn.k_norm.weight", [D], "head_dim")


def _groups(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _check_tensor(folder: Path, wanted: Expected, tensors: Tensors) -> None:
    found = tensors.get(wanted.name)
    if found is None:
        raise UserError(
            f"{folder}: the weights have no tensor '{wanted.name}', expected one of shape "
            f"{wanted.shape} according to config.json ({wanted.why}). Use config.json and weights "
            f"of the same model."
        )
    if found.shape != wanted.shape:
        raise UserError(
            f"{found.file}: tensor '{wanted.name}' has shape {found.shape}, expected "
            f"{wanted.shape} according to {folder / 'config.json'} ({wanted.why}). Use "
            f"config.json and weights of the same model."
        )
    if wanted.name == D2T:
        if found.dtype != "I64":
            raise UserError(
                f"{found.file}: tensor '{D2T}' is stored as {found.dtype}, expected I64. Use the "
                f"file that distill.train wrote."
            )
    elif found.dtype not in FLOATS:
        raise UserError(
            f"{found.file}: tensor '{wanted.name}' is stored as {found.dtype}, expected one of "
            f"{', '.join(FLOATS)}. Use the model before it was quantized."
        )


def _check_layers(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Raise UserError for more layers than the weights hold, and for fewer in a known family."""
    keys = [key for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config]
    if not keys:
        return
    key = keys[0]
    check_value(key, config[key], _COUNT, f"{folder / 'config.json'}: {key}")
    indices = (int(match[1]) for name in tensors if (match := _INDEXED.search(name)))
    held = 1 + max(indices, default=-1)
    # Some families store layers that their causal LM does not use, such as layers for multi-token
    # prediction.
    if config[key] > held or (config["model_type"] in FAMILIES and config[key] != held):
        raise UserError(
            f"{folder / 'config.json'}: {key} is {config[key]}, but the weights hold {held} "
            f"layers, expected the same number. Use config.json and weights of the same model."
        )


def check_tied_head(folder: str | Path) -> None:
    """Raise UserError for a stored lm_head that differs from the embedding it should be tied to.

    Such a model was trained with a separate head, which a loader would drop. Reads both tensors.
    """
    config = read_config(folder)
    if config["model_type"] not in FAMILIES or not config.get("tie_word_embeddings"):
        return
    if HEAD not in read_headers(folder):
        return
    everything, both = (slice(None), slice(None)), (EMBEDDING, HEAD)
    state = load_state(folder, lambda name, _: everything if name in both else None)
    # in blocks of rows, since comparing two large tensors at once would allocate a third
    blocks = zip(*(state[name].split(4096) for name in both))
    if not all(bool((embedding == head).all()) for embedding, head in blocks):
        raise UserError(
            f"{folder}: tensor 'lm_head.weight' differs from 'model.embed_tokens.weight', but "
            f"config.json has tie_word_embeddings true, expected equal ones. Set "
            f"tie_word_embeddings to false if the model was trained with a separate head; "
            f"otherwise remove lm_head.weight."
        )


def check_loaded(folder: str | Path, info: Mapping[str, Any]) -> None:
    """Raise UserError if `transformers` loaded a model with missing, unused or reshaped tensors."""
    for kind, what in {
        "missing_keys": "is in none of the weights, and would be random",
        "unexpected_keys": "is in the weights and has no place in the model",
        "mismatched_keys": "has a shape that config.json does not describe",
    }.items():
        # a mismatch is (name, shape, shape)
        found = (entry if isinstance(entry, str) else entry[0] for entry in info.get(kind) or ())
        names = sorted(name for name in found if not HARMLESS.fullmatch(name))
        if names:
            raise UserError(
                f"{folder}: tensor '{names[0]}' {what} ({_count(len(names))}), expected weights "
                f"that config.json describes. Use config.json and weights of the same model."
            )


def _count(number: int) -> str:
    return "this one tensor" if number == 1 else f"{number} such tensors"

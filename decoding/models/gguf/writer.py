"""Writing of a Llama model folder as a GGUF file, the format of llama.cpp."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decoding.errors import UserError
from decoding.models.draft_vocabulary import check_full_vocabulary
from decoding.models.folder import read_config, read_headers, read_json
from decoding.models.gguf.vocabulary import Vocabulary, read_vocabulary
from decoding.models.model_check import check_model, expected_tensors

if TYPE_CHECKING:
    from gguf import GGUFWriter

# dtype -> names of the gguf package: of a file with it, and of a tensor
DTYPES = {
    "float32": ("ALL_F32", "F32"),
    "float16": ("MOSTLY_F16", "F16"),
    "bfloat16": ("MOSTLY_BF16", "BF16"),
}
_ROPE_KINDS = ("default", "llama3")


class _Entry(NamedTuple):
    """A tensor of the file: its name, shape and type there, and how its values are made."""

    name: str
    shape: list[int]
    kind: str
    source: str  # Hugging Face name; empty: the rope factors


def write_gguf(folder: str | Path, path: str | Path, dtype: str = "float32") -> list[str]:
    """Write a model folder to a GGUF file, and return notes about what llama.cpp does otherwise.

    dtype: float32 | bfloat16 | float16, of the matrices; vectors are always float32. Tensors are
    read one by one. Raises UserError for a folder that is not a Llama model, for what the format
    cannot express, and if the file exists or cannot be written.
    """
    folder, path = Path(folder), Path(path)
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise UserError(
            "GGUF files are written with the gguf package, which is not installed. Run pip install "
            "-e '.[gguf]' in the project's folder, or pip install gguf."
        ) from error
    if path.exists():
        raise UserError(f"{path} exists already. Delete it to convert again.")
    config = _check_folder(folder)
    vocabulary = read_vocabulary(folder, config.vocab_size)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
        _add_model(writer, folder, config, dtype)
        _add_tokenizer(writer, folder, vocabulary)
        _write_tensors(writer, folder, config, dtype)
        partial.replace(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error}). Check the permissions and the free space of its "
            f"folder."
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    if vocabulary.difference is None:
        return []
    return [
        "llama.cpp puts a blank before a text that follows a special token, and this tokenizer "
        f"does not: {vocabulary.difference}. Send such prompts as token ids."
    ]


def _check_folder(folder: Path) -> LlamaConfig:
    """Return the configuration; raise UserError for what is not a plain Llama model."""
    raw = read_config(folder)
    if raw["model_type"] != "llama":
        raise UserError(
            f"{folder}: model_type is '{raw['model_type']}', expected 'llama'. Convert other "
            f"models with llama.cpp's convert_hf_to_gguf.py."
        )
    check_model(folder)
    check_full_vocabulary(folder, "llama.cpp")
    config = LlamaConfig.from_pretrained(folder)
    rope = _rope(config)["rope_type"]
    for key, found, expected in (
        ("attention_bias", config.attention_bias, (False,)),
        ("mlp_bias", config.mlp_bias, (False,)),
        ("hidden_act", config.hidden_act, ("silu",)),
        ("rope_parameters.rope_type", rope, _ROPE_KINDS),
    ):
        if found not in expected:
            raise UserError(
                f"{folder / 'config.json'}: {key} is {found!r}, expected "
                f"{' or '.join(map(repr, expected))}: a GGUF file of this project holds no other "
                f"Llama. Convert it with llama.cpp's convert_hf_to_gguf.py."
            )
    return config


def _add_model(writer: "GGUFWriter", folder: Path, config: LlamaConfig, dtype: str) -> None:
    """Add the hyperparameters."""
    import gguf

    head_dim = int(config.head_dim or config.hidden_size // config.num_attention_heads)
    writer.add_name(folder.resolve().name)
    writer.add_file_type(gguf.LlamaFileType[DTYPES[dtype][0]])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(int(config.num_key_value_heads or config.num_attention_heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(_rope(config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: "GGUFWriter", folder: Path, vocabulary: Vocabulary) -> None:
    """Add the tokens, the special ids and the chat template."""
    tokenizer = vocabulary.tokenizer
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    writer.add_add_space_prefix(vocabulary.space_prefix)
    framed = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    writer.add_add_bos_token(framed != bare and framed[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(framed != bare and framed[-1] == tokenizer.eos_token_id)
    for add, token in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if token is not None:
            add(token)
    # the keys that llama.cpp has for tokens that end a generation
    ends = zip(_end_tokens(folder, tokenizer.eos_token_id), ("eos", "eot", "eom"))
    for token, role in ends:
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
    template = tokenizer.chat_template
    if template:
        writer.add_chat_template(template if isinstance(template, str) else template["default"])


def _end_tokens(folder: Path, eos: int | None) -> list[int]:
    """Return the ids that end a generation, the tokenizer's own first.

    Raises UserError for more ids than a GGUF file can name.
    """
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    listed = found if isinstance(found, list) else [found]
    ids = list(dict.fromkeys(one for one in (eos, *listed) if one is not None))
    if len(ids) > 3:
        raise UserError(
            f"{path}: eos_token_id and the tokenizer name {len(ids)} end tokens ({ids}), expected "
            f"at most 3, which a GGUF file can name. Remove those that the model does not write."
        )
    return ids


def _write_tensors(writer: "GGUFWriter", folder: Path, config: LlamaConfig, dtype: str) -> None:
    """Write the file: header, metadata, and the tensors one by one."""
    import gguf

    entries = list(_entries(folder, config, dtype))
    for entry in entries:
        kind = gguf.GGMLQuantizationType[entry.kind]
        width = 4 if entry.kind == "F32" else 2
        writer.add_tensor_info(
            entry.name,
            entry.shape,
            np.dtype(np.float32 if width == 4 else np.float16),
            int(np.prod(entry.shape)) * width,
            raw_dtype=kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        writer.write_tensor_data(_values(folder, config, entry))
    writer.close()


def _entries(folder: Path, config: LlamaConfig, dtype: str) -> Iterator[_Entry]:
    """Yield the tensors in the order of the file."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    if _rope(config)["rope_type"] == "llama3":
        yield _Entry("rope_freqs.weight", [_rope_factors(config).numel()], "F32", "")
    for tensor in expected_tensors(read_config(folder)):
        name = names.get_name(tensor.name, try_suffixes=(".weight",))
        assert name is not None
        # llama.cpp multiplies by norms in float32 alone
        kind = DTYPES[dtype][1] if len(tensor.shape) > 1 else "F32"
        yield _Entry(name, tensor.shape, kind, tensor.name)


def _values(folder: Path, config: LlamaConfig, entry: _Entry) -> NDArray[Any]:
    """Return the values of a tensor as the file stores them."""
    if not entry.source:
        return _rope_factors(config).numpy()
    with safe_open(read_headers(folder)[entry.source].file, framework="pt") as file:
        weight: Tensor = file.get_tensor(entry.source)
    if entry.source.endswith("q_proj.weight"):
        weight = interleave(weight, config.num_attention_heads)
    elif entry.source.endswith("k_proj.weight"):
        weight = interleave(weight, config.num_key_value_heads or config.num_attention_heads)
    if entry.kind == "BF16":  # numpy has no such type
        return weight.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    if entry.kind == "F16":
        half = weight.to(torch.float16)
        if not half.isfinite().all():
            raise UserError(
                f"{folder}: tensor '{entry.source}' has values up to {weight.abs().max():g}, "
                f"expected at most 65504 for float16. Use bfloat16 or float32."
            )
        return half.contiguous().numpy()
    return weight.to(torch.float32).contiguous().numpy()


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Return query or key rows with the two channels of each rotated pair in adjacent rows.

    Hugging Face stores the first channels of all pairs of a head, then the second ones; llama.cpp
    rotates adjacent channels.
    """
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def _rope(config: LlamaConfig) -> dict[str, Any]:
    """Return the settings of rotary positions, which transformers fills in for older folders."""
    return dict(config.rope_parameters or {})


def _rope_factors(config: LlamaConfig) -> Tensor:
    """Return the factors [head_dim / 2] by which llama.cpp divides the rotary frequencies."""
    head_dim = int(config.head_dim or config.hidden_size // config.num_attention_heads)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return (_rope(config)["rope_theta"] ** -steps / scaled).to(torch.float32)

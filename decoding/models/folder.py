"""Model folders: read config.json and safetensors, and reject damaged or unsupported ones.

A model folder is what Hugging Face's `save_pretrained` writes: config.json, tokenizer files, and
the weights as model.safetensors or as shards listed in model.safetensors.index.json. Pickled
weights (.bin) are never opened here.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from decoding.errors import UserError
from decoding.models.paths import exists
from decoding.values import is_text, quote

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CARD = "drafter_card.json"
_LONGEST_NAME = 255  # of a file
Cut = Callable[[str, list[int]], tuple[slice, ...] | None]


class TensorHeader(NamedTuple):
    """The entry of one tensor in a safetensors file."""

    file: Path
    dtype: str
    shape: list[int]


Tensors = dict[str, TensorHeader]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise UserError with the file and line if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {error.lineno} is not valid JSON ({error.msg}). Copy or download the "
            f"file again."
        ) from error
    # a ValueError is text in another encoding, or a number of more digits than Python converts
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read as JSON ({error}). Check its permissions, or copy the file "
            f"again."
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f"{path} holds a {type(value).__name__}, expected a JSON object with named fields. "
            f"Copy the file again."
        )
    return value


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return config.json of a model folder, or the fields of it that a GGUF file has.

    Raises UserError if the folder or the file is missing, empty or damaged.
    """
    folder = Path(folder)
    if is_gguf(folder):
        from decoding.models.gguf.file import read_gguf, shape_of

        return shape_of(read_gguf(folder))
    if not exists(folder):
        raise UserError(
            f"{folder} does not exist, expected a model folder. Use the path of a folder with "
            f"config.json in it."
        )
    refuse_file(folder)
    path = folder / "config.json"
    if not path.is_file():
        inside = [file.parent for file in sorted(folder.glob("*/config.json"))]
        if inside:  # such as a run's folder
            raise UserError(
                f"{folder} is not a model folder, but contains {' and '.join(map(str, inside))}. "
                f"Use the path of a model folder inside it."
            )
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        raise UserError(
            f"{folder} has no config.json (found {found}), expected a Hugging Face model folder. "
            f"Check the path."
        )
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise UserError(
            f"{path} has no model_type, expected one such as 'llama'. Use a Hugging Face model "
            f"folder."
        )
    return config


def has_config(path: str | Path) -> bool:
    """Return whether `read_config` can read a path: not one of a folder with a tokenizer alone."""
    return is_gguf(path) or (Path(path) / "config.json").is_file()


def is_gguf(path: str | Path) -> bool:
    """Return whether this is the path of a GGUF file, by its name."""
    return Path(path).suffix == ".gguf" and not Path(path).is_dir()


def refuse_file(folder: Path) -> None:
    """Raise UserError if the path of a model folder is that of a file."""
    if folder.exists() and not folder.is_dir():
        remedy = "Use the path of a folder with config.json and model.safetensors in it."
        if folder.suffix == ".gguf":
            remedy = f"Convert it once: python scripts/from_gguf.py {folder} FOLDER"
        raise UserError(f"{folder} is a file, expected a model folder. {remedy}")


def untrusted_code_error(folder: str | Path) -> UserError:
    """Return the error for a folder that defines its model or tokenizer in untrusted Python."""
    return UserError(
        f"{folder}: its model or tokenizer is defined by Python code in the folder, which is not "
        f"run by default. If you trust the code, use the folder as a target with "
        f"target.trust_remote_code=true target.backend=hf (trust_remote_code=True in Python)."
    )


def weight_files(folder: str | Path, weights: str = WEIGHTS) -> list[Path]:
    """Return the safetensors files of a folder; raise UserError if one is missing or incomplete.

    weights: the name of the file where there is no index.
    """
    folder = Path(folder)
    refuse_file(folder)
    indexed = (folder / INDEX).is_file()
    files = indexed_files(folder) if indexed else [folder / weights]
    for file in files:
        if not file.is_file():
            raise UserError(_missing_weights(folder, file))
        _read_header(file)
    return files


def indexed_files(folder: Path) -> list[Path]:
    """Return the files that a folder's index names. Raises UserError for an invalid index."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(
            f"{folder / INDEX} has no weight_map, expected the file of every tensor. Download "
            f"the index again."
        )
    for tensor, name in weight_map.items():
        if not _is_inside(name):
            raise UserError(
                f"{folder / INDEX}: weight_map assigns {quote(tensor)} to {quote(name)}, "
                f"expected the name of a file in the folder. Download the index again."
            )
    return [folder / name for name in sorted(set(weight_map.values()))]


def _is_inside(name: Any) -> bool:
    """Return whether a value can be the relative path of a file inside a folder.

    Links are allowed, since the Hub's cache consists of them.
    """
    if not is_text(name) or not name or "\0" in name or len(name) > _LONGEST_NAME:
        return False
    path = PurePosixPath(name.replace("\\", "/"))
    return not path.is_absolute() and ".." not in path.parts and ":" not in name


def _missing_weights(folder: Path, file: Path) -> str:
    pickled = sorted(p.name for p in folder.glob("*.bin"))
    if pickled:
        return (
            f"{folder} has only pickled weights ({pickled[0]}), which are not opened because a "
            f"pickle can run code. Convert them once: python scripts/to_safetensors.py {folder}"
        )
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:6])
    return f"{folder}: {file.name} is missing (found {found}). Copy or download the model again."


def read_headers(folder: str | Path, weights: str = WEIGHTS) -> Tensors:
    """Return the headers of a folder's tensors by name, without reading weights.

    weights: see `weight_files`. Raises UserError as `weight_files` does, and for a tensor that is
    in two files or is missing from the file that the index gives.
    """
    tensors: Tensors = {}
    for file in weight_files(folder, weights):
        for name, header in _read_header(file).items():
            if name in tensors:
                raise UserError(
                    f"{file}: tensor '{name}' is also in {tensors[name].file.name}, expected it in "
                    f"one file. Copy the folder again."
                )
            tensors[name] = header
    index = Path(folder) / INDEX
    if index.is_file():
        for name, place in read_json(index)["weight_map"].items():
            if name not in tensors or tensors[name].file != Path(folder) / place:
                raise UserError(
                    f"{index}: weight_map assigns '{name}' to {place}, which does not contain it. "
                    f"Copy the folder again."
                )
    return tensors


def _read_header(file: Path) -> Tensors:
    """Return the tensors of a safetensors file; raise UserError if it is damaged or incomplete."""
    try:
        with safe_open(file, framework="pt") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {
                name: TensorHeader(file, part.get_dtype(), part.get_shape())
                for name, part in parts.items()
            }
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error}), expected safetensors. Check the file's permissions."
        ) from error
    except SafetensorError as error:
        raise UserError(
            f"{file} has {file.stat().st_size} bytes and is damaged or incomplete ({error}), "
            f"expected safetensors. Copy it again."
        ) from error


def load_state(
    folder: str | Path, cut: Cut | None = None, weights: str = WEIGHTS
) -> dict[str, torch.Tensor]:
    """Return all tensors of a model folder by name, memory-mapped, in the dtype of the file.

    cut: called with each name and shape; returns the index of the part to read, or None to skip
    the tensor. weights: see `weight_files`. Raises UserError for damaged files.
    """
    state: dict[str, torch.Tensor] = {}
    for file in weight_files(folder, weights):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                if cut is None:
                    state[name] = tensors.get_tensor(name)
                    continue
                part = tensors.get_slice(name)
                index = cut(name, part.get_shape())
                if index is not None:
                    state[name] = part[index].contiguous()  # a view would keep the whole tensor
    return state


def refuse_nonfinite(folder: str | Path, state: Mapping[str, torch.Tensor]) -> None:
    """Raise UserError for a weight that is NaN or infinite.

    This reads every weight, which is fast enough for drafters.
    """
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.numel():
            least, most = (bound.item() for bound in tensor.aminmax())
            if not (math.isfinite(least) and math.isfinite(most)):
                raise UserError(
                    f"{folder}: tensor '{name}' holds non-finite weights (found {least} to "
                    f"{most}), expected finite ones. Copy or train the model again."
                )


def refuse_unsupported_attention(config: dict[str, Any], where: str) -> None:
    """Raise UserError for models whose attention is not plain full causal attention.

    config: the content of config.json. where: the start of the message.
    """
    kind = config["model_type"]
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{where}: {kind} is an encoder-decoder model, expected a decoder-only causal LM. Use "
            f"another model."
        )
    other = sorted({str(t) for t in config.get("layer_types") or [] if t != "full_attention"})
    if other:
        raise UserError(
            f"{where}: {kind} has layers of type {', '.join(other)} (a sliding-window or hybrid "
            f"model), expected full attention in every layer. Use another model."
        )
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True):
        raise UserError(
            f"{where}: {kind} has a sliding attention window of {window} tokens, expected full "
            f"attention (a Mistral without window has sliding_window null). Use another model."
        )


def sha256(path: Path) -> str:
    """Return the hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_LARGE = 64 * 2**20  # bytes from which a file's hash is cached


def hash_input(path: Path, leave_out: Collection[str] = ()) -> str:
    """Return the SHA-256 of a file, or of a model folder's files except its card and README.

    leave_out: names of further files of a folder that do not count. A path that does not exist
    gives "absent".
    """
    if path.is_file():
        return hash_file(path)
    if not path.exists():
        return "absent"
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.is_file() and file.name not in (CARD, "README.md", *leave_out):
            digest.update(f"{file.name}:{hash_file(file)}\n".encode())
    return digest.hexdigest()


def hash_file(path: Path) -> str:
    """Return a file's hash, computed once per process for large files."""
    stat = path.stat()
    if stat.st_size < _LARGE:
        return sha256(path)
    return _hash_large(path.resolve(), stat.st_size, stat.st_mtime_ns)


@functools.cache
def _hash_large(path: Path, size: int, changed_ns: int) -> str:
    return sha256(path)

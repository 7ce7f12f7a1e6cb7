"""A GGUF file: metadata by key, tensors by name and the shape of its model.

Every damaged file has an error.
"""

import functools
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.models.paths import exists
from decoding.values import ValueRule, is_text, quote, whole_number

if TYPE_CHECKING:
    from gguf import GGUFReader

COUNT, TOKEN = whole_number(1), whole_number(0)
TEXT = ValueRule(is_text, "a string")
# Hugging Face field -> key of the metadata, without the architecture before it
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
# what the gguf package raises while it reads a damaged file
_DAMAGE = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError)


class GgufFile:
    """An open GGUF file; its tensors stay on disk until they are read."""

    def __init__(self, path: str | Path) -> None:
        """Read the header of a file.

        Raises UserError if the gguf package is not installed, and for a path that is no complete
        GGUF file or only one part of a model.
        """
        self.path = Path(path)
        self._reader = _open(self.path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        parts = self._content("split.count")
        if parts is not None and parts != 1:
            raise UserError(
                f"{self.path} is one of {parts} parts of a model, expected a complete GGUF file. "
                f"Join the parts with llama.cpp's `llama-gguf-split --merge`."
            )

    def value(self, key: str, rule: ValueRule, default: Any = None) -> Any:
        """Return the metadata under a key, or the default if the file does not have the key.

        A float is the shortest decimal number that is stored as this float32, such as 1e-05.
        Raises UserError for a value that the rule does not allow, and for a missing key without a
        default.
        """
        found = self._content(key)
        if found is None and default is not None:
            return default
        if found is None or not rule.fits(found):
            raise UserError(
                f"{self.path}: {key} is {'missing' if found is None else quote(found)}, expected "
                f"{rule.expected}. Use a GGUF file that llama.cpp can run."
            )
        return found

    def keys(self) -> list[str]:
        """Return the keys of the metadata."""
        return list(self._reader.fields)

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of every tensor, in the order of PyTorch (rows first)."""
        return {
            name: [int(size) for size in reversed(tensor.shape)]
            for name, tensor in self._tensors.items()
        }

    def types(self) -> list[str]:
        """Return the types of the matrices' numbers, such as Q4_1, the most common type first."""
        counts = Counter(
            tensor.tensor_type.name for tensor in self._tensors.values() if len(tensor.shape) > 1
        )
        return [kind for kind, _ in counts.most_common()]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, dequantized to float32.

        Raises UserError for a quantization that the gguf package cannot read.
        """
        import gguf

        stored = self._tensors[name]
        try:
            values = gguf.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: tensor '{name}' is stored as {stored.tensor_type.name}, which the "
                f"gguf package cannot dequantize. Use a file in another quantization, such as Q8_0."
            ) from error
        # copied, since the file is mapped read-only
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def _content(self, key: str) -> Any:
        """Return the metadata under a key, None if the file does not have it."""
        from gguf import GGUFValueType

        field = self._reader.get_field(key)
        if field is None:
            return None
        try:
            content = field.contents()
        except _DAMAGE as error:
            raise _damaged(self.path, error) from error
        if field.types == [GGUFValueType.FLOAT32]:
            return float(str(np.float32(content)))
        return content


def read_gguf(path: str | Path) -> GgufFile:
    """Return the open file at this path, whose header is read once a process.

    Raises UserError as `GgufFile` does.
    """
    path = Path(path)
    if not path.is_file():
        return GgufFile(path)  # raises
    stat = path.stat()
    return _read_once(path.resolve(), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_once(path: Path, size: int, changed_ns: int) -> GgufFile:
    return GgufFile(path)


def _open(path: Path) -> "GGUFReader":
    """Return the reader of a GGUF file, or raise UserError as `GgufFile` does."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise UserError(
            "GGUF files are read with the gguf package, which is not installed. Run pip install "
            "-e '.[gguf]' in the project's folder, or pip install gguf."
        ) from error
    if not exists(path) or not path.is_file():
        raise UserError(f"{path} is not a file, expected a GGUF file. Check the path.")
    try:
        return GGUFReader(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error}), expected a GGUF file. Check its permissions."
        ) from error
    except _DAMAGE as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return UserError(
        f"{path} has {path.stat().st_size} bytes and is damaged, incomplete or no GGUF file "
        f"({reason}). Copy or download it again."
    )


def shape_of(file: GgufFile) -> dict[str, Any]:
    """Return the fields of a config.json that models of every architecture have.

    Raises UserError for a missing or invalid value.
    """
    kind = file.value("general.architecture", TEXT)
    sizes = ("hidden_size", "num_hidden_layers", "max_position_embeddings")
    return {
        "model_type": kind,
        "vocab_size": file.shapes().get("token_embd.weight", [0])[0],
        **{field: file.value(f"{kind}.{SIZES[field]}", COUNT) for field in sizes},
        **{f"{role}_token_id": token_id(file, role) for role in ("bos", "eos", "pad")},
    }


def end_tokens(file: GgufFile) -> list[int]:
    """Return the ids that end a text or a turn of a chat, as far as the file names them."""
    ids = [token_id(file, role) for role in ("eos", "eot", "eom")]
    return [one for one in ids if one is not None]


def token_id(file: GgufFile, role: str) -> int | None:
    """Return the id of the bos, eos, unk or pad token, None if the file names none."""
    names = {"unk": "unknown", "pad": "padding"}
    key = f"tokenizer.ggml.{names.get(role, role)}_token_id"
    return file.value(key, TOKEN) if key in file.keys() else None  # noqa: SIM118 (no dict)

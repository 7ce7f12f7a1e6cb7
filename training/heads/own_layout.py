"""Folders of heads that no server reads, in this project's own layout.

config.json has `model_type` and the fields of the head's shape; model.safetensors has the tensors
of its state dict.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from decoding.errors import UserError
from decoding.models.folder import read_json
from decoding.values import quote

Shape = TypeVar("Shape")


@dataclass(frozen=True)
class OwnLayout:
    """Keys of config.json and names of tensors (see `FolderLayout`)."""

    model_type: str
    # field of the shape -> its key, and tensor of the state dict -> its name, where they differ
    keys: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)

    def config(self, shape: Any, dtype: torch.dtype) -> dict[str, Any]:
        stored = str(dtype).removeprefix("torch.")
        values = {self.keys.get(name, name): value for name, value in asdict(shape).items()}
        return {"model_type": self.model_type, "torch_dtype": stored, **values}

    def stored_name(self, name: str) -> str:
        return self.tensors.get(name, name)

    def extensions(self, shape: Any) -> list[str]:
        return []

    def read(self, folder: Path) -> dict[str, Any]:
        """Return the values of a folder's config.json. Raises UserError for another kind."""
        file = folder / "config.json"
        values = read_json(file)
        if values.get("model_type") != self.model_type:
            raise UserError(
                f"{file}: model_type is {quote(values.get('model_type'))}, expected "
                f"'{self.model_type}'. Use `use: chain` for a language model."
            )
        return values

    def shape(self, kind: type[Shape], values: dict[str, Any]) -> Shape:
        """Return the shape, a dataclass `kind`, from valid values of config.json."""
        names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
        return kind(**{name: values[self.keys.get(name, name)] for name in names})

"""Folders of random heads in published layouts, for tests."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from decoding.models.native.rope import rope_parameters
from heads.export import form_of
from heads.registry import kind_in
from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS, HeadRow
from tests.support.tiny_targets import LLAMA3_ROPE
from training.heads.checkpoint import save_head

ROWS = {row.name: row for row in HEAD_ROWS}
PLAIN = "eagle3"
LLAMA3 = {"rope": rope_parameters({"rope_scaling": LLAMA3_ROPE})}


def saved(folder: Path, name: str = PLAIN, **fields: Any) -> tuple[HeadRow, Path]:
    """Save the random head of a row, with other fields of its shape, in this project's layout."""
    row = ROWS[name]
    other = replace(row, shape=lambda target: replace(row.shape(target), **fields))
    model = law_6.target()
    head = law_6.head_of(other, model)
    save_head(row.kind.layout, other.shape(model.config), head, folder)
    return other, folder


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def change(folder: Path, **values: Any) -> Path:
    """Change values of a folder's config.json."""
    (folder / "config.json").write_text(json.dumps(config_of(folder) | values))
    return folder


def notes_of(folder: Path) -> str:
    kind = kind_in(folder)
    return "\n".join(form_of(kind, folder, kind.read_shape(folder)).notes)

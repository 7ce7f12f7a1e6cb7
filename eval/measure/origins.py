"""Provenance of an evaluation's drafters, kept with the results.

A drafter may be moved or retrained after its evaluation, and its path may be relative to the
working folder of the evaluation. So eval.run writes the facts that eval.compare needs to
drafters.json in the run folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.drafters.registry import head_of
from decoding.interfaces import Drafter
from decoding.models.folder import CARD, read_json
from eval.statistics.schema import Row
from jobs.files import write_text
from jobs.run_files import read_object

FILE = "drafters.json"
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # per parameter


@dataclass(frozen=True)
class Origin:
    """Facts on a drafter from its folder at the time of its evaluation."""

    folder: str
    card: dict[str, Any]  # drafter_card.json; empty where there is none
    # parameters of the input embedding, of which a step reads one row; 0: tied to the lm_head
    embedding: int | None
    dtype: str  # dtype of the drafter in the evaluation
    note: str = ""  # the reason why the card was left out
    drafter_class: str = ""  # dotted name; empty: unknown, in files of earlier versions
    by_cost: bool = False  # the drafter itself chooses its drafts by measured costs

    def bytes_per_step(self, row: Row) -> int | None:
        """Return the bytes of weights that a draft step reads: the layers and the lm_head.

        None if the folder does not give the shape, or the dtype is unknown.
        """
        if self.embedding is None or self.dtype not in BYTES:
            return None
        return (row.drafter_parameters - self.embedding) * BYTES[self.dtype]

    @property
    def training_tokens(self) -> int | None:
        """Number of tokens that the drafter was distilled on, epochs included; None if unknown."""
        return self.card.get("data", {}).get("tokens_seen")  # type: ignore[no-any-return]


def origin_of(
    folder: Path, drafter_hash: str, dtype: str, drafter: Drafter | None = None
) -> Origin:
    """Read the provenance of a drafter folder whose content has this hash.

    dtype: the drafter's dtype in the evaluation. drafter: what drafted with it; None: unknown. A
    card with another hash, or without one (of a dry run), is left out.
    """
    card = read_json(folder / CARD) if (folder / CARD).is_file() else {}
    card_hash = card.get("drafter_hash")
    note = ""
    if card_hash != drafter_hash:
        if card_hash:
            note = f"the card in {folder} is of other weights than the folder's and is left out"
        card = {}
    used = (class_name(type(drafter)), drafter.capabilities.needs_costs) if drafter else ()
    return Origin(str(folder), card, _embedding(folder), dtype, note, *used)


def class_name(kind: type) -> str:
    """Return the dotted name of a class, as in the registry of drafters."""
    return f"{kind.__module__}.{kind.__qualname__}"


def write_origins(run_folder: Path, origins: Mapping[str, Origin]) -> None:
    """Write drafters.json into the run folder. origins: by drafter."""
    values = {name: dataclasses.asdict(origin) for name, origin in origins.items()}
    write_text(run_folder / FILE, json.dumps(values, indent=2) + "\n")


def read_origins(run_folder: Path) -> dict[str, Origin] | None:
    """Read a run folder's drafters.json; return None for older runs, which have none.

    Raises UserError for a damaged file.
    """
    file = run_folder / FILE
    if not file.is_file():
        return None
    return read_object(
        file,
        "Evaluate again, with another output_dir=",
        lambda values: {name: Origin(**origin) for name, origin in values.items()},
    )


def _embedding(folder: Path) -> int | None:
    """Return the parameters of the input embedding that a step does not read; 0 for a head.

    None if config.json does not give the shape.
    """
    if head_of(folder):
        return 0
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    if not {"vocab_size", "hidden_size"} <= config.keys():
        return None
    tied = config.get("tie_word_embeddings")
    return 0 if tied else int(config["vocab_size"]) * int(config["hidden_size"])

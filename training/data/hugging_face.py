"""Datasets of Hugging Face as data sources: `hf:NAME_OR_FOLDER[:SPLIT[:COLUMN]]`.

NAME is a name on the Hub, with `@CONFIG` for one of its configurations; FOLDER holds Parquet, JSONL
or Arrow files, or a saved dataset. Rows are mapped from Arrow files, or streamed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.errors import UserError

PREFIX = "hf:"
_SAVED = ("dataset_info.json", "dataset_dict.json")  # files of `save_to_disk`


@dataclass(frozen=True)
class HuggingFaceSource:
    """One split of a dataset; an empty column leaves the rows as they are."""

    name: str
    split: str = "train"
    column: str = ""
    streaming: bool = False

    @property
    def folder(self) -> Path | None:
        """Return the local folder; None for a name on the Hub."""
        path = Path(self.name).expanduser()
        return path if path.is_dir() else None

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield ("hf:NAME:SPLIT:row", columns) for every row from 1.

        With a column, the row is {"messages"}, {"conversations"} or {"text"}, as its value is.
        Raises UserError for a dataset, split or column that does not exist, and for a split with
        fewer rows than it records.
        """
        from datasets.exceptions import DatasetsError

        number = 0
        try:
            dataset = self._load()
            for number, row in enumerate(dataset, 1):
                yield f"{self}:{number}", self._record(row)
        except (OSError, ValueError, KeyError, DatasetsError) as error:
            reason = error.__cause__ or error  # a generator's error names no file and no record
            raise UserError(
                f"{self} cannot be read after row {number:,} "
                f"({type(reason).__name__}: {str(reason)[:300]}). Expected a folder or a name on "
                f"the Hub: {PREFIX}NAME_OR_FOLDER[:SPLIT[:COLUMN]]. A folder of JSON lines can "
                f"also be given without {PREFIX}, which leaves bad records out and counts them. "
                f"Where the Hub cannot be reached, give the dataset's folder"
            ) from error
        splits = getattr(dataset.info, "splits", None) or {}
        expected = splits[self.split].num_examples if self.split in splits else 0
        if expected and number < expected:
            raise UserError(
                f"{self} ended after {number:,} of {expected:,} rows. Download the dataset again"
            )

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}:{self.split}" + (f":{self.column}" if self.column else "")

    def _load(self) -> Any:
        from datasets import DatasetDict, load_dataset, load_from_disk

        folder = self.folder
        if folder is not None and any((folder / name).is_file() for name in _SAVED):
            found = load_from_disk(str(folder))
            return found[self.split] if isinstance(found, DatasetDict) else found
        name, _, config = self.name.partition("@")
        path = name if folder is None else str(folder)
        return load_dataset(path, config or None, split=self.split, streaming=self.streaming)

    def _record(self, row: dict[str, Any]) -> dict[str, Any]:
        if not self.column:
            return dict(row)
        if self.column not in row:
            raise UserError(
                f"{self} has no column '{self.column}', expected one of {', '.join(row)}"
            )
        value = row[self.column]
        first = value[0] if isinstance(value, list) and value else None
        if not isinstance(first, dict):
            return {"text": value}
        return {"conversations" if "from" in first else "messages": value}


def parse_source(source: str, streaming: bool = False) -> HuggingFaceSource:
    """Return the source that `hf:NAME_OR_FOLDER[:SPLIT[:COLUMN]]` describes.

    Raises UserError for another number of parts.
    """
    parts = source.removeprefix(PREFIX).split(":")
    if len(parts) > 3 or not all(parts):
        raise UserError(
            f"'{source}' is no source, expected {PREFIX}NAME_OR_FOLDER[:SPLIT[:COLUMN]]"
        )
    name, split, column = [*parts, *("", "train", "")[len(parts) :]]
    return HuggingFaceSource(name, split, column, streaming)

"""Chats and texts in tables: Parquet and Arrow files, and folders that `datasets` saved. Hugging
Face `datasets` does the reading.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decoding.errors import UserError

TABLE_SUFFIXES = (".parquet", ".arrow")
_SAVED = "dataset_info.json"  # what `Dataset.save_to_disk` leaves in its folder


def is_saved_dataset(path: Path) -> bool:
    """True for a folder that `Dataset.save_to_disk` wrote."""
    return (path / _SAVED).is_file()


def table_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:row", columns as a dict) for every row, counted from 1. Raises UserError for a
    file that is no such table.
    """
    import datasets

    try:
        if path.is_dir():
            table = datasets.load_from_disk(str(path))
        else:
            table = (
                datasets.Dataset.from_parquet(str(path), keep_in_memory=True)
                if path.suffix == ".parquet"
                else datasets.Dataset.from_file(str(path))
            )
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise UserError(
            f"{path}: no readable table ({error}); expected Parquet, Arrow or a saved dataset"
        ) from error
    for number, row in enumerate(table, 1):
        yield f"{path}:{number}", dict(row)

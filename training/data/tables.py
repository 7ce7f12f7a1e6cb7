"""Chats and texts in tables read by `datasets`: Parquet, Arrow, and folders that it saved."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decoding.errors import UserError

TABLE_SUFFIXES = (".parquet", ".arrow")
_SAVED = "dataset_info.json"  # written by `Dataset.save_to_disk`


def is_saved_dataset(path: Path) -> bool:
    """Return True for a folder that `Dataset.save_to_disk` wrote."""
    return (path / _SAVED).is_file()


def table_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:row", columns as a dict) for every row from 1.

    Raises UserError for other files.
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
            f"{path}: not a readable table ({error}); expected Parquet, Arrow or a saved dataset"
        ) from error
    for number, row in enumerate(table, 1):
        yield f"{path}:{number}", dict(row)

"""Records of data files: JSON, JSON lines, tables, TSV and text files, each with its place.

A record that cannot be decoded is yielded as a BadRecordError, and reading continues.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from decoding.models.paths import exists
from training.data.counts import (
    CONVERT,
    NOT_UTF8,
    TOO_DEEP,
    TOO_MANY_DIGITS,
    BadRecordError,
)
from training.data.hugging_face import HuggingFaceSource
from training.data.json_array import read_array

TABLES = (".parquet", ".arrow")
TEXT_FILES = (".txt", ".py", ".md")
COLUMNS = ".tsv"  # columns between tabs, without names and quotes
PROMPT_FILES = (".jsonl", ".json", COLUMNS, *TABLES)

Source = Path | HuggingFaceSource
Paths = str | Path | Sequence[str | Path | HuggingFaceSource]


def find_files(paths: Paths, suffixes: tuple[str, ...]) -> list[Source]:
    """Return the files at `paths`, and those inside folders sorted by name.

    Raises UserError for a missing or empty file, a file of another suffix, a folder without files
    of these suffixes, and if there are no paths.
    """
    kinds = ", ".join(suffixes)
    files: list[Source] = []
    for given in [paths] if isinstance(paths, str | Path) else paths:
        if isinstance(given, HuggingFaceSource):
            files.append(given)
            continue
        path = Path(given)
        if not exists(path):
            raise UserError(f"{path}: no such file or folder; expected {kinds}")
        if _is_saved_dataset(path):
            files.append(path)
        elif path.is_dir():
            found = [file for file in path.rglob("*") if file.suffix in suffixes and file.is_file()]
            if not found:
                raise UserError(f"{path}: the folder holds no {kinds} files")
            files += sorted(found)
        elif not path.is_file():
            raise UserError(f"{path} is neither a file nor a folder; expected {kinds}")
        elif path.suffix not in suffixes:
            raise UserError(f"{path}: unknown kind of file '{path.suffix}'; expected {kinds}")
        elif path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty; expected data ({kinds})")
        else:
            files.append(path)
    if not files:
        raise UserError(f"no data files given; expected at least one path ({kinds})")
    return files


def read_records(file: Source) -> Iterator[tuple[str, Any]]:
    """Yield ("file:line", decoded value or BadRecordError) for every record.

    A text file is one record {"text": its content}, a line of columns {"columns": its cells}.
    Raises UserError for an unreadable file or table, for a broken JSON array, and for JSON in
    UTF-16 or UTF-32.
    """
    if isinstance(file, HuggingFaceSource):
        yield from file.records()
        return
    if file.is_dir() or file.suffix in TABLES:
        yield from _read_table(file)
        return
    try:
        stream = file.open("rb")
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}). Check its permissions"
        ) from error
    with stream:
        head = stream.read(4096)
        wide = b"\0" in head  # UTF-16 or UTF-32, which can be valid UTF-8 too
        if file.suffix in TEXT_FILES:
            try:
                text = {"text": file.read_text(encoding="utf-8")}
                yield str(file), BadRecordError(NOT_UTF8) if wide else text
            except UnicodeDecodeError:
                yield str(file), BadRecordError(NOT_UTF8)
            return
        if wide:
            raise UserError(f"{file} holds NUL bytes; expected UTF-8. {CONVERT}")
        start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(0)
        if start.startswith(b"[") and file.suffix != COLUMNS:
            yield from read_array(file, stream)
            return
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{file}:{number}", (_columns if file.suffix == COLUMNS else _decode)(line)


def find_data_files(folder: Path) -> list[Path]:
    """Return all files inside a folder, sorted by name."""
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _is_saved_dataset(path: Path) -> bool:
    """Return whether `path` is a folder that `datasets.Dataset.save_to_disk` wrote."""
    return (path / "dataset_info.json").is_file()


def _read_table(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:row", columns as a dict) for every row from 1.

    Raises UserError for an unreadable table.
    """
    from datasets import Dataset, exceptions, load_from_disk
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        if path.is_dir():
            rows = iter(load_from_disk(str(path)))
        elif path.suffix == ".parquet":
            batches = ParquetFile(path).iter_batches(1024)
            rows = (row for batch in batches for row in batch.to_pylist())
        else:
            rows = iter(Dataset.from_file(str(path)))
        for number, row in enumerate(rows, 1):
            yield f"{path}:{number}", dict(row)
    except (OSError, ValueError, exceptions.DatasetGenerationError) as error:
        raise UserError(
            f"{path} is not a readable table after row {number:,} ({error}); expected Parquet, "
            f"Arrow or a saved dataset"
        ) from error


def _columns(line: bytes) -> Any:
    try:
        return {"columns": line.decode().rstrip("\r\n").removeprefix("\ufeff").split("\t")}
    except UnicodeDecodeError:
        return BadRecordError(NOT_UTF8)


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return BadRecordError(NOT_UTF8)
    except json.JSONDecodeError:
        return BadRecordError("not JSON")
    except RecursionError:
        return BadRecordError(TOO_DEEP)
    except ValueError:
        return BadRecordError(TOO_MANY_DIGITS)

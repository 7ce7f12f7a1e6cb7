"""Cache of tokenized samples on disk: written once, and mapped by all ranks and later stages.

The name of a cache is a hash of all that its tokens depend on: the files, the tokenizer, the chat
template and the settings. One process writes it while the others wait for its lock.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from decoding.errors import UserError
from decoding.models.native.library import cache_folder
from decoding.values import check_choice
from jobs import ranks
from jobs.amounts import size as amount
from training.config import CACHES, DataConfig
from training.data.chat import template_source
from training.data.counts import print_note
from training.data.hugging_face import HuggingFaceSource
from training.data.mapped_tensors import ArrayWriter, check_arrays, lock_path, map_arrays
from training.data.records import Source, find_data_files
from training.data.token_store import DTYPES, MemorySink, Sink, StoredSamples

AUTO_BYTES = 2**25  # data.cache=auto writes a cache for more bytes than this
WORKER_BYTES = 2**28  # of files, which repay the seconds in which other processes start
MOST_WORKERS = 8  # that one process which reads files keeps busy
_VERSION = 1  # of the format and of what tokens depend on in this code
_ENDS = 2**16  # bytes at both ends of a file that its identity includes
_SETTINGS = ("template", "max_length", "max_samples", "max_bad", "train_on")


@dataclass
class Report:
    """What tokenizing a split printed, and the number of valid records that it found."""

    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    found: int = 0


def load_or_tokenize(
    tokenizer: Any,
    data: DataConfig,
    texts: Sequence[Source],
    chats: Sequence[Source],
    key: str,
    tokenize: Callable[[Sink, int], Report],
    show: bool,
) -> tuple[StoredSamples, Report]:
    """Return the samples that `tokenize` writes, from memory or a cache as data.cache chooses.

    key: further content of the cache's name. tokenize: receives a sink and the number of processes.
    show: print where a new cache is written. Raises UserError for a full disk, and for a cache that
    was altered.
    """
    check_choice("data.cache", data.cache, CACHES)
    size = sum(_size(source) for source in (*texts, *chats))
    in_memory = data.cache == "none" or (data.cache == "auto" and size < AUTO_BYTES)
    workers = _workers(data.workers, 0 if in_memory else size)
    if in_memory:
        sink = MemorySink()
        report = tokenize(sink, workers)
        return StoredSamples(sink.arrays()), report
    root = Path(data.cache_folder).expanduser() if data.cache_folder else cache_folder() / "tokens"
    folder = root / _name(tokenizer, data, texts, chats, key)
    other = "Free some space, set data.cache_folder to another disk, or use data.cache=none"
    with lock_path(folder, other):
        found = map_arrays(folder)
        if found is None:
            if folder.exists():
                print_note(f"{folder} is incomplete and is written again")
            if show:
                print(f"tokens: at most some {amount(size)} are written to {folder}")
            with ArrayWriter(folder, DTYPES, other) as writer:
                report = tokenize(writer, workers)
                writer.finish(asdict(report))
            found = map_arrays(folder)
        elif ranks.rank() == 0:
            if show:
                print(f"tokens: read from {folder}")
            check_arrays(folder, f"Delete {folder}; it is written again")
            for note in found[1]["notes"]:
                print_note(note)
    if found is None:
        raise UserError(f"{folder} was removed while it was used. Run again")
    arrays, metadata = found
    return StoredSamples(arrays), Report(**metadata)


def _workers(configured: int, size: int) -> int:
    """Return the number of processes that tokenize `size` bytes: data.workers, or one per core.

    On two cores one process is as fast, as its tokenizer has a thread on each.
    """
    if configured < 0:
        raise UserError(f"data.workers is {configured}, expected 0 (one per core) or more")
    cores = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    return configured or (cores if cores > 2 and size >= WORKER_BYTES else 1)


def _name(
    tokenizer: Any, data: DataConfig, texts: Sequence[Source], chats: Sequence[Source], key: str
) -> str:
    content = {
        "version": [_VERSION, transformers.__version__, tokenizers.__version__],
        "key": [key, platform.python_version()],
        "settings": {name: vars(data)[name] for name in _SETTINGS},
        "tokenizer": _describe_tokenizer(tokenizer),
        "chat_template": template_source(tokenizer, data.template) if chats else "",
        "texts": [_identity(source) for source in texts],
        "chats": [_identity(source) for source in chats],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def _describe_tokenizer(tokenizer: Any) -> list[str]:
    """Return all that decides a tokenizer's ids. Raises UserError for a slow one."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{tokenizer.name_or_path}: a slow tokenizer cannot be described, which a cache needs. "
            f"Save a fast one (tokenizer.json) to the folder, or use data.cache=none"
        )
    tokenizer("")  # resets truncation and padding, which are part of the description
    return [
        type(tokenizer).__name__,
        tokenizer.backend_tokenizer.to_str(),
        json.dumps({name: str(token) for name, token in tokenizer.special_tokens_map.items()}),
        json.dumps([str(token) for token in tokenizer.all_special_tokens]),
        str(tokenizer.split_special_tokens),
    ]


def _identity(source: Source) -> list[Any]:
    """Return what changes with a source's content: path, size, time and both ends of its files."""
    if isinstance(source, HuggingFaceSource) and source.folder is None:
        from datasets import load_dataset_builder

        name, _, config = source.name.partition("@")
        try:  # the folder's name holds the version and the hash of the files
            return [str(source), load_dataset_builder(name, config or None).cache_dir]
        except (OSError, ValueError) as error:
            raise UserError(f"{source} cannot be read: {str(error)[:300]}") from error
    return [str(source), *(_file_identity(file) for file in _files(source))]


def _file_identity(file: Path) -> list[Any]:
    found = file.stat()
    with file.open("rb") as stream:
        digest = hashlib.sha256(stream.read(_ENDS))
        stream.seek(max(0, found.st_size - _ENDS))
        digest.update(stream.read())
    return [str(file.resolve()), found.st_size, found.st_mtime_ns, digest.hexdigest()]


def _files(source: Source) -> list[Path]:
    path = source.folder if isinstance(source, HuggingFaceSource) else source
    if path is None:
        return []
    return find_data_files(path) if path.is_dir() else [path]


def _size(source: Source) -> int:
    """Return the bytes of a source's files; those of a name on the Hub count as many."""
    if isinstance(source, HuggingFaceSource) and source.folder is None:
        return AUTO_BYTES
    return sum(os.path.getsize(file) for file in _files(source))

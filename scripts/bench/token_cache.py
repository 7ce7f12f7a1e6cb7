"""Tokens per second of writing the cache of tokens beside the bare tokenizer, and peak memory.

The bare tokenizer encodes the same characters, already rendered and in memory, with `encode_batch`
in batches of the same size. Text of a given size is repeated from real files. Memory is that of all
processes, in which shared pages count once.

    python scripts/bench/token_cache.py target=MODEL file=CHATS.json megabytes=32
"""

import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from decoding.models.text.templates import render
from decoding.models.text.tokenizer import load_tokenizer
from jobs.paths import resolve, resolve_model
from scripts.bench import common
from scripts.usage import run_script
from training.config import DataConfig
from training.data.counts import Counts
from training.data.from_config import read_samples
from training.data.readers import iterate_chats, iterate_texts, read_chats, read_texts
from training.data.samples import BATCH
from training.data.token_store import sample_lengths


@dataclass
class Options(common.BenchOptions):
    target: str = "embedded:target"  # model folder whose tokenizer is used
    file: str = "embedded:chats"  # chats (.json) or texts (.jsonl) that are repeated
    megabytes: float = 8.0  # size of the repeated file
    workers: int = 0  # data.workers


def repeat_records(file: Path, target: Path, size: int) -> None:
    """Repeat the records of a file up to `size` bytes, in an array (chats) or lines (texts)."""
    if file.suffix == ".json":
        records = [json.dumps({"messages": chat.messages}) for chat in read_chats(file)[0]]
        begin, between, end = "[", ",\n", "]"
    else:
        records = [json.dumps({"text": text}) for text in read_texts(file)[0]]
        begin, between, end = "", "\n", ""
    written = 0
    with target.open("w") as out:
        for record in itertools.cycle(records):
            written += out.write((between if written else begin) + record)
            if written >= size:
                break
        out.write(end)


def bare_rate(tokenizer: Any, file: Path) -> float:
    """Return the tokens per second of `encode_batch` on the first 16 MB of a file."""
    chats = file.suffix == ".json"
    found: Iterator[str]
    if chats:
        found = (render(tokenizer, chat.messages) for chat in iterate_chats(file, Counts()))
    else:
        found = iterate_texts(file, Counts())
    texts, batches, size = [], [], 0
    for text in found:
        texts.append(text)
        size += len(text)
        if sum(map(len, texts)) >= BATCH:
            batches.append(texts)
            texts = []
        if size > 16e6:
            break
    start, tokens = time.perf_counter(), 0
    for batch in [*batches, texts]:
        encodings = tokenizer.backend_tokenizer.encode_batch(batch, add_special_tokens=not chats)
        tokens += sum(len(encoding) for encoding in encodings)
    return tokens / (time.perf_counter() - start)


def memory() -> int:
    """Return the bytes of this process and of those it started."""
    total, this = 0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


@contextmanager
def peak_memory(every: float = 5.0) -> Iterator[list[int]]:
    """Yield a list that holds the most bytes in use at any time, read every `every` seconds."""
    ended, found = threading.Event(), [memory()]

    def watch() -> None:
        while not ended.wait(every):
            found[0] = max(found[0], memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def main() -> None:
    """Print one line: kind, size, both rates, their ratio, and the growth of peak memory."""
    chosen = common.read_options(Options)
    tokenizer = load_tokenizer(resolve_model(chosen.target))
    source = resolve(chosen.file)
    chats = source.suffix == ".json"
    with TemporaryDirectory() as place:
        file = Path(place, "repeated").with_suffix(source.suffix)
        repeat_records(source, file, int(chosen.megabytes * 1e6))
        bare = bare_rate(tokenizer, file)
        data = DataConfig(max_length=2048, cache="disk", cache_folder=place, workers=chosen.workers)
        (data.chats if chats else data.texts).append(str(file))
        before = memory()
        with peak_memory() as peak:
            start = time.perf_counter()
            samples = read_samples(tokenizer, data, "train", show=False)
            seconds = time.perf_counter() - start
        tokens = int(sample_lengths(samples).sum())
    print(
        f"{'chats' if chats else 'texts'} {chosen.megabytes:g} MB: {tokens:,} tokens, cache "
        f"{tokens / seconds:,.0f} tokens/s, bare {bare:,.0f} tokens/s, ratio "
        f"{tokens / seconds / bare:.2f}, peak memory {before / 1e6:,.0f} MB before, "
        f"{peak[0] / 1e6:,.0f} MB at most"
    )


if __name__ == "__main__":
    run_script(main)

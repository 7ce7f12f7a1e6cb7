"""Tokens per second of writing the cache of tokens beside the bare tokenizer, and peak memory.

The bare tokenizer encodes the same characters, already rendered and in memory, with `encode_batch`
in batches of the same size. Text of a given size is repeated from real files.

    python scripts/bench/token_cache.py target=MODEL file=CHATS.json megabytes=32
"""

import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decoding.models.text.templates import render
from decoding.models.text.tokenizer import load_tokenizer
from jobs.paths import resolve, resolve_model
from scripts.bench import common
from training.config import DataConfig
from training.data.from_config import read_samples
from training.data.readers import read_chats, read_texts
from training.data.samples import BATCH
from training.data.token_store import sample_lengths


@dataclass
class Options(common.BenchOptions):
    target: str = "embedded:target"  # model folder whose tokenizer is used
    file: str = "embedded:chats"  # chats (.json) or texts (.jsonl) that are repeated
    megabytes: float = 8.0  # size of the repeated file


def repeat_lines(file: Path, target: Path, size: int) -> None:
    """Write the records of a file as JSON lines, repeated up to `size` bytes."""
    chats = file.suffix == ".json"
    if chats:
        lines = [json.dumps({"messages": chat.messages}) for chat in read_chats(file)[0]]
    else:
        lines = [json.dumps({"text": text}) for text in read_texts(file)[0]]
    written = 0
    with target.open("w") as out:
        while written < size:
            for line in lines:
                written += out.write(line + "\n")


def bare_rate(tokenizer: Any, file: Path, chats: bool) -> float:
    """Return the tokens per second of `encode_batch` on the first 16 MB of a file."""
    texts, batches, size = [], [], 0
    with file.open() as lines:
        for line in lines:
            record = json.loads(line)
            text = render(tokenizer, record["messages"]) if chats else record["text"]
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


def main() -> None:
    """Print one line: kind, size, both rates, their ratio, and the growth of peak memory."""
    chosen = common.read_options(Options)
    tokenizer = load_tokenizer(resolve_model(chosen.target))
    source = resolve(chosen.file)
    chats = source.suffix == ".json"
    with TemporaryDirectory() as place:
        file = Path(place, "repeated.jsonl")
        repeat_lines(source, file, int(chosen.megabytes * 1e6))
        bare = bare_rate(tokenizer, file, chats)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        data = DataConfig(max_length=2048, cache="disk", cache_folder=place)
        (data.chats if chats else data.texts).append(str(file))
        start = time.perf_counter()
        samples = read_samples(tokenizer, data, "train", show=False)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tokens = int(sample_lengths(samples).sum())
    print(
        f"{'chats' if chats else 'texts'} {chosen.megabytes:g} MB: {tokens:,} tokens, cache "
        f"{tokens / seconds:,.0f} tokens/s, bare {bare:,.0f} tokens/s, ratio "
        f"{tokens / seconds / bare:.2f}, peak memory {before / 1e3:,.0f} MB before, "
        f"{peak / 1e3:,.0f} MB after"
    )


if __name__ == "__main__":
    common.run_script(main)

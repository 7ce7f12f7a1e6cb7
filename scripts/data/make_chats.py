"""Extract the embedded chats and prompts from the standard library and write them to assets/.

    python scripts/data/make_chats.py

- chats.json: functions of the training split in ShareGPT form, a sample of at most 1.4 MB.
- prompts.jsonl: held-out functions with docstrings as evaluation prompts, the real body as
  reference.
- held_out_chats.json: other held-out functions in ShareGPT form, for held-out loss and acceptance
  while training.

A hash of the record's name chooses the samples, so the same Python writes the same files.
"""

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.usage import show_usage
from training.data import corpus

FOLDER = Path(__file__).resolve().parents[2] / "assets"
MAX_CHATS_BYTES = 1_400_000
MAX_HELD_OUT_BYTES = 180_000
MAX_LINES = 40
MIN_PROMPT_LINES = 3
PROMPTS = 160
PROMPTS_PER_MODULE = 12  # one large module must not become the benchmark
ROLE_NAMES = {"user": "human", "assistant": "gpt"}


def main() -> None:
    """Write the three files and print their sizes."""
    show_usage(__doc__)
    prompts = choose_prompts()
    taken = {function.request for function in prompts}
    held_out = [
        chat
        for chat in corpus.chats("held_out")
        if all(turn["content"] not in taken for turn in chat)
    ]
    write_lines(
        "prompts.jsonl", [json.dumps(prompt(function), ensure_ascii=False) for function in prompts]
    )
    write_array("chats.json", sample(corpus.chats("train"), MAX_CHATS_BYTES))
    write_array("held_out_chats.json", sample(held_out, MAX_HELD_OUT_BYTES))


def choose_prompts() -> list[corpus.Function]:
    """Return held-out functions with a docstring, a few per module, no two with equal requests."""
    chosen: dict[str, corpus.Function] = {}
    of_module: Counter[str] = Counter()
    candidates = sorted(
        corpus.functions("held_out"),
        key=lambda function: rank(f"{function.module}.{function.name}"),
    )
    for function in candidates:
        lines = function.body.count("\n") + 1
        if (
            not function.docstring
            or not MIN_PROMPT_LINES <= lines <= MAX_LINES
            or function.request in chosen
        ):
            continue
        if of_module[function.module] < PROMPTS_PER_MODULE and len(chosen) < PROMPTS:
            of_module[function.module] += 1
            chosen[function.request] = function
    return list(chosen.values())


def prompt(function: corpus.Function) -> dict[str, object]:
    """Return the evaluation record of a function."""
    return {
        "id": f"{function.module}:{function.name}",
        "category": "method" if "." in function.name else "function",
        "turns": [function.request],
        "reference": [function.body],
    }


def sample(chats: list[corpus.Messages], max_bytes: int) -> list[str]:
    """Return ShareGPT records in hashed order, at most `max_bytes`, without overlong answers."""
    records: dict[str, str] = {}
    for chat in chats:
        if any(
            turn["content"].count("\n") >= MAX_LINES for turn in chat if turn["role"] == "assistant"
        ):
            continue
        turns = [{"from": ROLE_NAMES[turn["role"]], "value": turn["content"]} for turn in chat]
        name = hashlib.sha256(json.dumps(turns).encode()).hexdigest()[:12]
        records[name] = json.dumps({"id": name, "conversations": turns}, ensure_ascii=False)
    kept, size = [], 0
    for name in sorted(records):
        size += len(records[name].encode()) + 2
        if size > max_bytes:
            break
        kept.append(records[name])
    return kept


def rank(name: str) -> str:
    """Return a hash of a name, to sort by in a stable and arbitrary order."""
    return hashlib.sha256(name.encode()).hexdigest()


def write_array(name: str, records: list[str]) -> None:
    """Write a JSON array with one record per line."""
    write_lines(name, ["[", *(record + "," for record in records[:-1]), records[-1], "]"])


def write_lines(name: str, lines: list[str]) -> None:
    """Write lines as UTF-8 and print their number and size."""
    path = FOLDER / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path}: {len(lines)} lines, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()

"""Reading of a log in any format, told apart by its content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decoding.errors import UserError
from eval.logged.entries import Entry, Log, Message, read_text
from eval.logged.objects import EXPECTED as OBJECT
from eval.logged.objects import (
    OUTPUT_IDS,
    OUTPUT_TEXTS,
    NoOutputError,
    entries_in,
    has_failed,
    read_objects,
    read_requests,
)
from eval.logged.published import EXPECTED as TENSORS
from eval.logged.published import OPEN, read_tensors
from eval.logged.records import RECORDS, read_run
from jobs.paths import resolve
from training.data.readers import CHAT_KEYS, read_chats
from training.data.records import TEXT_FILES

EXPECTED = f"{TENSORS}, or JSON: {OBJECT}, or a chat"


def read_log(name: str, requests: str = "") -> Log:
    """Return the entries of a log.

    name: a file, or a run folder of eval.run. requests: batch file with the requests of a log of
    responses; empty: the log has them. Raises UserError, with the line, for a malformed log, and
    for one without outputs.
    """
    path = resolve(name)
    if path.is_dir() or path.name == RECORDS:
        return read_run(path if path.is_dir() else path.parent)
    content = read_text(path, EXPECTED)
    start = content.lstrip().removeprefix("\ufeff").lstrip()
    if start.startswith(OPEN):
        log = Log("tensors of token ids", read_tensors(path, content), {})
    elif start.startswith(("{", "[")):
        log = _read_json(path, requests)
    elif not start:
        raise UserError(f"{path} is empty, expected {EXPECTED}.")
    else:
        line = content[: content.index(start)].count("\n") + 1
        first = start.splitlines()[0]
        raise UserError(f"{path}:{line}: found {first[:40]!r}, expected {EXPECTED}.")
    if not log.entries:
        reasons = "; ".join(f"{len(places)} {why}" for why, places in log.left_out.items())
        raise UserError(f"{path} holds no outputs ({reasons or 'no records'}).")
    return log


def _read_json(path: Path, requests: str) -> Log:
    if path.suffix in TEXT_FILES:
        raise UserError(f"{path} holds JSON, expected the suffix .jsonl or .json. Rename it.")
    bodies = read_requests(resolve(requests)) if requests else {}
    entries: list[Entry] = []
    left_out: dict[str, list[str]] = {}
    for place, record in read_objects(path):
        if not entries and not left_out and _is_chat(record):
            return Log("chats", _chats(path), {})
        try:
            found, without = entries_in(record, place, bodies)
        except NoOutputError as reason:
            found, without = [], [str(reason)]
        entries += found
        for why in without:
            left_out.setdefault(why, []).append(place)
    return Log("JSON", entries, left_out)


def _is_chat(record: dict[str, Any]) -> bool:
    """Return whether a record is a chat, and not a pair of messages and an output."""
    apart = (*OUTPUT_IDS, *OUTPUT_TEXTS, "choices")
    is_alpaca = "instruction" in record
    if has_failed(record) or not any(key in record for key in CHAT_KEYS):
        return False
    return is_alpaca or not any(key in record for key in apart)


def _chats(path: Path) -> list[Entry]:
    """Return every answer of the chats in a file. Raises UserError for any bad record."""
    chats, _ = read_chats(path, max_bad=0.0)
    return [
        Entry(
            chat.source,
            message["content"],
            prompt=list[Message](chat.messages[:at]),
            id=chat.id,
            turn=sum(earlier["role"] == "assistant" for earlier in chat.messages[:at]),
        )
        for chat in chats
        for at, message in enumerate(chat.messages)
        if message["role"] == "assistant"
    ]

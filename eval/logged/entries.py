"""Outputs as a log holds them, before they are tokenized, and the errors that name their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from decoding.values import is_int, lone_surrogate
from eval.config import BenchmarkConfig
from jobs.run_files import json_kind

Message = dict[str, str]  # {"role", "content"}


@dataclass(frozen=True, eq=False)
class Entry:
    """One output of a log, compared by identity.

    prompt: token ids, the messages of a chat, plain text, or None if the log does not hold it.
    output: token ids or text.
    """

    place: str  # "file:line"
    output: list[int] | str
    prompt: list[int] | list[Message] | str | None = None
    # whether a prompt of text is a user's turn, which may need a template; else the target read it
    # as it is
    is_turn: bool = True
    id: str = ""  # of the prompt; empty: the log has none
    turn: int = 0
    sample: int = 0  # number among the outputs of one request
    category: str = ""
    text: str | None = None  # the output's text beside its ids, to compare
    prompt_tokens: int | None = None  # counts in the log, to compare
    output_tokens: int | None = None
    # max_new_tokens; None: not known
    limit: int | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class Log:
    """The entries of a log.

    left_out: reason -> places of responses and choices without an output, such as failed requests.
    """

    kind: str  # the format, in words
    entries: list[Entry]
    left_out: dict[str, list[str]]
    # settings of the prompts; None: the log does not have them
    benchmark: BenchmarkConfig | None = None


def wrong(place: str, found: str, expected: str) -> UserError:
    """Return the error for a malformed place of a log."""
    return UserError(f"{place}: found {found}, expected {expected}.")


def read_text(path: Path, expected: str) -> str:
    """Return the text of a file. Raises UserError, with the line, for bytes that are not UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise wrong(f"{path}:{line}", "bytes that are not UTF-8", expected) from error


def ids_of(value: Any, place: str, key: str) -> list[int]:
    """Return a list of token ids. Raises UserError for anything else."""
    if not isinstance(value, list):
        raise wrong(place, f"{json_kind(value)} as {key}", "a list of token ids")
    for one in value:
        if not is_int(one) or one < 0:
            raise wrong(place, f"{one!r:.40} in {key}", "token ids: whole numbers from 0 up")
    return value


def text_in(value: Any, place: str, key: str) -> str:
    """Return a text. Raises UserError for anything else, and for half a character."""
    if not isinstance(value, str):
        raise wrong(place, f"{json_kind(value)} as {key}", "text")
    if lone_surrogate(value) is not None:
        raise wrong(place, f"an unpaired surrogate in {key}", "Unicode text")
    return value


def count_in(value: Any, place: str, key: str) -> int | None:
    """Return a number of tokens, or None. Raises UserError for anything else."""
    if value is not None and (not is_int(value) or value < 0):
        raise wrong(place, f"{value!r:.40} as {key}", "a number of tokens")
    return value


def messages_of(value: Any, place: str) -> list[Message]:
    """Return the messages of a chat request; contents in parts of text are joined.

    Raises UserError for other values, and for parts that are not text.
    """
    if not isinstance(value, list) or not value:
        raise wrong(place, f"{value!r:.40} as messages", 'a list of {"role", "content"}')
    found = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong(place, f"{message!r:.40} in messages", '{"role", "content"}')
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            content = "".join(text_in(part, place, "a part of a message") for part in parts)
        found.append({"role": message["role"], "content": text_in(content, place, "content")})
    return found


def named(places: Sequence[str]) -> str:
    """Return the first places and the number of others."""
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return ", ".join(places[:3]) + more

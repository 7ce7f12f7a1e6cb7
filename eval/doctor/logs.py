"""Logged answers of a served target: chats, pairs of prompt and answer, and OpenAI's responses.

A record is a chat as in training (`conversations`, `messages` or Alpaca), whose last answer counts;
a pair {"prompt", "answer"} (or `completion`, `response`, `output`); or what a client or proxy of an
OpenAI-compatible server stores: `choices` of a response beside the `messages` or the `prompt` of
its request, at the top or within {"request", "response"}, each also within "body" as in batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decoding.errors import UserError
from training.data.chat import Encoded, render_batch, render_text
from training.data.counts import BadRecordError, Counts
from training.data.packing import Sample
from training.data.readers import CHAT_KEYS, MAX_BAD, parse_chat
from training.data.records import find_files, read_records

ANSWERS = ("answer", "completion", "response", "output")
EXPECTED = (
    "chats that end with an answer, objects with prompt and answer, or requests with the choices "
    "of their response"
)


@dataclass(frozen=True)
class LoggedAnswer:
    """An answer, with the messages before it."""

    messages: list[dict[str, str]]  # {"role", "content"}, the answer last
    ended: bool  # whether the target is known to have ended it
    place: str  # "file:line"


def read_logs(path: Path) -> list[LoggedAnswer]:
    """Read the answers of a JSON Lines file, a JSON array, or a folder of them, in their order.

    Bad records are counted and reported. Raises UserError for a missing or empty file, and if more
    than one in a hundred records is bad.
    """
    counts, found = Counts(), []
    for file in find_files(path, (".jsonl", ".json")):
        for place, record in read_records(file):
            try:
                found.append(_parse(record, place))
            except BadRecordError as reason:
                counts.skip(str(reason), place)
            else:
                counts.used += 1
    if not counts.read:
        raise UserError(f"{path} holds no records, expected {EXPECTED}.")
    counts.check("logs", EXPECTED, MAX_BAD)
    return found


def _parse(record: Any, place: str) -> LoggedAnswer:
    """Return the answer in a record. Raises BadRecordError for an invalid one."""
    if isinstance(record, BadRecordError):
        raise record
    if not isinstance(record, dict):
        raise BadRecordError("found no JSON object")
    request = {**record, **_inner(record, "request")}
    response = {**record, **_inner(record, "response")}
    ended = False
    text = next((record[key] for key in ANSWERS if isinstance(record.get(key), str)), None)
    if isinstance(response.get("choices"), list):
        text, ended = _choice(response["choices"])
    elif "instruction" in record or (text is None and any(key in record for key in CHAT_KEYS)):
        messages = parse_chat(record, place).messages
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise BadRecordError("the chat does not end with an answer")
        return LoggedAnswer(messages, False, place)
    if not isinstance(text, str) or not text:
        raise BadRecordError(f"no answer (choices, {', '.join(ANSWERS)})")
    turns = request.get("messages")
    if turns is None and isinstance(request.get("prompt"), str):
        turns = [{"role": "user", "content": request["prompt"]}]
    if not isinstance(turns, list):
        raise BadRecordError("no request (messages or prompt)")
    turns = [*map(_plain, turns), {"role": "assistant", "content": text}]
    return LoggedAnswer(parse_chat({"messages": turns}, place).messages, ended, place)


def _inner(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object under a key, or in its body; empty if there is none."""
    found = record.get(key)
    if isinstance(found, dict) and isinstance(found.get("body"), dict):
        found = found["body"]
    return found if isinstance(found, dict) else {}


def _choice(choices: list[Any]) -> tuple[Any, bool]:
    """Return the text of a response's first choice, and whether a stop token ended it."""
    first = choices[0] if choices and isinstance(choices[0], dict) else {}
    message = first.get("message")
    text = message.get("content") if isinstance(message, dict) else first.get("text")
    return text, first.get("finish_reason") == "stop"


def _plain(turn: Any) -> Any:
    """Return a message whose list of text parts is one string."""
    parts = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(parts, list):
        return turn
    found = [part.get("text") for part in parts if isinstance(part, dict)]
    texts = [text for text in found if isinstance(text, str)]
    if len(texts) != len(parts):
        raise BadRecordError("a message has parts other than text")
    return {**turn, "content": "".join(texts)}


def log_samples(
    logs: Sequence[LoggedAnswer],
    tokenizer: Any,
    template: str,
    as_text: bool,
    stops: Sequence[int],
    max_length: int,
) -> list[Sample]:
    """Return the answers as samples of prompt and answer, of which the answer alone is supervised.

    The end token counts only if the target is known to have ended the answer. as_text: prompts are
    not rendered. Answers with fewer than two tokens within `max_length` are left out. Raises
    UserError, with the first reason, if the template rejects more than one in a hundred.
    """
    if as_text:
        made = [_text_sample(log, tokenizer, max_length) for log in logs]
        return [sample for sample in made if sample is not None]
    samples: list[Sample] = []
    counts = Counts()
    rendered = render_batch(tokenizer, [log.messages for log in logs], template=template)
    for log, one in zip(logs, rendered, strict=True):
        if isinstance(one, UserError):
            counts.skip(str(one), log.place)
            continue
        counts.used += 1
        if (sample := _chat_sample(one, log.ended, stops, max_length)) is not None:
            samples.append(sample)
    counts.check("logs", "turns that the chat template accepts", MAX_BAD)
    return samples


def _chat_sample(one: Encoded, ended: bool, stops: Sequence[int], max_length: int) -> Sample | None:
    first, after = one.ranges[-1]
    while not ended and after > first and int(one.ids[after - 1]) in stops:
        after -= 1
    return _sample(one.ids[:after], first, max_length)


def _text_sample(log: LoggedAnswer, tokenizer: Any, max_length: int) -> Sample | None:
    *before, answer = log.messages
    prompt = render_text(tokenizer, "\n\n".join(one["content"] for one in before))
    ids = tokenizer(answer["content"], add_special_tokens=False, verbose=False)["input_ids"]
    return _sample(np.asarray([*prompt, *ids]), len(prompt), max_length)


def _sample(ids: np.ndarray, first: int, max_length: int) -> Sample | None:
    ids = np.asarray(ids[:max_length], dtype=np.int32)
    if len(ids) - first < 2 or not first:
        return None
    return Sample(ids, np.arange(len(ids)) >= first)

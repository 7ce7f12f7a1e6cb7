"""Outputs in JSON: answers, prompts with outputs, and responses of vLLM or OpenAI's API.

An object is one of these, and a file holds one kind:

    {"id", "turns": [ANSWER, ...]}, or {"question_id", "choices": [{"turns"}]}  answers of MT-bench
    {"prompt" or "prompt_token_ids", "output", "answer" or "token_ids"}         prompt and output
    {"prompt_token_ids", "outputs": [{"token_ids", "text"}]}        a RequestOutput of vLLM
    {"choices": [{"message" or "text", "token_ids"}]}               a response of OpenAI's API
    {"request", "response"}, or {"custom_id", "response": {"body"}} with its request, or in a batch

Every choice of a response and every output of a RequestOutput counts, as samples of its prompt. A
response may have the `messages` or the `prompt` of its request beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from decoding.values import is_number
from eval.logged.entries import Entry, count_in, ids_of, messages_of, text_in, wrong
from jobs.run_files import json_kind
from training.data.counts import BadRecordError
from training.data.records import read_records

OUTPUT_IDS = ("token_ids", "output_token_ids", "tokens")
OUTPUT_TEXTS = ("output", "answer", "completion", "response", "generated_text")
PROMPT_IDS = "prompt_token_ids"
ID_KEYS = ("id", "question_id", "task_id", "prompt_id", "custom_id")
LIMITS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
FAILED = "failed request"
EXPECTED = (
    "an object with turns, choices, outputs, response, or an output (token_ids, output or answer)"
)


class NoOutputError(Exception):
    """A response without an output, such as that of a failed request; the message is the reason."""


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each record of a JSON file.

    Raises UserError, with the line, for a record that is not a JSON object.
    """
    for place, record in read_records(path):
        if isinstance(record, BadRecordError):
            raise UserError(f"{place}: {record}, expected {EXPECTED}.")
        if not isinstance(record, dict):
            raise wrong(place, json_kind(record), EXPECTED)
        yield place, record


def entries_in(
    record: dict[str, Any], place: str, requests: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Entry], list[str]]:
    """Return the outputs in an object, and the reason of each choice that holds none.

    requests: custom_id -> body of the request. Raises UserError for an object of no known form, and
    NoOutputError for the response of a failed request.
    """
    if _has_response(record):
        return _response(record, place, requests)
    if "choices" in record and not has_failed(record):
        choices = _dicts(record["choices"], place, "choices", "a list of choices")
        if "turns" in choices[0]:  # FastChat's form of model answers
            answers = [
                replace(one, sample=sample)
                for sample, choice in enumerate(choices)
                for one in _answers({**record, "turns": choice.get("turns")}, place)
            ]
            return answers, []
        return _response(record, place, requests)
    if "outputs" in record:
        return _request_outputs(record, place), []
    if "turns" in record:
        return _answers(record, place), []
    return [_pair(record, place)], []


def read_requests(path: Path) -> dict[str, dict[str, Any]]:
    """Return custom_id -> body of the requests in a batch file of OpenAI's API or vLLM.

    Raises UserError for other objects and for a custom_id that occurs twice.
    """
    found: dict[str, dict[str, Any]] = {}
    for place, record in read_objects(path):
        name, body = record.get("custom_id"), record.get("body")
        if not isinstance(name, str) or not isinstance(body, dict):
            raise wrong(place, ", ".join(record)[:60] or "no keys", '{"custom_id", "body"}')
        if name in found:
            raise wrong(place, f"custom_id {name!r:.60} a second time", "each one once")
        found[name] = body
    if not found:
        raise UserError(f'{path} holds no requests, expected objects {{"custom_id", "body"}}.')
    return found


def has_failed(record: Mapping[str, Any]) -> bool:
    """Return whether an object is the error of a failed request, in OpenAI's or vLLM's form."""
    is_error = bool(record.get("error")) or record.get("object") == "error"
    return is_error and not record.get("choices")


def _has_response(record: Mapping[str, Any]) -> bool:
    """Return whether a record holds a response of the API, and not its text alone."""
    return "response" in record and not isinstance(record["response"], str)


def _id_of(record: Mapping[str, Any]) -> str:
    return str(next((record[key] for key in ID_KEYS if record.get(key) is not None), ""))


def _answers(record: Mapping[str, Any], place: str) -> list[Entry]:
    turns = record["turns"]
    if not isinstance(turns, list) or not turns:
        raise wrong(place, f"{turns!r:.40} as turns", "a list of answers")
    return [
        Entry(place, text_in(turn, place, f"answer {number}"), id=_id_of(record), turn=number - 1)
        for number, turn in enumerate(turns, 1)
    ]


def _output(record: Mapping[str, Any], place: str) -> tuple[list[int] | str, str | None] | None:
    """Return the ids of an output and its text, or its text alone and None; None without output."""
    text_key = next((key for key in OUTPUT_TEXTS if isinstance(record.get(key), str)), None)
    text = None if text_key is None else text_in(record[text_key], place, text_key)
    for key in OUTPUT_IDS:
        if record.get(key) is not None:
            return ids_of(record[key], place, key), text
    return None if text is None else (text, None)


def _pair(record: Mapping[str, Any], place: str) -> Entry:
    found = _output(record, place)
    if found is None and has_failed(record):
        raise NoOutputError(FAILED)
    if found is None:
        raise wrong(place, f"the keys {', '.join(record) or '(none)'}"[:100], EXPECTED)
    prompt: Any = None
    if record.get(PROMPT_IDS) is not None:
        prompt = ids_of(record[PROMPT_IDS], place, PROMPT_IDS)
    elif isinstance(record.get("messages"), list):
        prompt = messages_of(record["messages"], place)
    elif "prompt" in record:
        prompt = text_in(record["prompt"], place, "prompt")
    turn = count_in(record.get("turn", 1), place, "turn") or 1
    return Entry(
        place,
        found[0],
        prompt=prompt,
        id=_id_of(record),
        turn=turn - 1,  # recurrent_drafting.generate numbers them from 1
        category=str(record.get("category", "")),
        text=found[1],
        prompt_tokens=count_in(record.get("prompt_tokens"), place, "prompt_tokens"),
        limit=_limit(record, place),
    )


def _request_outputs(record: Mapping[str, Any], place: str) -> list[Entry]:
    outputs = _dicts(record["outputs"], place, "outputs", 'a list of {"token_ids", "text"}')
    given = {key: record[key] for key in (PROMPT_IDS, "prompt") if record.get(key) is not None}
    pairs = (_pair({**one, "output": one.get("text"), **given}, place) for one in outputs)
    name = str(record.get("request_id", ""))
    return [replace(one, id=name, is_turn=False, sample=at) for at, one in enumerate(pairs)]


def _dicts(value: Any, place: str, key: str, expected: str) -> list[dict[str, Any]]:
    """Return a list of one or more objects. Raises UserError for anything else."""
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise wrong(place, f"{value!r:.40} as {key}", expected)
    return value


def _response(
    record: dict[str, Any], place: str, requests: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Entry], list[str]]:
    """Return the outputs of a response, and the reason of each choice that holds none."""
    body, name, request = record, "", record.get("request")
    if _has_response(record):
        response = record["response"]
        if response is None or record.get("error"):
            raise NoOutputError(FAILED)
        body = response.get("body", response) if isinstance(response, dict) else response
        if isinstance(response, dict) and response.get("status_code", 200) != 200:
            raise NoOutputError(f"status {response['status_code']}")
    if not isinstance(body, dict):
        raise wrong(place, f"{json_kind(body)} as response", "the body of a response")
    if has_failed(body):
        raise NoOutputError(FAILED)
    if custom := record.get("custom_id"):
        name = str(custom)
        if requests and name not in requests:
            raise wrong(place, f"a response to {name!r:.60}", "one of the requests in requests=")
        request = request or requests.get(name)
    request = request or record  # a proxy may store both in one object
    if isinstance(request, dict) and isinstance(request.get("body"), dict):
        request = request["body"]
    if body.get("object") == "chat.completion.chunk":
        raise wrong(place, "a chunk of a stream", "complete responses")
    asked, found, without = _asked(request, place), list[Entry](), list[str]()
    choices = _dicts(body.get("choices"), place, "choices", "a list of choices")
    for choice in choices:
        try:
            one = _completion(body, choice, place)
        except NoOutputError as reason:
            without.append(str(reason))
            continue
        own = {} if one.prompt is None else {"prompt": one.prompt}
        counted = one.output_tokens if len(choices) == 1 else None  # of all choices together
        fields = {**asked, **own, "output_tokens": counted, "sample": len(found)}
        found.append(replace(one, id=name, is_turn=False, **fields))
    return found, without


def _completion(body: Mapping[str, Any], choice: Mapping[str, Any], place: str) -> Entry:
    message = choice.get("message")
    text = choice.get("text") if message is None else None
    if isinstance(message, dict):
        text = message.get("content")
        others = [key for key in ("tool_calls", "reasoning_content", "refusal") if message.get(key)]
        if others and choice.get("token_ids") is None:
            raise NoOutputError(f"{others[0]} without token_ids")
    found = _output({"token_ids": choice.get("token_ids"), "output": text}, place)
    if found is None:
        raise wrong(place, f"{text!r:.40} as the output", "text, or token_ids")
    given = body.get(PROMPT_IDS, choice.get(PROMPT_IDS))
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Entry(
        place,
        found[0],
        prompt=None if given is None else ids_of(given, place, PROMPT_IDS),
        text=found[1],
        prompt_tokens=count_in(usage.get("prompt_tokens"), place, "usage.prompt_tokens"),
        output_tokens=count_in(usage.get("completion_tokens"), place, "usage.completion_tokens"),
    )


def _asked(request: Any, place: str) -> dict[str, Any]:
    """Return the fields of an entry that a request sets; none without a request."""
    if not isinstance(request, dict):
        return {}
    fields: dict[str, Any] = {"limit": _limit(request, place)}
    if is_number(request.get("temperature")):
        fields["temperature"] = float(request["temperature"])
    prompt = request.get("prompt")
    if "messages" in request:
        fields["prompt"] = messages_of(request["messages"], place)
    elif isinstance(prompt, list):
        fields["prompt"] = ids_of(prompt, place, "prompt")
    elif prompt is not None:
        fields["prompt"] = text_in(prompt, place, "prompt")
    return fields


def _limit(record: Mapping[str, Any], place: str) -> int | None:
    key = next((key for key in LIMITS if record.get(key) is not None), "")
    return count_in(record.get(key), place, key)

"""What a request asks for: checked fields, and prompts and settings for the decode loop."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from decoding.errors import UserError
from decoding.models.text.messages import check_messages, check_text
from decoding.rounds.settings import Settings
from decoding.sessions.open_batch import Request
from decoding.values import RULES, ValueRule, is_int, is_text, quote_json, whole_number
from serving.api.errors import RequestError

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MOST_STOPS, LONGEST_STOP = 16, 256  # stop strings, and characters of one
LARGEST_SEED_OF_OURS = 2**31 - 1  # of requests without a seed
LONGEST_NAME = 64  # characters of a field's name that are compared with the known ones
# fields of a request that are read, by endpoint
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
# names of the user, or of prompts that share a cache, which change nothing here
IGNORED = ("user", "safety_identifier", "prompt_cache_key")
SHARED = (
    *("model", "max_tokens", *SAMPLING, "seed", "stop", "stream", "stream_options", "n"),
    *IGNORED,
)
EXTENDED = (*SHARED, "return_token_ids", "stop_token_ids")  # extensions of vLLM's
FIELDS = {CHAT: (*EXTENDED, "messages", "max_completion_tokens"), TEXT: (*EXTENDED, "prompt")}
# fields of OpenAI's API that this server does not support -> values that ask for nothing
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "top_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "moderation": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_cache_options": ({},),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "web_search_options": (),
}
STOPS = ValueRule(
    lambda value: (
        isinstance(value, list)
        and len(value) <= MOST_STOPS
        and all(is_text(one) and 0 < len(one) <= LONGEST_STOP for one in value)
    ),
    f"a string or a list of at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters",
)
SWITCH = ValueRule(lambda value: isinstance(value, bool), "true or false")
NAME = ValueRule(is_text, "a string")

Render = Callable[[list[dict[str, str]]], str]
Encode = Callable[[str, bool], list[int]]


@dataclass(frozen=True)
class Asked:
    """A request for completions: one `Request` for each choice, in their order."""

    requests: list[Request]
    is_chat: bool
    stream: bool
    include_usage: bool
    prompt_tokens: int  # of all prompts, each counted once
    return_ids: bool = False  # whether the answer has the token ids too

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return self.requests[0].settings.stop_strings


@dataclass(frozen=True)
class Limits:
    """What a request may ask for at most, and who can encode its prompts."""

    model: str
    context: int  # tokens of prompt and answer
    most_characters: int  # of a prompt: those of `context` tokens if each is the longest one
    vocab_size: int
    settings: Settings  # of the batch
    max_new_tokens: int  # 0: what the context holds
    max_choices: int
    render: Render  # the text of a chat
    encode: Encode  # of a text; whether the tokenizer adds its special tokens


def read_request(path: str, body: Mapping[str, Any], limits: Limits) -> Asked:
    """Return what a request to this path asks for. Raises RequestError, naming the field."""
    _check_fields(path, body)
    if body.get("model") != limits.model:
        raise RequestError(
            f"the model {quote_json(body.get('model'))} does not exist here, expected "
            f'"{limits.model}", the only one of this server.',
            status=404,
            code="model_not_found",
            param="model",
        )
    settings = _settings(body, limits)
    choices = _value(body, "n", 1, whole_number(1, limits.max_choices))
    stream = _value(body, "stream", False, SWITCH)
    if path == CHAT:
        field, prompts = "messages", [_chat(body, limits)]
    else:
        field, texts = "prompt", _texts(body, limits)
        for text in texts:
            if isinstance(text, str):
                _check_characters(text, field, limits)
        prompts = [_encoded(text, limits) for text in texts]
    for prompt in prompts:
        _check_length(prompt, field, limits)
    requests = [
        Request(prompt, settings, number) for prompt in prompts for number in range(choices)
    ]
    usage = _include_usage(body, stream)
    ids = _value(body, "return_token_ids", False, SWITCH)
    return Asked(requests, path == CHAT, stream, usage, sum(map(len, prompts)), ids)


def _check_fields(path: str, body: Mapping[str, Any]) -> None:
    """Raise RequestError for unknown fields and for those that this server does not support."""
    known = FIELDS[path]
    for name in IGNORED:
        _value(body, name, None, NAME)
    for name, value in body.items():
        if name in known:
            continue
        if name in UNSUPPORTED:
            if _asks_for_nothing(name, value):
                continue
            raise RequestError(
                f"{name} is {quote_json(value)}, which this server does not support. Leave it out.",
                code="unsupported_parameter",
                param=name,
            )
        nearest = get_close_matches(name[:LONGEST_NAME], known, n=1, cutoff=0.0)[0]
        raise RequestError(
            f'the field {quote_json(name)} is unknown; the nearest is "{nearest}". Use one of '
            f"{', '.join(sorted(known))}.",
            code="unknown_parameter",
            param=name,
        )


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Return whether an unsupported field has a value that changes nothing.

    False is not 0 here: `logprobs` of 0 asks for those of the sampled tokens.
    """
    return value is None or any(
        value == none and isinstance(value, bool) == isinstance(none, bool)
        for none in UNSUPPORTED[name]
    )


def _settings(body: Mapping[str, Any], limits: Limits) -> Settings:
    """Return the settings of a request's rows."""
    if body.get("top_k") == -1:  # vLLM's word for 0
        body = {**body, "top_k": 0}
    given: dict[str, Any] = {
        name: _value(body, name, None, RULES[name]) for name in (*SAMPLING, "seed")
    }
    given = {name: value for name, value in given.items() if value is not None}
    _check_stop_tokens(body.get("stop_token_ids"), limits)
    if "seed" not in given:
        given["seed"] = secrets.randbelow(LARGEST_SEED_OF_OURS)
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    _check("stop", stops, STOPS)
    most = limits.max_new_tokens or limits.context
    longest = most
    for name in ("max_tokens", "max_completion_tokens"):
        longest = _value(body, name, longest, whole_number(1))
    return replace(
        limits.settings, **given, stop_strings=tuple(stops), max_new_tokens=min(longest, most)
    )


def _check_stop_tokens(ids: Any, limits: Limits) -> None:
    """Raise RequestError for tokens that do not end every answer of this server anyway."""
    known = limits.settings.stop_token_ids
    if ids is not None and not (isinstance(ids, list) and all(one in known for one in ids)):
        raise RequestError(
            f"stop_token_ids is {quote_json(ids)}, expected some of {list(known)}, the ends of a "
            f"text of this server. Use stop for strings.",
            code="unsupported_parameter",
            param="stop_token_ids",
        )


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    """Return whether a stream ends with its numbers of tokens."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise RequestError(
            f'stream_options is {quote_json(options)}, expected {{"include_usage": true}}.',
            param="stream_options",
        )
    if not stream:
        raise RequestError("stream_options needs stream=true.", param="stream_options")
    if _value(options, "include_obfuscation", False, SWITCH):
        raise RequestError(
            "stream_options.include_obfuscation is true, which this server does not support. Leave "
            "it out, or set it to false.",
            code="unsupported_parameter",
            param="stream_options",
        )
    return bool(_value(options, "include_usage", False, SWITCH))


def _value(body: Mapping[str, Any], name: str, default: Any, rule: ValueRule) -> Any:
    """Return a field's value, the default for null and for a missing one."""
    value = body.get(name)
    if value is None:
        return default
    _check(name, value, rule)
    return value


def _check(name: str, value: Any, rule: ValueRule) -> None:
    if not rule.fits(value):
        raise RequestError(f"{name} is {quote_json(value)}, expected {rule.expected}.", param=name)


def _chat(body: Mapping[str, Any], limits: Limits) -> list[int]:
    """Return the token ids of the rendered messages."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            f"messages is {quote_json(messages)}, expected a list of messages such as "
            f'{{"role": "user", "content": "..."}}.',
            param="messages",
        )
    if len(messages) > limits.context:
        raise RequestError(
            f"messages has {len(messages):,} messages, but the model's context holds "
            f"{limits.context} tokens with the answer. Shorten the chat.",
            code="context_length_exceeded",
            param="messages",
        )
    try:
        text = limits.render(check_messages([_plain(one) for one in messages], quote_json))
    except UserError as error:
        raise RequestError(str(error), param="messages") from error
    _check_characters(text, "messages", limits)
    return limits.encode(text, False)


def _plain(message: Any) -> Any:
    """Return a message with its parts joined to one text, and today's name of the system's role."""
    if not isinstance(message, dict) or "content" not in message:
        return message
    content = message["content"]
    if isinstance(content, list):
        if not content or not all(map(_is_text_part, content)):
            raise RequestError(
                f"a message has the content {quote_json(content)}, expected a string or parts such "
                f'as {{"type": "text", "text": "..."}}; this server reads text alone.',
                code="unsupported_parameter",
                param="messages",
            )
        content = "".join(part["text"] for part in content)
    role = "system" if message.get("role") == "developer" else message.get("role")
    return {**message, "role": role, "content": content}


def _is_text_part(part: Any) -> bool:
    is_text_kind = isinstance(part, dict) and part.get("type") == "text"
    return is_text_kind and isinstance(part.get("text"), str)


def _texts(body: Mapping[str, Any], limits: Limits) -> Sequence[Any]:
    """Return the prompts of a request for completions: texts, or lists of token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and is_int(prompt[0])):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(
            f"prompt is {quote_json(prompt)}, expected a text, token ids, or a list of either.",
            param="prompt",
        )
    if len(prompt) > limits.max_choices:
        raise RequestError(
            f"prompt has {len(prompt)} prompts, expected at most {limits.max_choices}, the rows of "
            f"this server (max_rows).",
            param="prompt",
        )
    return prompt


def _encoded(prompt: Any, limits: Limits) -> list[int]:
    """Return the token ids of a prompt."""
    if isinstance(prompt, str):
        try:
            check_text(prompt, "prompt")
        except UserError as error:
            raise RequestError(str(error), param="prompt") from error
        return limits.encode(prompt, True)
    ids = prompt if isinstance(prompt, list) else [prompt]
    wrong = [one for one in ids if not is_int(one) or not 0 <= one < limits.vocab_size]
    if wrong:
        raise RequestError(
            f"prompt holds {quote_json(wrong[0])}, expected a text, or token ids from 0 to "
            f"{limits.vocab_size - 1}.",
            param="prompt",
        )
    return ids


def _check_characters(text: str, field: str, limits: Limits) -> None:
    """Raise RequestError for a text that cannot fit the context.

    The characters are counted first, since tokenizing a long text makes other requests wait.
    """
    if len(text) > limits.most_characters:
        raise RequestError(
            f"the prompt has {len(text):,} characters, but the model's context holds "
            f"{limits.context} tokens with the answer, at most {limits.most_characters:,} "
            f"characters. Shorten the prompt.",
            code="context_length_exceeded",
            param=field,
        )


def _check_length(prompt: Sequence[int], field: str, limits: Limits) -> None:
    if not prompt:
        raise RequestError("the prompt is empty, expected at least one token.", param=field)
    if len(prompt) >= limits.context:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, but the model's context holds {limits.context} "
            f"with the answer. Shorten the prompt.",
            code="context_length_exceeded",
            param=field,
        )

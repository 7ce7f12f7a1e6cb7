"""Prompts (strings, chats or token ids), their checks and their encoding."""

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError, without_stop
from decoding.models.text.templates import render
from decoding.values import lone_surrogate, quote

ROLES = ("system", "user", "assistant", "tool")
Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages | Sequence[int]


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, vocab_size: int, name: str
) -> list[int]:
    """Return the token ids of a string, of a chat with its generation prompt, or of ids.

    name: the target's name. Raises UserError for another value, an empty sequence, an invalid
    message, an id outside the vocabulary, and a chat that the template rejects.
    """
    if isinstance(prompt, str):
        check_text(prompt, "the prompt")
        return list(tokenizer(prompt)["input_ids"])
    try:
        is_sequence = not isinstance(prompt, bytes | bytearray | Mapping | Set)
        parts: list[Any] | None = list(prompt) if is_sequence else None
    except TypeError:  # a value that is not iterable, such as an array without dimensions
        parts = None
    if parts is None:
        raise UserError(
            f"the prompt is {quote(prompt)}, expected a string, a list of messages such as "
            f"{{'role': 'user', 'content': '...'}}, or a list of token ids."
        )
    if not parts:
        raise UserError(
            "the prompt is empty, expected at least one character, message or token id."
        )
    if not isinstance(parts[0], Mapping | str):
        return _token_ids(parts, vocab_size, name)
    messages = check_messages(parts)
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of '{name}' has no chat template. Pass a string instead of messages."
        )
    try:
        rendered = render(tokenizer, messages, add_generation_prompt=True)
    except TemplateSyntaxError as error:
        raise UserError(
            f"the chat template of '{name}' is not valid Jinja: {without_stop(error)}. Correct the "
            f"template."
        ) from error
    except TemplateError as error:
        raise UserError(
            f"the chat template of '{name}' rejects the messages: {without_stop(error)}. Correct "
            f"the messages."
        ) from error
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def check_text(text: str, where: str) -> None:
    """Raise UserError for a string that UTF-8 cannot encode.

    where: the string's name in the message.
    """
    at = lone_surrogate(text)
    if at is not None:
        raise UserError(
            f"{where} holds half a surrogate pair ({text[at]!a}) at character {at + 1}, expected "
            f"text that UTF-8 can encode. Restore the character, such as an emoji, that was cut."
        )


def check_messages(
    messages: Sequence[Any], quote: Callable[[Any], str] = quote
) -> list[dict[str, str]]:
    """Return the messages as dicts; raise UserError for one that is not a valid message.

    quote: returns a value as the error's text shows it.
    """
    for number, message in enumerate(messages, 1):
        where = f"message {number} of the chat"
        if not isinstance(message, Mapping):
            raise UserError(
                f'{where} is {quote(message)}, expected a mapping such as {{"role": "user", '
                f'"content": "..."}}.'
            )
        for key in ("role", "content"):
            if key not in message:
                raise UserError(
                    f"{where} has no {key} (found {quote(sorted(map(str, message)))}), expected "
                    f"role and content."
                )
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or role not in ROLES:
            raise UserError(
                f"the role of {where} is {quote(role)}, expected one of {', '.join(ROLES)}."
            )
        if not isinstance(content, str):
            raise UserError(f"the content of {where} is {quote(content)}, expected a string.")
        if role == "user" and not content.strip():
            raise UserError(
                f"the content of {where} is empty (found {quote(content)}), expected some text."
            )
        check_text(content, f"the content of {where}")
    return [dict(message) for message in messages]


def _token_ids(parts: list[Any], vocab_size: int, name: str) -> list[int]:
    """Return token ids as Python ints; they may be integers of NumPy or PyTorch."""
    ids = []
    for place, part in enumerate(parts):
        try:
            token = -1 if isinstance(part, bool) else operator.index(part)
        except TypeError:
            token = -1
        if not 0 <= token < vocab_size:
            raise UserError(
                f"item {place} of the prompt is {quote(part)}, expected only messages, or only "
                f"token ids, whole numbers from 0 to {vocab_size - 1} (the vocabulary of '{name}')."
            )
        ids.append(token)
    return ids

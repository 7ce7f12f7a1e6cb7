"""Chats as token ids with a mask of the supervised tokens: the answers with their end tokens.

A mask that is wrong by a few tokens lowers a drafter's acceptance rate, and nothing else shows the
error. Therefore the chat is rendered to text once, the answers are located as spans of that text,
and the text is tokenized once. No special tokens are added, as the template writes them and a
second BOS would follow. Spans are located by the template's `{% generation %}` marks if it has
them. Otherwise prefixes are rendered: turns up to i with the generation prompt must be a prefix of
turns up to i + 1, and the difference is supervised. If that fails, our template of the same family
(training/data/templates.py), which has marks, is used, or an error names the turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError, without_stop
from decoding.models.text.templates import default_template
from decoding.values import check_choice
from training.data.answer_spans import (
    CLOSE,
    MARK,
    OPEN,
    Message,
    NoPrefixError,
    locate_by_layout,
    locate_by_marks,
    render_turns,
)
from training.data.counts import print_note
from training.data.templates import RENDERINGS, TEMPLATES, find_family
from training.data.tokenizing import Span, encode_batch, find_tokens


@dataclass(frozen=True)
class Rendered:
    """One chat as tokens; `mask[i]` is True if token i is part of an answer or ends it."""

    ids: list[int]
    mask: list[bool]


class Located(NamedTuple):
    """A rendered chat, the characters of its answers, and the numbers of their turns."""

    text: str
    spans: list[Span]
    turns: list[int]


class Encoded(NamedTuple):
    """One chat as ids (int32) and the ranges of its supervised tokens."""

    ids: np.ndarray
    ranges: list[Span]

    @property
    def mask(self) -> np.ndarray:
        """Return True for each supervised token."""
        mask = np.zeros(len(self.ids), dtype=bool)
        for first, after in self.ranges:
            mask[first:after] = True
        return mask


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, template: str = "auto"
) -> Rendered:
    """Render `messages` ({"role", "content"}) with the tokenizer's chat template or a named one.

    Raises UserError for a chat without an answer, an unknown `template`, or a slow tokenizer. The
    error names the turn if the template rejects its role or order, or if the tokens of an answer
    cannot be located.
    """
    located = _locate(tokenizer, list(messages), template)
    encoded = _supervise(encode_batch(tokenizer, [located.text])[0], located)
    return Rendered(encoded.ids.tolist(), encoded.mask.tolist())


def render_batch(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[Message]], *, template: str
) -> list[Encoded | UserError]:
    """Return for each chat the tokens of `render_chat`, or its error, with one call to encode all.

    Raises UserError for an unknown `template`, and for a slow tokenizer.
    """
    template_source(tokenizer, template)
    found: list[Located | UserError] = []
    for messages in chats:
        try:
            found.append(_locate(tokenizer, list(messages), template))
        except UserError as error:
            found.append(error)
    texts = [one.text for one in found if isinstance(one, Located)]
    encodings = iter(encode_batch(tokenizer, texts))
    result: list[Encoded | UserError] = []
    for one in found:
        try:
            result.append(one if isinstance(one, UserError) else _supervise(next(encodings), one))
        except UserError as error:
            result.append(error)
    return result


def _locate(tokenizer: PreTrainedTokenizerBase, messages: list[Message], template: str) -> Located:
    """Render a chat and locate its answers. Raises UserError as `render_chat` does."""
    source = template_source(tokenizer, template)
    _check(messages, source)
    if MARK.search(source):
        text, spans = locate_by_marks(tokenizer, source, messages)
    else:
        try:
            text, spans = locate_by_layout(tokenizer, source, messages)
        except NoPrefixError as reason:
            ours = TEMPLATES[_choose_family(source, str(reason))]
            text, spans = locate_by_marks(tokenizer, ours, messages)
    turns = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
    return Located(text, spans, turns)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, template: str = "auto"
) -> list[int]:
    """Return the ids of `messages` followed by the generation prompt, for a target to continue.

    Raises UserError for an unknown `template`, and for messages that the template rejects.
    """
    messages = list(messages)
    text = render_turns(tokenizer, template_source(tokenizer, template), messages, prompt=True)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def render_next(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    template: str = "auto",
) -> list[int]:
    """Return the ids of a prompt whose last message but one is the answer of the previous turn.

    prompt, answer: ids of the previous turn as they were decoded. A model may spell the same string
    with other tokens than its tokenizer, and caches hold the model's tokens. These ids are
    therefore kept, and those of the new turn follow. If the answer's end cannot be found in the
    rendered chat (a template that trims answers, a tokenizer without offsets), the whole chat is
    tokenized again.
    """
    messages, source = list(messages), template_source(tokenizer, template)
    text = render_turns(tokenizer, source, messages, prompt=True)
    encoded = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False
    )
    ids = list(encoded["input_ids"])
    if not tokenizer.is_fast:
        return ids
    before = render_turns(tokenizer, source, messages[:-2], prompt=True)
    end = _find_answer_text_end(tokenizer, text, before, messages[-2]["content"], answer)
    starts = [start for start, _ in encoded["offset_mapping"]]
    return [*prompt, *answer, *ids[starts.index(end) :]] if end in starts else ids


def _find_answer_text_end(
    tokenizer: PreTrainedTokenizerBase, text: str, before: str, content: str, answer: Sequence[int]
) -> int | None:
    """Return the end of the answer after `before`, end token included; None if it is not found."""
    at = text.find(content, len(before)) if text.startswith(before) else -1
    if at < 0 or text[len(before) : at].strip():
        return None
    end, last = at + len(content), tokenizer.convert_ids_to_tokens(answer[-1])
    if last not in tokenizer.all_special_tokens:
        return end
    return end + len(last) if text.startswith(last, end) else None


def choose_rendering(
    tokenizer: PreTrainedTokenizerBase,
    render: str,
    template: str,
    keys: tuple[str, str],
    show: bool = True,
) -> str:
    """Return the form in which a target receives prompts: `chat` or `text`.

    render: chat, text or auto. auto is chat if the tokenizer has a chat template or `template`
    names one of ours, else text. keys: the configuration's keys of `render` and `template`, for
    messages. show: print a note if auto chooses text. Raises UserError for an unknown `render` or
    `template`, and for chat without a template.
    """
    check_choice(keys[0], render, RENDERINGS)
    if render == "text":
        return render
    if template != "auto" or tokenizer.chat_template is not None:
        template_source(tokenizer, template)
        return "chat"
    ours = f"{keys[1]}={'|'.join(TEMPLATES)}"
    if render == "chat":
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template to render prompts with. "
            f"Set {keys[0]}=text to leave prompts unchanged (base models), or {ours} to use one of "
            f"our templates (chat models)"
        )
    if show:
        print(
            f"note: {tokenizer.name_or_path}: the tokenizer has no chat template, so prompts are "
            f"given as plain text. For a chat model choose its template: {ours}"
        )
    return "text"


def render_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of plain text for a target to continue; the tokenizer may add a BOS."""
    # not verbose: prompts longer than the context are only counted, so a warning would mislead
    return list(tokenizer(text, verbose=False)["input_ids"])


def template_names() -> tuple[str, ...]:
    """Return the names of chat templates that a configuration accepts."""
    return ("auto", *TEMPLATES)


def template_source(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Return the Jinja source of the named template.

    Raises UserError for an unknown name, and for `auto` if the tokenizer has no template.
    """
    if template in TEMPLATES:
        return TEMPLATES[template]
    check_choice("chat template", template, template_names())
    if tokenizer.chat_template is None:
        raise UserError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template. Choose one of ours "
            f"(data.template=...): {', '.join(TEMPLATES)}"
        )
    return default_template(tokenizer)


def _check(messages: list[Message], source: str) -> None:
    """Raise UserError for chats that no template renders, and for U+FDD0 or U+FDD1 in a message."""
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(
            f"the chat has {len(messages)} turns and no answer (role assistant), so there is "
            f"nothing to learn from it"
        )
    if messages[0]["role"] == "assistant" and not MARK.search(source):
        raise UserError(
            "turn 1 is from the assistant, but this template needs a user or system turn first"
        )
    for number, message in enumerate(messages, 1):
        if OPEN in message["content"] or CLOSE in message["content"]:
            raise UserError(
                f"turn {number} ({message['role']}) holds U+FDD0 or U+FDD1, which are not "
                f"characters. Remove them"
            )


def _choose_family(source: str, reason: str) -> str:
    """Return the name of our template of the same family, to replace `source`, and print a note.

    reason: why answers cannot be located with `source`. Raises UserError for an unknown family.
    """
    family = find_family(source)
    if family is None:
        raise UserError(
            f"cannot locate the tokens of the answer: {without_stop(reason)}. Add "
            f"{{% generation %}} marks to the tokenizer's chat template, or choose one of ours "
            f"(data.template=...): {', '.join(TEMPLATES)}"
        )
    _note_once(
        f"answers cannot be located with the tokenizer's chat template ({reason}); chats are "
        f"rendered with ours: '{family}'"
    )
    return family


@lru_cache(maxsize=64)
def _note_once(text: str) -> None:
    print_note(text)


def _supervise(encoding: Any, located: Located) -> Encoded:
    """Return a chat's tokens. Raises UserError for an answer without a supervised token."""
    ranges = find_tokens(encoding, located.text, located.spans)
    for turn, (first, after) in zip(located.turns, ranges, strict=True):
        if first >= after:
            raise UserError(
                f"turn {turn} (assistant) is empty, or the tokenizer merges all of its text with "
                f"the prompt's. Remove the chat, or use a template with a separator before answers"
            )
    return Encoded(np.asarray(encoding.ids, dtype=np.int32), ranges)

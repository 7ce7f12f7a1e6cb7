"""Answers in a rendered chat: the characters that a model has to write.

A template with generation marks names them. Otherwise turns are rendered up to an answer, and up to
its end, which must be prefixes of the chat.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.models.text.templates import render
from training.data.templates import TEMPLATES
from training.data.tokenizing import Span

Message = dict[str, str]

# Unicode noncharacters, which mark answers in the rendered text and are then removed.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
MARK = re.compile(r"\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}")


class NoPrefixError(Exception):
    """Failure of prefix rendering; the message names the turn and the reason."""


def render_turns(
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    messages: list[Message],
    *,
    prompt: bool = False,
) -> str:
    """Render messages as text.

    Raises UserError naming a turn with which the template rejects the chat that it accepts without.
    The turn is found by bisection, so that a long chat costs its client little of a server's time.
    """
    try:
        return render(tokenizer, messages, source, add_generation_prompt=prompt)
    except TemplateError as error:
        accepted, rejected, reason = 0, len(messages), error
        while rejected - accepted > 1:
            middle = (accepted + rejected) // 2
            try:
                render(tokenizer, messages[:middle], source, add_generation_prompt=prompt)
                accepted = middle
            except TemplateError as found:
                rejected, reason = middle, found
        where = (
            f"turn {rejected} ({messages[rejected - 1]['role']})"
            if messages
            else "a chat without messages"
        )
        raise UserError(f"the chat template rejects {where}: {reason}") from error


@lru_cache(maxsize=64)
def _insert_sentinels(source: str) -> str:
    """Replace generation marks by blocks that write sentinels and trim the same white space."""

    def block(match: re.Match[str]) -> str:
        sentinel = CLOSE if match["end"] else OPEN
        return f"{{%{match['left']} if true %}}{{{{ '{sentinel}' }}}}{{% endif {match['right']}%}}"

    return MARK.sub(block, source)


def locate_by_marks(
    tokenizer: PreTrainedTokenizerBase, source: str, messages: list[Message]
) -> tuple[str, list[Span]]:
    """Return the text and the spans inside the template's generation marks, one per answer.

    Raises UserError unless the template marks as many spans as the chat has answers.
    """
    pieces = re.split(
        f"([{OPEN}{CLOSE}])", render_turns(tokenizer, _insert_sentinels(source), messages)
    )
    text, starts, ends = "", [], []
    for piece in pieces:
        if piece == OPEN:
            starts.append(len(text))
        elif piece == CLOSE:
            ends.append(len(text))
        else:
            text += piece
    answers = sum(message["role"] == "assistant" for message in messages)
    if len(starts) != answers or len(ends) != answers:
        raise UserError(
            f"the chat template marks {len(starts)} answers, but the chat has {answers}. Correct "
            f"the template's {{% generation %}} marks, or choose one of ours (data.template=...): "
            f"{', '.join(TEMPLATES)}"
        )
    return text, list(zip(starts, ends, strict=True))


@dataclass(frozen=True)
class _Layout:
    """What a template writes around the contents of turns with certain roles."""

    literals: list[str]  # before, between and after the contents
    # of each answer: its turn, the characters of its span before the content and those after it
    answers: list[tuple[int, int, int]]


def locate_by_layout(
    tokenizer: PreTrainedTokenizerBase, source: str, messages: list[Message]
) -> tuple[str, list[Span]]:
    """Return what `_locate_by_prefixes` does, from one rendering of most chats.

    Templates mostly write the contents between texts that depend on the roles alone. If a chat is
    rendered so, its answers are where those of a chat of placeholders are.
    """
    layout = _layout(tokenizer, source, tuple(message["role"] for message in messages))
    if layout is not None:
        text, starts = layout.literals[0], []
        for message, literal in zip(messages, layout.literals[1:], strict=True):
            starts.append(len(text))
            text += message["content"] + literal
        if text == render_turns(tokenizer, source, messages):
            return text, [
                (starts[turn] - before, starts[turn] + len(messages[turn]["content"]) + after)
                for turn, before, after in layout.answers
            ]
    return _locate_by_prefixes(tokenizer, source, messages)


@lru_cache(maxsize=256)
def _layout(
    tokenizer: PreTrainedTokenizerBase, source: str, roles: tuple[str, ...]
) -> _Layout | None:
    """Return the layout of turns with these roles; None if their contents decide it."""
    contents = [f"{OPEN}{turn}{CLOSE}" for turn in range(len(roles))]
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=True)
    ]
    try:
        text, spans = _locate_by_prefixes(tokenizer, source, messages)
    except NoPrefixError:
        return None
    literals = re.split(f"{OPEN}[0-9]+{CLOSE}", text)
    if text != "".join(map(str.__add__, literals, [*contents, ""])):
        return None
    turns = [turn for turn, role in enumerate(roles) if role == "assistant"]
    answers = []
    for turn, (first, after) in zip(turns, spans, strict=True):
        start = text.index(contents[turn])
        end = start + len(contents[turn])
        # without an end token, the content's own end decides where the answer ends
        if first > start or not text[end:after].strip():
            return None
        answers.append((turn, start - first, after - end))
    return _Layout(literals, answers)


def _locate_by_prefixes(
    tokenizer: PreTrainedTokenizerBase, source: str, messages: list[Message]
) -> tuple[str, list[Span]]:
    """Return the text and, for each answer, the span that it adds to the generation prompt.

    Raises NoPrefixError naming the turn whose generation prompt or end is not a prefix.
    """
    text = render_turns(tokenizer, source, messages)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = f"turn {index + 1} (assistant)"
        before = render_turns(tokenizer, source, messages[:index], prompt=True)
        ends_here = index + 1 == len(messages)
        after = text if ends_here else render_turns(tokenizer, source, messages[: index + 1])
        if not text.startswith(after):
            raise NoPrefixError(f"{turn} is rendered differently when other turns follow it")
        if not after.startswith(before):
            raise NoPrefixError(f"{turn} does not begin with the template's generation prompt")
        if len(after) == len(before):
            raise NoPrefixError(f"{turn} leaves no text")
        spans.append((len(before), _find_answer_end(tokenizer, after, len(before))))
    return text, spans


def _find_answer_end(tokenizer: PreTrainedTokenizerBase, text: str, start: int) -> int:
    """Return the end of an answer, without white space after its end token (ChatML's newline)."""
    stripped = text[start:].rstrip()
    if any(stripped.endswith(token) for token in tokenizer.all_special_tokens):
        return start + len(stripped)
    return len(text)

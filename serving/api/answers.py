"""Answers: text from tokens, cut before a stop string, and the JSON objects around it."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from decoding.models.text.text_stream import TextStream


class ChoiceText:
    """The text of a choice as it grows, without its stop string.

    before: the prompt's token ids if the text continues them, and empty for an answer in a chat.
    """

    def __init__(
        self,
        text_of: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        before: Sequence[int] = (),
    ) -> None:
        self._stream, self._stops = TextStream(text_of, before), stops
        self._held = ""  # text that may begin a stop string
        self.ids: list[int] = []  # of all tokens, also of those whose text is held or cut
        self._taken = 0  # of them, by `take_ids`
        self.finish: str | None = None

    def add(self, tokens: Sequence[int], finish: str | None) -> str:
        """Return the text that can be shown after these tokens.

        finish: why the row has ended with them, None if it has not.
        """
        self.ids += tokens
        text = self._held + self._stream.add(tokens) + (self._stream.end() if finish else "")
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            text, finish = text[: min(places)], "stop"
        self.finish = finish
        kept = 0 if finish else self._unsure(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def take_ids(self) -> list[int]:
        """Return the token ids since the last call."""
        new, self._taken = self.ids[self._taken :], len(self.ids)
        return new

    def _unsure(self, text: str) -> int:
        """Return the length of the longest end of the text with which a stop string begins."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


class Answer:
    """The JSON objects of one answer.

    prompt_tokens: counted once for each prompt. return_ids: whether choices have `token_ids`, as
    vLLM's have.
    """

    def __init__(
        self, model: str, is_chat: bool, prompt_tokens: int, return_ids: bool = False
    ) -> None:
        self.is_chat, self.prompt_tokens, self.return_ids = is_chat, prompt_tokens, return_ids
        kind = "chat.completion" if is_chat else "text_completion"
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def complete(self, texts: Sequence[str], choices: Sequence[ChoiceText]) -> dict[str, Any]:
        """Return the whole answer."""
        return {
            **self._head,
            "choices": [
                self._choice(index, text, choice)
                for index, (text, choice) in enumerate(zip(texts, choices, strict=True))
            ],
            "usage": self.usage(choices),
        }

    def _choice(self, index: int, text: str, choice: ChoiceText) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        content |= {"token_ids": choice.ids} if self.return_ids else {}
        return {"index": index, **content, "logprobs": None, "finish_reason": choice.finish}

    def first_parts(self, choices: int) -> list[dict[str, Any]]:
        """Return the parts that begin a stream: of a chat, the role of each choice."""
        if not self.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._part(index, {"delta": delta}, None) for index in range(choices)]

    def parts(self, index: int, text: str, choice: ChoiceText) -> list[dict[str, Any]]:
        """Return the parts of a stream for a choice's new text, and for its end."""
        ids = choice.take_ids()
        found = [self._text_part(index, text, None, ids)] if text else []
        if choice.finish:
            found.append(self._text_part(index, "", choice.finish, [] if text else ids))
        return found

    def _text_part(
        self, index: int, text: str, finish: str | None, ids: Sequence[int]
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"delta": {"content": text} if text else {}}
        content |= {"token_ids": ids} if self.return_ids else {}
        return self._part(index, content, finish)

    def _part(self, index: int, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish}
        return {**self._part_head, "choices": [choice]}

    @property
    def _part_head(self) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion.chunk" if self.is_chat else "text_completion",
        }

    def usage_part(self, choices: Sequence[ChoiceText]) -> dict[str, Any]:
        """Return the last part of a stream that was asked to include its numbers of tokens."""
        return {**self._part_head, "choices": [], "usage": self.usage(choices)}

    def usage(self, choices: Sequence[ChoiceText]) -> dict[str, int]:
        """Return the numbers of tokens."""
        answered = sum(len(choice.ids) for choice in choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": answered,
            "total_tokens": self.prompt_tokens + answered,
        }

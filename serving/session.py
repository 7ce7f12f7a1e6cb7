"""Conversation with a target and its drafter: turns, caches and the cost of every answer.

The speedup is measured during the chat: after an answer, its last few tokens are decoded again
without the drafter, at the same position and in the same cache. The speed of plain decoding is the
average over all these tokens, which becomes more precise as the chat continues.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from decoding.engine import text_of
from decoding.errors import UserError
from decoding.models.text.text_stream import BROKEN, TextStream
from decoding.rounds.stats import Generation
from decoding.rounds.ties import first_difference
from decoding.sessions.conversations import Session
from serving.config import GenerateConfig
from serving.setup import ChatModels, is_compared, warm_up
from training.data.chat import render_next, render_prompt

# maximum time of plain decoding after an answer, once MIN_PLAIN_TOKENS are decoded
MAX_PLAIN_SECONDS = 2.0
MIN_PLAIN_TOKENS = 4


@dataclass(frozen=True)
class TextPiece:
    """Part of an answer."""

    text: str
    accepted: bool  # whether the last token was drafted and accepted


@dataclass(frozen=True)
class ChatAnswer:
    """Generation of one answer, the length of its prompt, and how the answer ended."""

    generation: Generation
    prompt_tokens: int
    stopped: bool  # by the user
    context_full: bool


class ChatSession:
    """One conversation; `reply` yields an answer, and `last` then holds its ChatAnswer."""

    def __init__(self, loaded: ChatModels, cfg: GenerateConfig) -> None:
        """Warm up the models and measure the costs of a round if the drafter needs them."""
        self.engine, self.cfg, self.template = loaded.engine, cfg, loaded.template
        # token ids of the last turn with all turns before it
        self.prompt: list[int] = []
        self.reset()
        hello = self._render([{"role": "user", "content": "Hello"}])
        self.settings = warm_up(self.engine, hello, loaded.settings)
        self.session = Session(self.engine.target, self.engine.drafter, self.settings)
        self.last: ChatAnswer | None = None
        self.plain_tokens, self.plain_seconds = 0, 0.0
        self._turn = 0

    def reset(self) -> None:
        """Start a new conversation. The cache of a prefix that both share is reused."""
        self.messages = [{"role": "system", "content": self.cfg.system}] if self.cfg.system else []
        # token ids of the last answer if the next turn can be appended to them
        self._written: list[int] = []

    @property
    def plain_rate(self) -> float | None:
        """Tokens per second of plain decoding over all measured tokens; None before the first."""
        return self.plain_tokens / self.plain_seconds if self.plain_seconds else None

    def reply(
        self, text: str, stop: Callable[[], bool] = lambda: False
    ) -> Generator[TextPiece, None, None]:
        """Yield the answer to a message.

        stop: called between rounds; if it returns true, the answer ends, and its text so far stays
        in the conversation. Raises UserError, with the conversation unchanged, for a message that
        leaves no room for an answer or exceeds max_prompt_tokens.
        """
        message = {"role": "user", "content": text}
        prompt = self._render([*self.messages, message])
        self._check_room(prompt)
        self._turn, self.last, self.prompt, self._written = self._turn + 1, None, prompt, []
        fresh: list[tuple[int, bool]] = []
        batch = self.session.start(
            prompt, request_id=self._turn, on_tokens=lambda _, new: fresh.extend(marked(new))
        )
        generation = batch.rows[0].generation

        def marked(tokens: list[int]) -> list[tuple[int, bool]]:
            return [
                (token, mark == "1")
                for token, mark in zip(tokens, generation.trace[-len(tokens) :], strict=True)
            ]

        stream, last = TextStream(lambda ids: text_of(self.engine, ids)), False
        try:
            while batch.rows and not stop():
                with torch.inference_mode():
                    batch.round()
                for token, accepted in fresh:
                    last = accepted
                    if piece := stream.add([token]):
                        yield TextPiece(piece, accepted)
                fresh.clear()
            # Do not show an incomplete character.
            if rest := stream.end().rstrip(BROKEN):
                yield TextPiece(rest, last)
        finally:
            full = len(prompt) + len(generation.tokens) >= self.engine.target.max_length
            self.last = ChatAnswer(generation, len(prompt), bool(batch.rows), full)
            if generation.tokens:
                written = text_of(self.engine, generation.tokens)
                self.messages += [message, {"role": "assistant", "content": written.rstrip(BROKEN)}]
                self._written = [] if written.endswith(BROKEN) else generation.tokens

    def time_plain(self) -> int | None:
        """Decode the end of the last answer again without the drafter, and update `plain_rate`.

        Returns the index, among these tokens, of the first one that differs; None if all are equal,
        or if they are samples, which may differ.
        """
        if self.last is None or self.engine.drafter is None:
            return None
        tokens = self.last.generation.tokens
        count = min(self.cfg.baseline_tokens, len(tokens))
        if count == 0:
            return None
        before = [*self.prompt, *tokens[: len(tokens) - count]]
        batch = self.session.start(
            before, drafted=False, max_new_tokens=count, request_id=self._turn
        )
        plain = batch.rows[0].generation
        with torch.inference_mode():
            while batch.rows and (
                len(plain.tokens) < MIN_PLAIN_TOKENS or plain.decode_seconds < MAX_PLAIN_SECONDS
            ):
                batch.round()
        self.plain_tokens += len(plain.tokens)
        self.plain_seconds += plain.decode_seconds
        written = tokens[len(tokens) - count :][: len(plain.tokens)]
        differs = first_difference(written, plain.tokens)
        # Restore the answer in the cache for the next message.
        if differs is not None and not self.last.context_full:
            self.session.start([*self.prompt, *tokens])
        return differs if is_compared(self.settings) else None

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer, template = self.engine.tokenizer, self.template
        if self._written:
            return render_next(tokenizer, messages, self.prompt, self._written, template=template)
        return render_prompt(tokenizer, messages, template=template)

    def _check_room(self, prompt: list[int]) -> None:
        context, limit = self.engine.target.max_length, self.cfg.max_prompt_tokens
        if len(prompt) >= context:
            most = f"and the target's context holds {context} with the answer"
        elif limit and len(prompt) > limit:
            most = f"over max_prompt_tokens={limit} (--max_prompt_length)"
        else:
            return
        earlier = "with all turns before it" if self.messages else "as the chat template renders it"
        remedy = "Type /reset for a new conversation" if self.messages else "Shorten it"
        raise UserError(f"your message {earlier} is {len(prompt)} tokens, {most}. {remedy}.")

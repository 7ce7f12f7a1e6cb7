"""Conversation with a target and its drafter: turns, caches and the cost of every answer.

The speedup is measured during the chat. After an answer, its last few tokens are decoded again
without the drafter, at the same position and in the same cache. The plain speed is the average over
all such tokens, so it becomes more precise as the chat continues.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch

from decoding.engine import text_of, with_costs
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.text.text_stream import BROKEN, TextStream
from decoding.rounds.stats import Generation
from decoding.rounds.ties import first_difference
from decoding.session import Session
from serving.config import GenerateConfig
from serving.setup import ChatModels
from training.data.chat import render_next, render_prompt

# Maximum time of plain decoding after an answer, once MIN_PLAIN_TOKENS are decoded.
MAX_PLAIN_SECONDS = 2.0
MIN_PLAIN_TOKENS = 4
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class TextPiece:
    """Part of an answer; `accepted` is false for tokens that the target chose itself."""

    text: str
    accepted: bool


@dataclass(frozen=True)
class ChatAnswer:
    """Cost of one answer."""

    generation: Generation
    prompt_tokens: int
    # whether the user stopped it
    stopped: bool
    context_full: bool

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding, prefill excluded."""
        return len(self.generation.tokens) / max(self.generation.decode_seconds, 1e-9)


class ChatSession:
    """One conversation; `reply` yields an answer, and `last` holds its cost."""

    def __init__(self, loaded: ChatModels, cfg: GenerateConfig) -> None:
        """Warm up the models and measure the costs of a round if the drafter needs them."""
        self.engine, self.cfg, self.template = loaded.engine, cfg, loaded.template
        # Token ids of the last turn with all turns before it.
        self.prompt: list[int] = []
        self.reset()
        hello = self._render([{"role": "user", "content": "Hello"}])
        self.settings = with_costs(self.engine, hello, loaded.settings)
        self._warm_up(hello)
        self.session = Session(self.engine.target, self.engine.drafter, self.settings)
        self.last: ChatAnswer | None = None
        self.plain_tokens, self.plain_seconds = 0, 0.0
        self._turn = 0

    def reset(self) -> None:
        """Forget the conversation; the next one reuses the cache of a common beginning."""
        self.messages = [{"role": "system", "content": self.cfg.system}] if self.cfg.system else []
        # Token ids of the last answer if the next turn can be appended to them.
        self._written: list[int] = []

    @property
    def plain_rate(self) -> float | None:
        """Tokens per second of plain decoding over all measured tokens, or None."""
        return self.plain_tokens / self.plain_seconds if self.plain_seconds else None

    def reply(
        self, text: str, stop: Callable[[], bool] = lambda: False
    ) -> Generator[TextPiece, None, None]:
        """Yield the answer to a message.

        `stop` is called between rounds; if it returns true, the answer ends and its text stays in
        the conversation. Raises UserError for a message that leaves no room for an answer; the
        conversation is then unchanged.
        """
        said = {"role": "user", "content": text}
        prompt = self._render([*self.messages, said])
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
                self.messages += [said, {"role": "assistant", "content": written.rstrip(BROKEN)}]
                self._written = [] if written.endswith(BROKEN) else generation.tokens

    def time_plain(self) -> int | None:
        """Decode the end of the last answer again without the drafter and update `plain_rate`.

        Returns the index of the first differing token, counted from the first one decoded again, or
        None if the outputs are equal or may differ.
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
        return (
            differs if self.settings.temperature == 0 or self.settings.verify == "coupled" else None
        )

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer, template = self.engine.tokenizer, self.template
        if self._written:
            return render_next(tokenizer, messages, self.prompt, self._written, template=template)
        return render_prompt(tokenizer, messages, template=template)

    def _check_room(self, prompt: list[int]) -> None:
        holds, limit = self.engine.target.max_length, self.cfg.max_prompt_tokens
        earlier = "with all turns before it" if self.messages else "as the chat template renders it"
        if len(prompt) >= holds:
            raise UserError(
                f"your message {earlier} is {len(prompt)} tokens, and the target's context holds "
                f"{holds} with the answer. "
                f"{'/reset starts a new conversation' if self.messages else 'Say it shorter'}."
            )
        if limit and len(prompt) > limit:
            raise UserError(
                f"your message {earlier} is {len(prompt)} tokens, over max_prompt_tokens={limit} "
                f"(--max_prompt_length). "
                f"{'/reset starts a new conversation' if self.messages else 'Say it shorter'}."
            )

    def _warm_up(self, prompt: list[int]) -> None:
        """Decode once with and without the drafter, so that no measured token has a new shape."""
        few = replace(self.settings, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
        decode(self.engine.target, None, [prompt], few)
        if self.engine.drafter is not None:
            decode(self.engine.target, self.engine.drafter, [prompt], few)

"""Answers of the target from an OpenAI-compatible server, with several requests in flight.

With server_prompts=tokens a request holds the token ids of a local run, so the server adds neither
its own chat template nor special tokens. With messages it holds the chat, and the length of the
server's prompt is compared with that of the target's template. A worker answers a chat turn by
turn, and the order in which answers arrive changes nothing.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from decoding.errors import UserError, without_stop
from decoding.values import is_int
from distill.config import RegenerateConfig
from distill.regenerate.batches import next_request
from distill.regenerate.dialogues import REFUSED, Answer, Dialogue, Key
from distill.regenerate.exchange import EXTENSIONS, Exchange, Reply, read_reply
from distill.regenerate.generate import Request
from jobs.openai_client import OpenAIClient, Patience, RequestRefused
from jobs.progress import ProgressBar

KeepAnswer = Callable[[Answer], None]

# So many refusals before any answer end the run: the fault is then hardly in the chats.
MOST_REFUSALS = 8


class ServerAnswers:
    """Answers to requests by the server of a configuration.

    stop_tokens: end-of-text ids of the target. advice: end of an error, which states what happens
    to finished answers.
    """

    def __init__(
        self, config: RegenerateConfig, tokenizer: Any, stop_tokens: Sequence[int], advice: str = ""
    ) -> None:
        self.config, self.tokenizer, self.advice = config, tokenizer, advice
        self.exchange = Exchange(config, tokenizer, stop_tokens)
        self.model = ""
        self._answered = self._refused = 0
        self._last = perf_counter()

    def connect(self) -> str:
        """Return the name of the server's model.

        Raises UserError if the server cannot be reached, lists other models, or serves a shorter
        context than the chats may fill.
        """
        entry = asyncio.run(self._find_model())
        context, limit = entry.get("max_model_len"), self.config.data.max_length
        if context is not None and is_int(context) and context < limit:
            raise UserError(
                f"{self.config.server} serves a context of {context} tokens (max_model_len), "
                f"expected data.max_length ({limit}) or more. Start it with a longer context, or "
                f"lower data.max_length"
            )
        self.model = str(entry["id"])
        return self.model

    async def _find_model(self) -> dict[str, Any]:
        async with self._client() as client:
            return await client.find_model(self.config.server_model)

    def answer_all(
        self,
        dialogues: Sequence[Dialogue],
        known: dict[Key, Answer],
        keep: Callable[[Answer], None],
    ) -> None:
        """Answer all dialogues, each turn by turn and several at a time.

        known: answers so far, to which new ones are added. keep: called with every new answer as it
        arrives. Raises UserError as `ask` does; requests in flight are then given up.
        """
        self._answered = sum(one.finish != REFUSED for one in known.values())
        work = self._answer_all([one for one in dialogues if not one.ended], known, keep)
        try:
            asyncio.run(work)
        except BaseExceptionGroup as group:
            raise next(_leaves(group)) from None

    async def _answer_all(
        self,
        dialogues: Sequence[Dialogue],
        known: dict[Key, Answer],
        keep: Callable[[Answer], None],
    ) -> None:
        waiting, tokens, done = iter(dialogues), 0, 0
        self._last = began = perf_counter()

        async def work(client: OpenAIClient, bar: ProgressBar) -> None:
            nonlocal tokens, done
            for dialogue in waiting:  # all workers share it
                while request := next_request(dialogue, self.tokenizer, self.config):
                    if request.key not in known:
                        answer = await self.ask(client, request)
                        keep(answer)
                        known[request.key] = answer
                        tokens += len(answer.tokens)
                    dialogue.add_answer(known[request.key], self.config)
                    done += 1
                    bar.update(done, f"{tokens / (perf_counter() - began):.0f} tokens/s")
                done += len(dialogue.requests) - len(dialogue.generated)

        total = sum(len(one.requests) for one in dialogues)
        with ProgressBar("regenerate", total) as bar:
            async with self._client() as client, asyncio.TaskGroup() as group:
                for _ in range(self.config.server_requests):
                    group.create_task(work(client, bar))
            bar.update(total)

    def tokens_per_second(self, requests: Sequence[Request], max_new_tokens: int) -> float:
        """Return the tokens per second of requests that are all in flight together."""

        async def count_tokens() -> int:
            async with self._client() as client:
                asked = (self._reply(client, request, max_new_tokens) for request in requests)
                replies = await asyncio.gather(*asked)
            return sum(len(self.exchange.tokens(reply)) for reply in replies)

        began = perf_counter()
        try:
            return asyncio.run(count_tokens()) / (perf_counter() - began)
        except RequestRefused as words:
            raise UserError(
                f"{self.config.server} refused a request ({words}). {self._remedy}"
            ) from words

    async def ask(self, client: OpenAIClient, request: Request) -> Answer:
        """Return the answer to a request; its finish is `refused` if the server rejects it.

        So is that of an answer which the server cuts before max_new_tokens.

        Raises UserError if the server fails, reads another prompt, has another tokenizer than the
        target, or rejects the first requests of a run.
        """
        try:
            reply = await self._reply(client, request, self.config.max_new_tokens)
        except RequestRefused as words:
            return self._refused_answer(request, str(words))
        self.exchange.check_prompt(reply, request)
        if reply.finish not in ("stop", "length"):
            return self._refused_answer(request, f"finish_reason {reply.finish}")
        given, wanted = reply.completion_tokens, self.config.max_new_tokens
        if reply.finish == "length" and given is not None and 0 < given < wanted:
            cut = f"an answer cut after {given} of {wanted} tokens, by a limit of its own"
            remedy = "Raise the server's limit of new tokens or of its context, or lower ours"
            return self._refused_answer(request, cut, f"{remedy} (max_new_tokens)")
        self._answered += 1
        tokens = self.exchange.tokens(reply)
        return Answer(
            *request.key,
            prompt_tokens=len(request.ids),
            read_tokens=len(request.ids) - reply.cached_tokens,
            tokens=tokens,
            finish=reply.finish,
            text=self.exchange.text(reply, tokens),
            rounds=0,
            seconds=self._since_last(),
            generated=reply.tokens is not None,
        )

    def _client(self) -> OpenAIClient:
        config = self.config
        patience = Patience(config.server_timeout_s, config.server_retries, config.server_retry_s)
        return OpenAIClient(config.server, patience, config.server_requests, self.advice)

    async def _reply(self, client: OpenAIClient, request: Request, max_new_tokens: int) -> Reply:
        body = self.exchange.body(request, self.model, max_new_tokens)
        return await client.post(self.exchange.path, body, read_reply)

    def _since_last(self) -> float:
        """Return the seconds since the last answer, so that all answers' seconds add up."""
        before, self._last = self._last, perf_counter()
        return round(self._last - before, 6)

    def _refused_answer(self, request: Request, words: str, remedy: str = "") -> Answer:
        """Return the answer for a request that got none of use.

        remedy: what to do if the server took the request. Raises UserError if all requests end so.
        """
        self._refused += 1
        words = without_stop(words)
        remedy = remedy or self._remedy
        if self._refused == 1:
            print(
                f"note: the server did not answer chat {request.key[0]}, turn {request.key[2]} "
                f"({words}). {remedy}. Such chats are counted, and answers/rank_0.jsonl holds "
                f"the words"
            )
        if self._refused >= MOST_REFUSALS and not self._answered:
            raise UserError(
                f"{self.config.server} did not answer the first {self._refused} requests, the "
                f"last one with {words}. {remedy}"
            )
        return Answer(
            *request.key,
            prompt_tokens=len(request.ids),
            read_tokens=0,
            tokens=[],
            finish=REFUSED,
            text=words,
            rounds=0,
            seconds=self._since_last(),
            generated=False,
        )

    @property
    def _remedy(self) -> str:
        return (
            f"If it does not take {', '.join(EXTENSIONS)}, set server_extensions=false; if it "
            f"takes no token ids, set server_prompts=messages"
        )


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors in a group of errors and groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error

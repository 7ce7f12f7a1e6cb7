"""Batches of dialogues: which requests are answered together and when a batch keeps its cache.

The chats of a batch continue turn by turn while at least half of them have requests left. Their
tokens stay in the cache (decoding/session.py), so only new tokens are read. The other chats wait
and join later batches, where they are read again. Batches therefore group chats with equally many
requests left, and among these requests of similar length.

All of this depends only on the configuration and the earlier answers. If one answer of a series of
turns is missing, the series is answered again from its first turn: the same batches with the same
caches give the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from decoding.errors import UserError
from distill.config import RegenerateConfig
from distill.regenerate.dialogues import FULL, Answer, Dialogue, EndingRules, Key
from distill.regenerate.generate import AnswerFunction, Request
from jobs.progress import ProgressBar
from training.data.chat import render_prompt

OpenRequests = list[tuple[Dialogue, Request]]


def answer_all(
    dialogues: Sequence[Dialogue],
    known: dict[Key, Answer],
    answering: AnswerFunction,
    tokenizer: Any,
    config: RegenerateConfig,
    show: bool,
) -> None:
    """Answer all dialogues; known: existing answers, to which new ones are added."""
    rules = EndingRules(config.on_length, config.drop_loops)
    dialogues = [one for one in dialogues if not one.ended]
    tokens, seconds = 0, 0.0

    def ask(dialogue: Dialogue) -> Request | None:
        return next_request(dialogue, tokenizer, config)

    with ProgressBar("regenerate", sum(len(one.requests) for one in dialogues), show=show) as bar:
        while asked := next_requests(dialogues, tokenizer, config):
            done = sum(len(one.requests) if one.ended else len(one.drawn) for one in dialogues)
            for start in range(0, len(asked), config.batch_size):
                batch = asked[start : start + config.batch_size]
                for turn, drawn in answer_batch(batch, known, answering, ask, rules):
                    tokens += sum(len(answer.tokens) for answer in drawn)
                    seconds += sum(answer.seconds for answer in drawn)
                    done += sum(
                        1 + (len(one.requests) - len(one.drawn) if one.ended else 0)
                        for one, _ in turn
                    )
                    bar.update(
                        done, f"{tokens / seconds:.0f} tokens/s" if seconds else "already answered"
                    )


def answer_batch(
    batch: OpenRequests,
    known: dict[Key, Answer],
    answering: AnswerFunction,
    ask: Callable[[Dialogue], Request | None],
    rules: EndingRules,
) -> Iterator[tuple[OpenRequests, list[Answer]]]:
    """Answer a batch, then the next requests of its dialogues while at least half of them have one.

    Yields each turn with its new answers.
    """
    turn = batch
    # Turns whose answers are known but not in the cache.
    passed: list[list[Request]] = []
    begun = False
    while turn and 2 * len(turn) >= len(batch):
        requests = [request for _, request in turn]
        drawn: list[Answer] = []
        if not begun and all(request.key in known for request in requests):
            passed.append(requests)
        else:
            for number, earlier in enumerate(passed):
                answering(earlier, number > 0)
            drawn = answering(requests, begun or bool(passed))
            begun, passed = True, []
            for answer in drawn:
                known.setdefault(answer.key, answer)
        for dialogue, request in turn:
            dialogue.take(known[request.key], rules)
        yield turn, drawn
        following = [(dialogue, ask(dialogue)) for dialogue, _ in turn]
        turn = [(dialogue, request) for dialogue, request in following if request is not None]


def next_requests(
    dialogues: Sequence[Dialogue], tokenizer: Any, config: RegenerateConfig
) -> OpenRequests:
    """Return the next request of every dialogue that has one.

    Dialogues with the most turns and the longest requests come first, so that a lack of memory
    shows early.
    """

    def order(pair: tuple[Dialogue, Request]) -> tuple[int, int, Key]:
        dialogue, request = pair
        return len(dialogue.drawn) - len(dialogue.requests), -len(request.ids), request.key

    asked = ((one, next_request(one, tokenizer, config)) for one in dialogues)
    return sorted(((one, request) for one, request in asked if request is not None), key=order)


def next_request(dialogue: Dialogue, tokenizer: Any, config: RegenerateConfig) -> Request | None:
    """Return the dialogue's next request, or None after setting the reason that it ended."""
    if dialogue.ended:
        return None
    try:
        ids = render_prompt(tokenizer, dialogue.history, template=config.data.template)
    except UserError as error:
        dialogue.ended = str(error)
        return None
    if len(ids) + config.max_new_tokens > config.data.max_length:
        dialogue.ended = FULL
        return None
    last = len(dialogue.drawn) + 1 == len(dialogue.requests)
    return Request(dialogue.key, dialogue.history, ids, last)

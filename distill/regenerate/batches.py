"""Batches of dialogues: the requests that are answered together, and the turns that share a cache.

A batch continues turn by turn while at least half of its chats have requests left. Their tokens
stay in the cache (decoding/sessions/conversations.py), so only new tokens are read. The other chats
wait for a later batch, where they are read again. Batches therefore group chats with equal numbers
of requests left, and among these, requests of similar length.

Batches depend only on the configuration and on earlier answers. If one answer of a batch is
missing, the batch is answered again from its first turn, because only equal batches with equal
caches give equal bits.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from decoding.errors import UserError
from distill.config import RegenerateConfig
from distill.regenerate.dialogues import FULL, Answer, Dialogue, Key
from distill.regenerate.generate import AnswerFunction, Request
from jobs.progress import ProgressBar
from training.data.chat import render_prompt

OpenRequests = list[tuple[Dialogue, Request]]


def answer_all(
    dialogues: Sequence[Dialogue],
    known: dict[Key, Answer],
    generate: AnswerFunction,
    tokenizer: Any,
    config: RegenerateConfig,
    show: bool,
) -> None:
    """Answer all dialogues.

    known: answers so far, to which new ones are added. generate: answers a batch of requests. show:
    whether to show a progress bar.
    """
    ask = partial(next_request, tokenizer=tokenizer, config=config)
    dialogues = [one for one in dialogues if not one.ended]
    tokens, seconds = 0, 0.0
    with ProgressBar("regenerate", sum(len(one.requests) for one in dialogues), show=show) as bar:
        while requests := next_requests(dialogues, tokenizer, config):
            done = sum(len(one.requests) if one.ended else len(one.generated) for one in dialogues)
            for start in range(0, len(requests), config.batch_size):
                batch = requests[start : start + config.batch_size]
                for turn, answers in answer_batch(batch, known, generate, ask, config):
                    tokens += sum(len(answer.tokens) for answer in answers)
                    seconds += sum(answer.seconds for answer in answers)
                    for one, _ in turn:
                        done += 1 + (len(one.requests) - len(one.generated) if one.ended else 0)
                    pace = f"{tokens / seconds:.0f} tokens/s" if seconds else "already answered"
                    bar.update(done, pace)


def answer_batch(
    batch: OpenRequests,
    known: dict[Key, Answer],
    generate: AnswerFunction,
    ask: Callable[[Dialogue], Request | None],
    config: RegenerateConfig,
) -> Iterator[tuple[OpenRequests, list[Answer]]]:
    """Answer a batch turn by turn while at least half of its dialogues have a request.

    known: answers so far, to which new ones are added. ask: function that returns the next request
    of a dialogue, or None. Yields each turn with the answers that were generated for it.
    """
    turn = batch
    # Earlier turns whose answers are known but not in the cache.
    skipped: list[list[Request]] = []
    begun = False
    while turn and 2 * len(turn) >= len(batch):
        requests = [request for _, request in turn]
        answers: list[Answer] = []
        if not begun and all(request.key in known for request in requests):
            skipped.append(requests)
        else:
            for number, earlier in enumerate(skipped):
                generate(earlier, number > 0)
            answers = generate(requests, begun or bool(skipped))
            begun, skipped = True, []
            for answer in answers:
                known.setdefault(answer.key, answer)
        for dialogue, request in turn:
            dialogue.add_answer(known[request.key], config)
        yield turn, answers
        following = [(dialogue, ask(dialogue)) for dialogue, _ in turn]
        turn = [(dialogue, request) for dialogue, request in following if request is not None]


def next_requests(
    dialogues: Sequence[Dialogue], tokenizer: Any, config: RegenerateConfig
) -> OpenRequests:
    """Return the next request of every dialogue that has one.

    Dialogues with the most requests left come first, and among them those with the longest next
    request, so a lack of memory shows early.
    """

    def order(pair: tuple[Dialogue, Request]) -> tuple[int, int, Key]:
        dialogue, request = pair
        return len(dialogue.generated) - len(dialogue.requests), -len(request.ids), request.key

    following = ((one, next_request(one, tokenizer, config)) for one in dialogues)
    return sorted(((one, request) for one, request in following if request is not None), key=order)


def next_request(dialogue: Dialogue, tokenizer: Any, config: RegenerateConfig) -> Request | None:
    """Return the dialogue's next request; if there is none that fits, end it and return None."""
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
    last = len(dialogue.generated) + 1 == len(dialogue.requests)
    return Request(dialogue.key, dialogue.history, ids, last)

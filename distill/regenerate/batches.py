"""Dialogues brought to their end: whose requests share a batch, and which batches follow each other
in one cache.

A batch's chats go on together, turn after turn, as long as at least half of them do: what the
target has read and said of a chat stays in its cache (decoding/session.py), and only what is new is
read. The others wait and share batches with what is left of other ones, where they are read anew.
So chats with equally many requests left stand together, and among these requests of like length.

All of it follows from the configuration and the earlier answers. A series of turns of which one
answer is missing is answered again from its first
one: the same batches in the same caches give the same bits.
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
    """Bring dialogues to their end. known: answers that are there already; new ones are added."""
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
                        done, f"{tokens / seconds:.0f} tokens/s" if seconds else "answered before"
                    )


def answer_batch(
    batch: OpenRequests,
    known: dict[Key, Answer],
    answering: AnswerFunction,
    ask: Callable[[Dialogue], Request | None],
    rules: EndingRules,
) -> Iterator[tuple[OpenRequests, list[Answer]]]:
    """Answer a batch, then the next requests of its dialogues while at least half of them have one.
    Yields each turn and the answers drawn for it.
    """
    turn = batch
    passed: list[list[Request]] = []  # turns whose answers are known, and are not in the cache
    begun = False
    while turn and 2 * len(turn) >= len(batch):
        requests = [request for _, request in turn]
        drawn: list[Answer] = []
        if not begun and all(request.key in known for request in requests):
            passed.append(requests)
        else:
            for number, earlier in enumerate([] if begun else passed):
                answering(earlier, number > 0)
            drawn = answering(requests, begun or bool(passed))
            begun = True
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
    """The next request of every dialogue that has one; most turns and longest first: a lack of
    memory shows at once.
    """
    asked = [(one, next_request(one, tokenizer, config)) for one in dialogues]
    found = [(dialogue, request) for dialogue, request in asked if request is not None]
    return sorted(
        found,
        key=lambda pair: (
            len(pair[0].drawn) - len(pair[0].requests),
            -len(pair[1].ids),
            pair[1].key,
        ),
    )


def next_request(dialogue: Dialogue, tokenizer: Any, config: RegenerateConfig) -> Request | None:
    """What is asked next; None where nothing is, and then the dialogue says why."""
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
    return Request(
        dialogue.key, dialogue.history, ids, len(dialogue.drawn) + 1 == len(dialogue.requests)
    )

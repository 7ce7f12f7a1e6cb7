"""Test the dialogues of `distill.regenerate`: requests, endings, batches and the chat account."""

from collections.abc import Sequence

import pytest

from distill.config import RegenerateConfig
from distill.regenerate.batches import answer_batch
from distill.regenerate.dialogues import (
    CUT,
    EMPTY,
    LOOP,
    Account,
    Answer,
    Dialogue,
    Key,
    split_requests,
)
from distill.regenerate.generate import Request
from training.data.readers import Chat


def chat(*turns: str) -> Chat:
    """Return a chat of these turns.

    The first letter of a turn gives its role: s(ystem), u(ser) or a(ssistant).
    """
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return Chat("an id", [{"role": roles[turn[0]], "content": turn} for turn in turns], "file:1")


def rules(on_length: str = "end", drop_loops: bool = False) -> RegenerateConfig:
    return RegenerateConfig(on_length=on_length, drop_loops=drop_loops)


def answer(
    turn: int, text: str = "fine", tokens: list[int] | None = None, finish: str = "stop"
) -> Answer:
    tokens = [5, 6, 7, 2] if tokens is None else tokens
    return Answer(0, 0, turn, 10, 9, tokens, finish, text, rounds=len(tokens), seconds=0.1)


@pytest.mark.parametrize(
    ("turns", "asked"),
    [
        (["u1", "a1"], [["u1"]]),
        (["s", "u1", "a1", "u2", "a2"], [["s", "u1"], ["u2"]]),
        (["a0", "u1", "a1", "a2", "u2"], [["u1"], ["u2"]]),
        (["s", "a0", "u1"], [["s", "u1"]]),
        (["u1", "u2", "a1"], [["u1", "u2"]]),
        (["u1", "a1", "s2"], [["u1"]]),
        (["a0", "s"], []),
    ],
)
def test_requests_are_the_turns_before_each_answer(turns: list[str], asked: list[list[str]]):
    found = split_requests(chat(*turns).messages)
    assert [[message["content"] for message in request] for request in found] == asked


def test_a_request_contains_the_targets_answers_and_no_original_ones():
    dialogue = Dialogue(0, 0, chat("s", "u1", "a1", "u2", "a2"))
    dialogue.add_answer(answer(0, "mine"), rules())
    assert [message["content"] for message in dialogue.history] == ["s", "u1", "mine", "u2"]
    dialogue.add_answer(answer(1, "mine too"), rules())
    assert dialogue.ended == "complete"
    assert [turn["value"] for turn in dialogue.record(1)["conversations"]] == [
        "s",
        "u1",
        "mine",
        "u2",
        "mine too",
    ]


LOOPING = [1, 2] * 20


@pytest.mark.parametrize(
    ("new", "config", "kept", "ended"),
    [
        (answer(1, finish="length"), rules("end"), 2, CUT),
        (answer(1, finish="length"), rules("drop"), 1, CUT),
        (answer(1, finish="length"), rules("go_on"), 2, ""),
        (answer(1, text=" \n"), rules(), 1, EMPTY),
        (answer(1, tokens=LOOPING), rules(drop_loops=True), 1, LOOP),
        (answer(1, tokens=LOOPING), rules(), 2, ""),
        (answer(1), rules("drop", drop_loops=True), 2, ""),
    ],
)
def test_incomplete_and_looping_answers_end_their_chat_by_the_rules(
    new: Answer, config: RegenerateConfig, kept: int, ended: str
):
    dialogue = Dialogue(0, 0, chat("u1", "a1", "u2", "a2", "u3"))
    dialogue.add_answer(answer(0), config)
    dialogue.add_answer(new, config)
    assert (dialogue.kept, dialogue.ended) == (kept, ended)
    record = dialogue.record(1)
    assert [turn.get("finish") for turn in record["conversations"]][1::2] == ["stop", new.finish][
        :kept
    ]
    assert record["conversations"][-1]["from"] == "gpt"


def test_a_batch_continues_with_half_of_its_chats_and_restarts_for_a_missing_answer():
    turns = [
        ["u", "a", "u", "a", "u"],
        ["u", "a", "u"],
        ["u", "a", "u", "a", "u"],
        ["u"],
        ["u", "a", "u"],
    ]
    calls: list[tuple[list[tuple[int, int, int]], bool]] = []

    def answering(requests: Sequence[Request], continues: bool) -> list[Answer]:
        calls.append(([request.key for request in requests], continues))
        return [Answer(*request.key, 10, 9, [5, 2], "stop", "fine", 2, 0.1) for request in requests]

    def ask(dialogue: Dialogue) -> Request | None:
        last = len(dialogue.generated) + 1 == len(dialogue.requests)
        return None if dialogue.ended else Request(dialogue.key, dialogue.history, [1], last)

    def run_all(known: dict[Key, Answer]) -> list[int]:
        dialogues = [Dialogue(number, 0, chat(*parts)) for number, parts in enumerate(turns)]
        batch = [(one, found) for one in dialogues if (found := ask(one)) is not None]
        return [len(turn) for turn, _ in answer_batch(batch, known, answering, ask, rules())]

    known: dict[Key, Answer] = {}
    first, second = [(n, 0, 0) for n in range(5)], [(n, 0, 1) for n in (0, 1, 2, 4)]
    assert run_all(known) == [5, 4], "fewer than half of the chats have a third turn"
    assert calls == [(first, False), (second, True)]
    assert sorted(known) == sorted([*first, *second])
    calls.clear()
    assert run_all(known) == [5, 4] and not calls, "known answers are not generated again"
    del known[(2, 0, 1)]
    assert run_all(known) == [5, 4]
    assert calls == [(first, False), (second, True)], "equal batches give equal caches"


def test_an_account_that_does_not_balance_is_an_error():
    account = Account(input=2)
    account.add(Dialogue(0, 0, chat("a0")))
    with pytest.raises(
        RuntimeError, match=r"0 answered \+ 1 skipped \+ 0 failed, expected 2 in total"
    ):
        account.check()
    account.add(Dialogue(1, 0, chat("a1")))
    account.check()

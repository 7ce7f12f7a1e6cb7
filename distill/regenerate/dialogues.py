"""Dialogues with new answers: the requests, the reasons that a chat ends, and the account.

A chat keeps its system and human turns. The target answers in place of the assistant turns and is
given its own earlier answers, never the original ones. By default a chat does not continue after an
incomplete answer. Nothing here decodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoding.rounds.stats import LOOPING_BELOW, distinct_n
from training.data.counts import SHOWN_PLACES
from training.data.readers import Chat

Message = dict[str, str]
# (number of the chat in the input, sample, turn)
Key = tuple[int, int, int]

ON_LENGTH = ("end", "drop", "go_on")
# Every request was answered.
COMPLETE = "complete"
# Reasons to end a chat before its last request, or to skip it.
CUT, EMPTY, LOOP = "answer cut at max_new_tokens", "empty answer", "answer loops"
FULL, NO_REQUEST = "no room in the context", "no human turn"
DUPLICATE, OVER_LIMIT = "duplicate of an earlier chat", "over data.max_samples"

_FROM = {"system": "system", "user": "human", "assistant": "gpt"}


@dataclass(frozen=True)
class Answer:
    """Answer of the target, a line of the journal."""

    # number of the chat in the input
    chat: int
    sample: int
    # number of the request in the chat
    turn: int
    prompt_tokens: int
    # prompt tokens that were read; the others except the last one were cached
    read_tokens: int
    # including the stop token
    tokens: list[int]
    # stop | length
    finish: str
    text: str
    # number of target forwards, prefill excluded
    rounds: int
    # the batch's seconds times the share of its tokens
    seconds: float

    @property
    def key(self) -> Key:
        return self.chat, self.sample, self.turn

    @property
    def body(self) -> list[int]:
        """Tokens of the text, without the stop token."""
        return self.tokens[:-1] if self.finish == "stop" else self.tokens

    @property
    def distinct_4(self) -> float:
        return distinct_n(self.body)

    @property
    def loops(self) -> bool:
        return self.distinct_4 < LOOPING_BELOW


def make_answer(values: Mapping[str, Any]) -> Answer:
    """Convert a record of the journal to an answer; raises TypeError for unknown fields."""
    return Answer(**values)


@dataclass(frozen=True)
class EndingRules:
    """Rules for answers that are incomplete or loop."""

    # cut at max_new_tokens: end (kept, ends the chat) | drop (discarded) | go_on (kept)
    on_length: str = "end"
    # discard answers that loop and end their chat
    drop_loops: bool = False


class Dialogue:
    """One sample of a chat: its messages so far and its remaining requests."""

    def __init__(self, chat: int, sample: int, found: Chat) -> None:
        self.chat, self.sample, self.source = chat, sample, found.source
        # A chat without an id is named by its place, without the folder.
        self.id = found.id if found.id != found.source else Path(found.source).name
        self.requests = split_requests(found.messages)
        self.messages: list[Message] = []
        # All answers; the last one may be discarded.
        self.drawn: list[Answer] = []
        # Number of answers among the messages.
        self.kept = 0
        # Reason that the dialogue ended; empty: another request follows.
        self.ended = "" if self.requests else NO_REQUEST

    @property
    def key(self) -> Key:
        """Key of the next answer."""
        return self.chat, self.sample, len(self.drawn)

    @property
    def history(self) -> list[Message]:
        """Messages up to and including the next request."""
        return [*self.messages, *self.requests[len(self.drawn)]]

    @property
    def answers(self) -> list[Answer]:
        """Kept answers."""
        return self.drawn[: self.kept]

    def take(self, answer: Answer, rules: EndingRules) -> None:
        """Add the answer to the next request, and end the dialogue if a rule requires it."""
        history = self.history
        self.drawn.append(answer)
        cut = answer.finish == "length" and rules.on_length != "go_on"
        if not answer.text.strip():
            self.ended = EMPTY
        elif answer.loops and rules.drop_loops:
            self.ended = LOOP
        elif cut and rules.on_length == "drop":
            self.ended = CUT
        else:
            self.messages = [*history, {"role": "assistant", "content": answer.text}]
            self.kept += 1
            if len(self.drawn) == len(self.requests):
                self.ended = COMPLETE
            elif cut:
                self.ended = CUT

    def record(self, samples: int) -> dict[str, Any]:
        """Return the chat in ShareGPT form with the token count and ending of each answer."""
        answers = iter(self.answers)
        turns: list[dict[str, Any]] = []
        for message in self.messages:
            turns.append({"from": _FROM[message["role"]], "value": message["content"]})
            if message["role"] == "assistant":
                answer = next(answers)
                turns[-1] |= {"tokens": len(answer.tokens), "finish": answer.finish}
        which = {"sample": self.sample} if samples > 1 else {}
        return {"id": self.id, **which, "ended": self.ended, "conversations": turns}


def split_requests(messages: Sequence[Message]) -> list[list[Message]]:
    """Split messages into requests: runs of system and human turns with at least one human turn.

    A last human turn without an answer is a request too. Answers without a request (at the start,
    or two in a row) are ignored.
    """
    requests: list[list[Message]] = []
    run: list[Message] = []
    for message in [*messages, {"role": "assistant", "content": ""}]:
        if message["role"] != "assistant":
            run.append(message)
        elif any(one["role"] == "user" for one in run):
            requests.append(run)
            run = []
    return requests


def build_dialogues(
    chats: Sequence[Chat], samples: int, limit: int, drop_duplicates: bool
) -> list[Dialogue]:
    """Return a dialogue for every sample of every chat, in input order.

    Duplicates and chats beyond `limit` (0: no limit) have already ended.
    """
    found: list[Dialogue] = []
    seen: set[tuple[str, ...]] = set()
    for number, chat in enumerate(chats):
        new = [Dialogue(number, sample, chat) for sample in range(samples)]
        asked = tuple(
            message["role"] + message["content"]
            for request in new[0].requests
            for message in request
        )
        for dialogue in new:
            if limit and number >= limit:
                dialogue.ended = OVER_LIMIT
            elif drop_duplicates and asked in seen:
                dialogue.ended = DUPLICATE
        seen.add(asked)
        found += new
    return found


@dataclass
class Account:
    """Account of the input: success + skipped (never asked) + failed (no usable answer) = input."""

    # records of the files x samples
    input: int
    success: int = 0
    # places ("file:line") by reason
    skipped: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    # number of successes by reason
    ended_early: dict[str, int] = field(default_factory=dict)

    def add(self, dialogue: Dialogue, unreadable: str = "") -> bool:
        """Count an ended dialogue and return whether it is a success.

        unreadable: reason that training cannot read it, or an empty string.
        """
        if dialogue.kept and not unreadable:
            self.success += 1
            if dialogue.ended != COMPLETE:
                self.ended_early[dialogue.ended] = self.ended_early.get(dialogue.ended, 0) + 1
            return True
        reasons = self.failed if dialogue.drawn else self.skipped
        reasons.setdefault(unreadable or dialogue.ended, []).append(dialogue.source)
        return False

    def check(self) -> None:
        """Raise RuntimeError if the account does not balance, which is a bug in this program."""
        skipped, failed = _total(self.skipped), _total(self.failed)
        if self.success + skipped + failed != self.input:
            raise RuntimeError(
                f"the account does not balance: {self.success} answered + {skipped} skipped + "
                f"{failed} failed, expected {self.input} in total. This is a bug, please report it"
            )

    def figures(self) -> dict[str, Any]:
        """Return the counts for the manifest."""
        return {
            "input": self.input,
            "success": self.success,
            "skipped": {reason: len(places) for reason, places in self.skipped.items()},
            "failed": {reason: len(places) for reason, places in self.failed.items()},
            "ended_early": self.ended_early,
        }

    def lines(self) -> Iterator[str]:
        """Yield lines for the terminal with the first places of every reason."""
        yield (
            f"chats: {self.input:,} in, {self.success:,} answered, {_total(self.skipped):,} "
            f"skipped, {_total(self.failed):,} failed"
        )
        for word, reasons in (("skipped", self.skipped), ("failed", self.failed)):
            for reason, places in reasons.items():
                more = ", ..." if len(places) > SHOWN_PLACES else ""
                shown = f" ({', '.join(places[:SHOWN_PLACES])}{more})"
                # The places of chats over the limit are obvious.
                where = "" if reason == OVER_LIMIT else shown
                yield f"  {len(places):,} {word}: {reason}{where}"
        for reason, count in self.ended_early.items():
            yield f"  {count:,} answered chats end before their last request: {reason}"


def _total(reasons: dict[str, list[str]]) -> int:
    return sum(map(len, reasons.values()))

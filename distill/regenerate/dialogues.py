"""Chats on their way to new answers: what is asked, what is fed on, why a chat ends, and the
account of it all. Nothing here decodes.

A chat's system and human turns are kept and its assistant turns are left out; the target answers in
their place, and sees its own earlier answers, never those that were found. An answer that did not
end by itself is not fed on as if it had.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoding.rounds.stats import LOOPING_BELOW, distinct_n
from training.data.counts import SHOWN_PLACES
from training.data.readers import Chat

Message = dict[str, str]
Key = tuple[int, int, int]  # number of the chat in the input, sample, turn

ON_LENGTH = ("end", "drop", "go_on")
COMPLETE = "complete"  # every request was answered
# Why a chat ends before its last request, or is not asked at all.
CUT, EMPTY, LOOP, FULL = (
    "answer cut at max_new_tokens",
    "empty answer",
    "answer loops",
    "no room in the context",
)
NO_REQUEST, DUPLICATE, OVER_LIMIT = (
    "no human turn",
    "duplicate of an earlier chat",
    "over data.max_samples",
)

_FROM = {"system": "system", "user": "human", "assistant": "gpt"}


@dataclass(frozen=True)
class Answer:
    """One answer of the target: a line of the journal."""

    chat: int  # number of the chat in the input
    sample: int
    turn: int  # number of the request in its chat
    prompt_tokens: int
    read_tokens: int  # of the prompt; the rest but its last stood in the cache
    tokens: list[int]  # the stop token included
    finish: str  # stop | length
    text: str
    rounds: int  # target forwards, prefill excluded
    seconds: float  # of its batch, by its part of the batch's tokens

    @property
    def key(self) -> Key:
        return self.chat, self.sample, self.turn

    @property
    def body(self) -> list[int]:
        """The tokens of the text: without the stop token."""
        return self.tokens[:-1] if self.finish == "stop" else self.tokens

    @property
    def distinct_4(self) -> float:
        return distinct_n(self.body)

    @property
    def loops(self) -> bool:
        return self.distinct_4 < LOOPING_BELOW


def make_answer(values: Mapping[str, Any]) -> Answer:
    """The answer in a record of the journal. Raises TypeError for one of other fields."""
    return Answer(**values)


@dataclass(frozen=True)
class EndingRules:
    """What becomes of answers that are no good end of a turn."""

    # cut at max_new_tokens: end (kept, the last one) | drop (left out) | go_on (fed on)
    on_length: str = "end"
    drop_loops: bool = False  # an answer that loops is left out, and ends its chat


class Dialogue:
    """One chat, for one of its samples: the messages so far, and whether another
    request follows.
    """

    def __init__(self, chat: int, sample: int, found: Chat) -> None:
        self.chat, self.sample, self.source = chat, sample, found.source
        # A chat without an id is called by its place, and no artefact names a folder of this
        # machine.
        self.id = found.id if found.id != found.source else Path(found.source).name
        self.requests = split_requests(found.messages)
        self.messages: list[Message] = []
        self.drawn: list[Answer] = []  # all answers, one left out at the end among them
        self.kept = 0  # answers among the messages
        self.ended = "" if self.requests else NO_REQUEST  # why no request follows; empty: one does

    @property
    def key(self) -> Key:
        """Of the next answer."""
        return self.chat, self.sample, len(self.drawn)

    @property
    def history(self) -> list[Message]:
        """The messages up to the next request, which the target is to answer."""
        return [*self.messages, *self.requests[len(self.drawn)]]

    @property
    def answers(self) -> list[Answer]:
        """Those that are kept."""
        return self.drawn[: self.kept]

    def take(self, answer: Answer, rules: EndingRules) -> None:
        """The answer to the next request."""
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
        """In ShareGPT form, each answer with its number of tokens and how it ended."""
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
    """What stands before each answer: a run of system and human turns that holds a human one.

    A last human turn that nobody answered is a request too. Answers that nobody asked for (at the
    start, or two in a row) are passed over.
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
    """A dialogue for every sample of every chat, in input order; those that are not to be asked
    have ended already.

    limit: chats that are asked at most, 0 for all.
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
        reason = (
            OVER_LIMIT
            if limit and number >= limit
            else DUPLICATE
            if drop_duplicates and asked in seen
            else ""
        )
        for dialogue in new:
            dialogue.ended = reason or dialogue.ended
        seen.add(asked)
        found += new
    return found


@dataclass
class Account:
    """What became of the input: success + skipped (never asked) + failed (asked, nothing usable
    came) = input.
    """

    input: int  # records of the files x samples
    success: int = 0
    skipped: dict[str, list[str]] = field(default_factory=dict)  # reason -> places ("file:line")
    failed: dict[str, list[str]] = field(default_factory=dict)
    # of the successes: reason -> how many
    ended_early: dict[str, int] = field(default_factory=dict)

    def add(self, dialogue: Dialogue, unreadable: str = "") -> bool:
        """Count a dialogue that has ended; unreadable: why training cannot read it. Returns whether
        it is a success.
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
        """Raise RuntimeError where the books do not balance: then this program is wrong, and says
        so under `python -O` too.
        """
        skipped, failed = (
            sum(map(len, reasons.values())) for reasons in (self.skipped, self.failed)
        )
        if self.success + skipped + failed != self.input:
            raise RuntimeError(
                f"the account does not balance: {self.success} answered + {skipped} skipped + "
                f"{failed} failed, expected {self.input} in all"
            )

    def figures(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "input": self.input,
            "success": self.success,
            "skipped": {reason: len(places) for reason, places in self.skipped.items()},
            "failed": {reason: len(places) for reason, places in self.failed.items()},
            "ended_early": self.ended_early,
        }

    def lines(self) -> Iterator[str]:
        """For the terminal, the first places of every reason among them."""
        yield (
            f"chats: {self.input:,} in, {self.success:,} answered, {_total(self.skipped)} "
            f"skipped, {_total(self.failed)} failed"
        )
        for word, reasons in (("skipped", self.skipped), ("failed", self.failed)):
            for reason, places in reasons.items():
                shown = ", ".join(places[:SHOWN_PLACES]) + (
                    ", ..." if len(places) > SHOWN_PLACES else ""
                )
                # which ones those are is known
                where = f" ({shown})" if reason != OVER_LIMIT else ""
                yield f"  {len(places):,} {word}: {reason}{where}"
        for reason, count in self.ended_early.items():
            yield f"  {count:,} of the answered end before their last request: {reason}"


def _total(reasons: dict[str, list[str]]) -> str:
    return f"{sum(map(len, reasons.values())):,}"

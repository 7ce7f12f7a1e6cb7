"""Chats with new answers: requests, reasons to end a chat, and the account of all chats.

A chat keeps its system and human turns. The target's answers replace the assistant turns, and each
request contains the target's earlier answers, never the original ones. By default a chat ends after
an incomplete answer. Nothing here decodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoding.rounds.stats import LOOPING_BELOW, distinct_n
from distill.config import RegenerateConfig
from training.data.counts import SHOWN_PLACES
from training.data.readers import Chat

Message = dict[str, str]
# (number of the chat in the input, sample, turn)
Key = tuple[int, int, int]

ON_LENGTH = ("end", "drop", "go_on")
# Reason to end a chat: every request was answered.
COMPLETE = "complete"
# Reasons to end a chat before its last request, or to skip the chat.
CUT, EMPTY, LOOP = "answer cut at max_new_tokens", "empty answer", "answer loops"
REJECTED = "refused by the server"
FULL, NO_REQUEST = "no room in the context", "no human turn"
DUPLICATE, OVER_LIMIT = "duplicate of an earlier chat", "over data.max_samples"

REFUSED = "refused"  # finish of an answer that the server did not give

_FROM = {"system": "system", "user": "human", "assistant": "gpt"}


@dataclass(frozen=True)
class Answer:
    """Answer of the target to one request, as in a line of the journal."""

    # number of the chat in the input
    chat: int
    sample: int
    # number of the request in the chat
    turn: int
    prompt_tokens: int
    # prompt tokens that the prefill read; all others but the last were cached
    read_tokens: int
    # with the stop token
    tokens: list[int]
    # stop | length | refused
    finish: str
    # the server's words if the answer is refused
    text: str
    # number of target forwards, prefill excluded; 0: unknown, from a server
    rounds: int
    # seconds of the batch times this answer's share of its tokens; from a server, the seconds since
    # the answer that arrived before
    seconds: float
    # whether the tokens are the generated ones; False: those of the text, tokenized again
    generated: bool = True

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
    """Return the answer in a journal record. Raises TypeError for unknown or missing fields."""
    return Answer(**values)


class Dialogue:
    """One sample of a chat: its messages so far and its remaining requests."""

    def __init__(self, chat: int, sample: int, found: Chat) -> None:
        self.chat, self.sample, self.source = chat, sample, found.source
        # A chat without an id is named by its file and line, without the folder.
        self.id = found.id if found.id != found.source else Path(found.source).name
        self.requests = split_requests(found.messages)
        self.messages: list[Message] = []
        # All answers, of which the last one may be discarded.
        self.generated: list[Answer] = []
        # Number of answers among the messages.
        self.kept = 0
        # Reason to end the dialogue; empty while another request follows.
        self.ended = "" if self.requests else NO_REQUEST

    @property
    def key(self) -> Key:
        """Key of the next answer."""
        return self.chat, self.sample, len(self.generated)

    @property
    def history(self) -> list[Message]:
        """Messages up to and including the next request."""
        return [*self.messages, *self.requests[len(self.generated)]]

    @property
    def answers(self) -> list[Answer]:
        """Kept answers."""
        return self.generated[: self.kept]

    def add_answer(self, answer: Answer, config: RegenerateConfig) -> None:
        """Keep or discard the answer to the next request, and end the dialogue if necessary."""
        history = self.history
        self.generated.append(answer)
        cut = answer.finish == "length" and config.on_length != "go_on"
        if answer.finish == REFUSED:
            self.ended = REJECTED
        elif not answer.text.strip():
            self.ended = EMPTY
        elif answer.loops and config.drop_loops:
            self.ended = LOOP
        elif cut and config.on_length == "drop":
            self.ended = CUT
        else:
            self.messages = [*history, {"role": "assistant", "content": answer.text}]
            self.kept += 1
            if len(self.generated) == len(self.requests):
                self.ended = COMPLETE
            elif cut:
                self.ended = CUT

    def record(self, samples: int) -> dict[str, Any]:
        """Return the chat in ShareGPT form, with the token count and the finish of each answer.

        samples: number of samples of every chat; with several, the number of this one is recorded.
        """
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
    """Return the requests: runs of system and human turns with at least one human turn.

    A last human turn without an answer is a request too. Answers without a request, at the start or
    after another answer, are ignored.
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

    Duplicates and chats beyond `limit` (0: no limit) are ended at once.
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
    """Account of the input: success + skipped + failed = input.

    A skipped chat was never answered. A failed chat was, but has no usable answer or cannot be read
    by training.
    """

    # records of the files x samples
    input: int
    success: int = 0
    # places ("file:line") by reason
    skipped: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)
    # number of successes that ended before their last request, by reason
    ended_early: dict[str, int] = field(default_factory=dict)

    def add(self, dialogue: Dialogue, unreadable: str = "") -> bool:
        """Count an ended dialogue. Returns whether it is a success.

        unreadable: the reason why training cannot read the dialogue; empty if it can.
        """
        if dialogue.kept and not unreadable:
            self.success += 1
            if dialogue.ended != COMPLETE:
                self.ended_early[dialogue.ended] = self.ended_early.get(dialogue.ended, 0) + 1
            return True
        reasons = self.failed if dialogue.generated else self.skipped
        reasons.setdefault(unreadable or dialogue.ended, []).append(dialogue.source)
        return False

    def check(self) -> None:
        """Raise RuntimeError if the account does not balance, which is a bug."""
        skipped, failed = _total(self.skipped), _total(self.failed)
        if self.success + skipped + failed != self.input:
            raise RuntimeError(
                f"the account of chats does not balance: {self.success} answered + {skipped} "
                f"skipped + {failed} failed, expected {self.input} in total. This is a bug, please "
                f"report it"
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
        """Yield the lines of a report: totals, and the count and first places of each reason."""
        yield (
            f"chats: {self.input:,} in, {self.success:,} answered, {_total(self.skipped):,} "
            f"skipped, {_total(self.failed):,} failed"
        )
        for word, reasons in (("skipped", self.skipped), ("failed", self.failed)):
            for reason, places in reasons.items():
                more = ", ..." if len(places) > SHOWN_PLACES else ""
                shown = f" ({', '.join(places[:SHOWN_PLACES])}{more})"
                # Chats over the limit need no places.
                where = "" if reason == OVER_LIMIT else shown
                yield f"  {len(places):,} {word}: {reason}{where}"
        for reason, count in self.ended_early.items():
            yield f"  {count:,} answered chats end before their last request: {reason}"


def _total(reasons: dict[str, list[str]]) -> int:
    return sum(map(len, reasons.values()))

"""Chats and texts as samples for packing, with an account of every lost token."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from decoding.values import check_choice
from training.config import TRAIN_ON
from training.data.counts import Counts
from training.data.packing import split_documents
from training.data.readers import MAX_BAD, RENDERED_EXPECTED, Chat, render_counted
from training.data.token_store import MemorySink, Sample, Sink, StoredSamples, encode_tokens
from training.data.tokenizing import encode_texts

Item = TypeVar("Item")
BATCH = 2**20  # characters of one call of the tokenizer


@dataclass
class Account:
    """Counts of a split's records and tokens."""

    used: int = 0
    # used records whose end was cut off
    truncated: int = 0
    # reason -> records
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    supervised: int = 0

    @property
    def read(self) -> int:
        return self.used + self.dropped.total()

    def use(self, pieces: Sequence[Sample]) -> Sequence[Sample]:
        """Count the samples of one record and return them."""
        self.used += 1
        self.tokens += sum(len(piece.ids) for piece in pieces)
        self.supervised += sum(int(np.count_nonzero(piece.mask)) for piece in pieces)
        return pieces

    def add(self, other: "Account") -> None:
        """Add the counts of further records."""
        self.used += other.used
        self.truncated += other.truncated
        self.dropped.update(other.dropped)
        self.tokens += other.tokens
        self.supervised += other.supervised

    def line(self, what: str) -> str:
        """Describe the counts in one line for the terminal."""
        share = 100 * self.supervised / max(1, self.tokens)
        parts = [
            f"{what}: {self.used:,} of {self.read:,} used, {self.tokens:,} tokens, {share:.0f} % "
            f"supervised"
        ]
        if self.truncated:
            parts.append(f"{self.truncated:,} truncated")
        parts += [f"{count:,} dropped: {reason}" for reason, count in self.dropped.items() if count]
        return "; ".join(parts)


@dataclass
class Part:
    """The samples of a batch of records, as the arrays of a Sink, and the counts of its records."""

    arrays: dict[str, np.ndarray]
    account: Account
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True)
class ChatRules:
    """How chats become samples: data.template, data.max_length and data.train_on."""

    template: str
    max_length: int
    train_on: str

    def __post_init__(self) -> None:
        check_choice("data.train_on", self.train_on, TRAIN_ON)


def tokenize_chats(tokenizer: Any, chats: Sequence[Chat], rules: ChatRules) -> Part:
    """Render a batch of chats and cut them off after `max_length` tokens.

    Chats without a supervised token before the cut are dropped.
    """
    account, counts = Account(), Counts()
    pieces: list[Sample] = []
    for chat in render_counted(tokenizer, chats, rules.template, counts):
        ids = chat.ids[: rules.max_length]
        mask = chat.mask[: rules.max_length] | (rules.train_on == "all")
        mask[:1] = False
        if not mask.any():
            account.dropped[f"no supervised token within {rules.max_length} tokens"] += 1
            continue
        account.truncated += len(chat.ids) > rules.max_length
        pieces += account.use([Sample(ids, mask)])
    return Part(_arrays(pieces), account, counts)


def tokenize_texts(tokenizer: Any, documents: Sequence[str], max_length: int) -> Part:
    """Tokenize a batch of documents and split them into samples of at most `max_length` tokens.

    The tokenizer may add a BOS to each document. Documents of fewer than two tokens are dropped.
    """
    account = Account()
    pieces: list[Sample] = []
    for ids in encode_texts(tokenizer, documents):
        if len(ids) < 2:
            account.dropped["fewer than two tokens"] += 1
            continue
        split = split_documents(ids, max_length)
        pieces += account.use([piece for piece in split if len(piece.ids) > 1])
    return Part(_arrays(pieces), account)


def store_chats(
    parts: Iterable[Part], account: Account, sink: Sink, max_bad: float = MAX_BAD
) -> list[str]:
    """Write the parts of `tokenize_chats` to a sink, and return the notes that were printed.

    Raises UserError if the template rejects more than the share `max_bad` of the chats.
    """
    counts = Counts()
    for part in parts:
        _store(part, account, sink)
        counts.add(part.counts)
    account.dropped.update({reason: len(places) for reason, places in counts.bad.items()})
    return counts.check("chats", RENDERED_EXPECTED, max_bad)


def store_texts(parts: Iterable[Part], account: Account, sink: Sink) -> None:
    """Write the parts of `tokenize_texts` to a sink."""
    for part in parts:
        _store(part, account, sink)


def chat_samples(
    tokenizer: Any, chats: Iterable[Chat], rules: ChatRules, max_bad: float = MAX_BAD
) -> tuple[StoredSamples, Account]:
    """Return the samples of chats, in memory. Raises UserError as `store_chats` does."""
    sink, account = MemorySink(), Account()
    parts = (tokenize_chats(tokenizer, batch, rules) for batch in chat_batches(chats))
    store_chats(parts, account, sink, max_bad)
    return StoredSamples(sink.arrays()), account


def text_samples(
    tokenizer: Any, documents: Iterable[str], max_length: int
) -> tuple[StoredSamples, Account]:
    """Return the samples of documents, in memory."""
    sink, account = MemorySink(), Account()
    parts = (tokenize_texts(tokenizer, batch, max_length) for batch in text_batches(documents))
    store_texts(parts, account, sink)
    return StoredSamples(sink.arrays()), account


def chat_batches(chats: Iterable[Chat]) -> Iterator[list[Chat]]:
    """Yield lists of chats of about BATCH characters."""
    return _batches(chats, _characters)


def text_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of documents of about BATCH characters."""
    return _batches(documents, len)


def _characters(chat: Chat) -> int:
    return sum(len(message["content"]) for message in chat.messages)


def _batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield lists of items of about BATCH characters."""
    batch: list[Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += size(item)
        if characters >= BATCH or len(batch) >= BATCH // 256:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _arrays(pieces: list[Sample]) -> dict[str, np.ndarray]:
    if not pieces:
        return {}
    ids = np.concatenate([piece.ids for piece in pieces])
    mask = np.concatenate([piece.mask for piece in pieces])
    return {
        "tokens": encode_tokens(ids, mask),
        "lengths": np.asarray([len(piece.ids) for piece in pieces]),
        "supervised": np.asarray([np.count_nonzero(piece.mask) for piece in pieces]),
    }


def _store(part: Part, account: Account, sink: Sink) -> None:
    account.add(part.account)
    for name, array in part.arrays.items():
        sink.append(name, array)

"""Chats and texts as samples for packing, with an account of every lost token."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from decoding.values import check_choice
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


def chat_samples(
    tokenizer: Any,
    chats: Iterable[Chat],
    template: str,
    max_length: int,
    train_on: str,
    max_bad: float = MAX_BAD,
) -> tuple[StoredSamples, Account]:
    """Render chats and cut them off after `max_length` tokens.

    Chats without a supervised token before the cut are dropped. train_on: which tokens are
    supervised, `answers` or `all`. Raises UserError if the template rejects more than the share
    `max_bad` of the chats.
    """
    sink, account = MemorySink(), Account()
    store_chats(tokenizer, chats, template, max_length, train_on, max_bad, account, sink)
    return StoredSamples(sink.arrays()), account


def store_chats(
    tokenizer: Any,
    chats: Iterable[Chat],
    template: str,
    max_length: int,
    train_on: str,
    max_bad: float,
    account: Account,
    sink: Sink,
) -> list[str]:
    """Write the samples of `chat_samples` to a sink, and return the notes that were printed."""
    check_choice("data.train_on", train_on, ("answers", "all"))
    counts = Counts()
    for batch in _batches(chats, _characters):
        pieces: list[Sample] = []
        for chat in render_counted(tokenizer, batch, template, counts):
            ids, mask = chat.ids[:max_length], chat.mask[:max_length] | (train_on == "all")
            mask[:1] = False
            if not mask.any():
                account.dropped[f"no supervised token within {max_length} tokens"] += 1
                continue
            account.truncated += len(chat.ids) > max_length
            pieces += account.use([Sample(ids, mask)])
        _store(pieces, sink)
    account.dropped.update({reason: len(places) for reason, places in counts.bad.items()})
    return counts.check("chats", RENDERED_EXPECTED, max_bad)


def text_samples(
    tokenizer: Any, documents: Iterable[str], max_length: int
) -> tuple[StoredSamples, Account]:
    """Tokenize plain documents and split them into samples of at most `max_length` tokens.

    The tokenizer may add a BOS to each document. Documents of fewer than two tokens are dropped.
    """
    sink, account = MemorySink(), Account()
    store_texts(tokenizer, documents, max_length, account, sink)
    return StoredSamples(sink.arrays()), account


def store_texts(
    tokenizer: Any, documents: Iterable[str], max_length: int, account: Account, sink: Sink
) -> None:
    """Write the samples of `text_samples` to a sink."""
    for batch in _batches(documents, len):
        pieces: list[Sample] = []
        for ids in encode_texts(tokenizer, batch):
            if len(ids) < 2:
                account.dropped["fewer than two tokens"] += 1
                continue
            split = split_documents(ids, max_length)
            pieces += account.use([piece for piece in split if len(piece.ids) > 1])
        _store(pieces, sink)


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


def _store(pieces: list[Sample], sink: Sink) -> None:
    if not pieces:
        return
    ids = np.concatenate([piece.ids for piece in pieces])
    mask = np.concatenate([piece.mask for piece in pieces])
    sink.append("tokens", encode_tokens(ids, mask))
    sink.append("lengths", np.asarray([len(piece.ids) for piece in pieces]))
    sink.append("supervised", np.asarray([np.count_nonzero(piece.mask) for piece in pieces]))

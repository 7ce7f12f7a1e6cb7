"""Chats and texts as samples for packing, with every loss of tokens counted and reported."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decoding.errors import UserError
from training.data.packing import Sample, split_documents
from training.data.readers import MAX_BAD, Chat, render_chats


@dataclass
class Account:
    """Counts of the input: read = used + dropped; `used` includes truncated records."""

    read: int = 0
    used: int = 0
    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    supervised: int = 0

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def leave_out(self, reason: str, count: int) -> None:
        """Count records that were read from a file but not tokenized."""
        if count:
            self.read += count
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def line(self, what: str) -> str:
        """Return one line for the terminal."""
        lost = "; ".join(f"{count:,} dropped: {reason}" for reason, count in self.dropped.items())
        share = 100 * self.supervised / max(1, self.tokens)
        text = (
            f"{what}: {self.used:,} of {self.read:,} used, {self.tokens:,} tokens, {share:.0f} "
            f"% supervised"
        )
        return (
            text
            + (f"; {self.truncated:,} truncated" if self.truncated else "")
            + (f"; {lost}" if lost else "")
        )


def chat_samples(
    tokenizer: Any,
    chats: Sequence[Chat],
    template: str,
    max_length: int,
    train_on: str,
    max_bad: float = MAX_BAD,
) -> tuple[list[Sample], Account]:
    """Render chats, cut at `max_length` tokens; chats without an answer before it are dropped.

    train_on: `answers` or `all`. Raises UserError if the template rejects more than the share
    `max_bad` of the chats.
    """
    if train_on not in ("answers", "all"):
        raise UserError(f"data.train_on is '{train_on}'; expected answers or all")
    rendered, counts = render_chats(tokenizer, chats, template=template, max_bad=max_bad)
    samples: list[Sample] = []
    account = Account(read=counts.read)
    for reason, places in counts.bad.items():
        account.dropped[reason] = len(places)
    for chat in rendered:
        ids = np.asarray(chat.ids[:max_length], dtype=np.int32)
        everything = np.ones(len(ids), dtype=bool)
        mask = (
            np.asarray(chat.mask[:max_length], dtype=bool) if train_on == "answers" else everything
        )
        mask[:1] = False
        if not mask.any():
            account.drop(f"no supervised token within {max_length} tokens")
            continue
        account.truncated += len(chat.ids) > max_length
        _count(account, samples, [Sample(ids, mask)])
    return samples, account


def text_samples(
    tokenizer: Any, documents: Sequence[str], max_length: int
) -> tuple[list[Sample], Account]:
    """Tokenize plain documents and split them at `max_length` tokens.

    The tokenizer may add a BOS to each document.
    """
    samples: list[Sample] = []
    account = Account()
    for document in documents:
        account.read += 1
        ids = tokenizer(document)["input_ids"]
        if len(ids) < 2:
            account.drop("fewer than two tokens")
            continue
        _count(
            account,
            samples,
            [piece for piece in split_documents(ids, max_length) if len(piece.ids) > 1],
        )
    return samples, account


def _count(account: Account, samples: list[Sample], new: list[Sample]) -> None:
    account.used += 1
    account.tokens += sum(len(sample.ids) for sample in new)
    account.supervised += sum(int(sample.mask.sum()) for sample in new)
    samples.extend(new)

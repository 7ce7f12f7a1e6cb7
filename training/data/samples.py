"""Chats and texts as samples for packing, with an account of every lost token."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decoding.values import check_choice
from training.data.packing import Sample, split_documents
from training.data.readers import MAX_BAD, Chat, render_chats


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
        self.supervised += sum(int(piece.mask.sum()) for piece in pieces)
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
    chats: Sequence[Chat],
    template: str,
    max_length: int,
    train_on: str,
    max_bad: float = MAX_BAD,
) -> tuple[list[Sample], Account]:
    """Render chats and cut them off after `max_length` tokens.

    Chats without a supervised token before the cut are dropped. train_on: which tokens are
    supervised, `answers` or `all`. Raises UserError if the template rejects more than the share
    `max_bad` of the chats.
    """
    check_choice("data.train_on", train_on, ("answers", "all"))
    rendered, counts = render_chats(tokenizer, chats, template=template, max_bad=max_bad)
    account = Account(dropped=Counter({reason: len(at) for reason, at in counts.bad.items()}))
    samples: list[Sample] = []
    for chat in rendered:
        ids = np.asarray(chat.ids[:max_length], dtype=np.int32)
        mask = np.asarray(chat.mask[:max_length], dtype=bool) | (train_on == "all")
        mask[:1] = False
        if not mask.any():
            account.dropped[f"no supervised token within {max_length} tokens"] += 1
            continue
        account.truncated += len(chat.ids) > max_length
        samples += account.use([Sample(ids, mask)])
    return samples, account


def text_samples(
    tokenizer: Any, documents: Sequence[str], max_length: int
) -> tuple[list[Sample], Account]:
    """Tokenize plain documents and split them into samples of at most `max_length` tokens.

    The tokenizer may add a BOS to each document. Documents of fewer than two tokens are dropped.
    """
    samples: list[Sample] = []
    account = Account()
    for document in documents:
        ids = tokenizer(document)["input_ids"]
        if len(ids) < 2:
            account.dropped["fewer than two tokens"] += 1
            continue
        pieces = split_documents(ids, max_length)
        samples += account.use([piece for piece in pieces if len(piece.ids) > 1])
    return samples, account

"""Chats and texts as samples for packing, every loss of tokens counted and shown."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decoding.errors import UserError
from training.chat import render_chat
from training.packing import Sample, split_documents


@dataclass
class Account:
    """What became of the input: read = used + dropped; truncated ones are among the used."""

    read: int = 0
    used: int = 0
    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    supervised: int = 0

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def line(self, what: str) -> str:
        """One line for the terminal."""
        lost = "; ".join(f"{count:,} dropped: {reason}" for reason, count in self.dropped.items())
        share = 100 * self.supervised / max(1, self.tokens)
        text = f"{what}: {self.used:,} of {self.read:,} used, {self.tokens:,} tokens, {share:.0f} % supervised"
        return text + (f"; {self.truncated:,} truncated" if self.truncated else "") + (f"; {lost}" if lost else "")


def chat_samples(
    tokenizer: Any, chats: Sequence[Sequence[dict[str, str]]], template: str, max_length: int, train_on: str
) -> tuple[list[Sample], Account]:
    """Rendered chats, cut at `max_length` tokens; a chat whose answers lie beyond the cut is dropped and counted.

    chats: lists of {"role", "content"}. train_on: `answers` or `all`.
    """
    if train_on not in ("answers", "all"):
        raise UserError(f"data.train_on is '{train_on}'; expected answers or all")
    samples: list[Sample] = []
    account = Account()
    for messages in chats:
        account.read += 1
        rendered = render_chat(tokenizer, list(messages), template=template)
        ids = np.asarray(rendered.ids[:max_length], dtype=np.int32)
        mask = (
            np.asarray(rendered.mask[:max_length], dtype=bool)
            if train_on == "answers"
            else np.ones(len(ids), dtype=bool)
        )
        mask[:1] = False
        if not mask.any():
            account.drop(f"no supervised token within {max_length} tokens")
            continue
        account.truncated += len(rendered.ids) > max_length
        _count(account, samples, [Sample(ids, mask)])
    return samples, account


def text_samples(tokenizer: Any, documents: Sequence[str], max_length: int) -> tuple[list[Sample], Account]:
    """Plain documents, each with the tokenizer's first token (BOS) where it adds one, cut into pieces of `max_length` tokens."""
    samples: list[Sample] = []
    account = Account()
    for document in documents:
        account.read += 1
        ids = tokenizer(document)["input_ids"]
        if len(ids) < 2:
            account.drop("fewer than two tokens")
            continue
        _count(account, samples, [piece for piece in split_documents(ids, max_length) if len(piece.ids) > 1])
    return samples, account


def _count(account: Account, samples: list[Sample], new: list[Sample]) -> None:
    account.used += 1
    account.tokens += sum(len(sample.ids) for sample in new)
    account.supervised += sum(int(sample.mask.sum()) for sample in new)
    samples.extend(new)

"""Logged outputs as token ids, after the prompts that the target read.

Text is tokenized together with its prompt, as the target read and wrote it. Whatever the log shows
of the target's tokens is compared: ids, counts, and texts beside ids.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from decoding.errors import UserError
from eval.config import BenchmarkConfig
from eval.logged.entries import Entry, Log, Message, named
from eval.logged.prompts import PromptSource
from training.data.chat import render_chat, render_prompt, render_text

OTHER = "The log is of other prompts, or of another tokenizer or chat template"
REMEDY = "Set target.path= to the target that wrote it, and benchmark.path= to its prompts"
# share by which the number of tokens of a text may differ from the logged one
TOLERANCE, LEAST_TOLERANCE = 0.1, 2
# share of ids below which a log is likely of another tokenizer, in its first outputs
USUAL, COMPARED = 0.8, 64
UNBOUNDED = 10**9


@dataclass(frozen=True)
class LoggedText:
    """One output of the target, after its prompt."""

    prompt_id: str
    category: str
    turn: int
    prompt: list[int]
    tokens: list[int]  # of the output, with the stop token if the log has it
    limit: int  # max_new_tokens of the log; the number of tokens if they do not end by themselves

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.tokens


@dataclass(frozen=True)
class LoggedTexts:
    """All outputs of a log, and what was noticed on reading them."""

    texts: list[LoggedText]
    kind: str
    tokenized: int  # outputs that the log holds as text alone
    temperature: float | None  # highest temperature in the log; None: not known
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)


class Reader:
    """Conversion of a log's entries to token ids.

    tokenizer: the target's. vocab_size: ids of the target. stops: its stop tokens.
    """

    def __init__(
        self,
        log: Log,
        benchmark: BenchmarkConfig,
        tokenizer: Any,
        vocab_size: int,
        stops: Collection[int],
    ) -> None:
        self.log, self.tokenizer, self.vocab_size, self.stops = log, tokenizer, vocab_size, stops
        chosen = benchmark if benchmark.path or log.benchmark is None else log.benchmark
        self.prompts = PromptSource(chosen, tokenizer, log.entries, self._decode)
        self.template = chosen.chat_template

    def read(self, limit: int = 0, entries: Sequence[Entry] | None = None) -> LoggedTexts:
        """Return the texts of the log's first `limit` outputs, of all for 0.

        entries: those of the log to read; None: those that the settings select. Raises UserError
        for outputs of prompts that the prompt file lacks, for ids outside of the vocabulary, for
        counts and texts that do not fit, and if no output is left.
        """
        texts, cut, empty = list[LoggedText](), list[str](), list[str]()
        if entries is None:
            entries = self.prompts.chosen(self.log.entries)
        entries = entries[:limit] if limit else entries
        for entry in entries:
            prompt, tokens = self._tokens(entry)
            self._check(entry, prompt, tokens)
            end = next((at for at, token in enumerate(tokens) if token in self.stops), len(tokens))
            if end + 1 < len(tokens):
                cut.append(entry.place)
            tokens = tokens[: end + 1]
            if not tokens:
                empty.append(entry.place)
                continue
            stopped = tokens[-1] in self.stops
            limit_tokens = max(entry.limit or UNBOUNDED, len(tokens)) if stopped else len(tokens)
            name = entry.id or entry.place.rpartition("/")[2]
            category = self.prompts.category_of(entry)
            text = LoggedText(name, category, entry.turn, prompt, tokens, limit_tokens)
            texts.append(text)
        texts = self._without_prompts(texts)
        left_out = self.log.left_out | ({"empty outputs": empty} if empty else {})
        notes = [f"{len(at)} left out: {why} ({named(at)})" for why, at in left_out.items()]
        if cut:
            notes.append(
                f"{len(cut)} outputs went on after a stop token, where they are cut ({named(cut)})"
            )
        if not texts:
            raise UserError(f"the log holds no tokens of the target ({'; '.join(notes)}).")
        hot = [entry.temperature for entry in entries if entry.temperature is not None]
        tokenized = sum(isinstance(entry.output, str) for entry in entries)
        odd = self._unusual(texts) if not tokenized else ""
        return LoggedTexts(
            texts, self.log.kind, tokenized, max(hot, default=None), notes, [odd] if odd else []
        )

    def _tokens(self, entry: Entry) -> tuple[list[int], list[int]]:
        """Return the ids of an entry's prompt and of its output."""
        prompt: Any = self.prompts.of(entry)
        if isinstance(entry.output, list):
            return self._prompt_ids(prompt), entry.output
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return self._chat(entry.place, prompt, entry.output)
        ids = self._prompt_ids(prompt)
        if isinstance(prompt, str):
            both = render_text(self.tokenizer, prompt + entry.output)
            if both[: len(ids)] == ids:
                return ids, both[len(ids) :]
        return ids, self._encode(entry.output)

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return render_text(self.tokenizer, prompt)
        if prompt and isinstance(prompt[0], dict):
            return render_prompt(self.tokenizer, prompt, template=self.template)
        return list(prompt)

    def _chat(
        self, place: str, messages: Sequence[Message], answer: str
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a chat's request and of its last answer, without its end token."""
        if not answer.strip():
            return render_prompt(self.tokenizer, messages, template=self.template), []
        chat = [*messages, {"role": "assistant", "content": answer}]
        try:
            rendered = render_chat(self.tokenizer, chat, template=self.template)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        end = len(rendered.mask) - rendered.mask[::-1].index(True)
        first = end - next(
            (size for size, masked in enumerate(reversed(rendered.mask[:end])) if not masked), end
        )
        while end > first and rendered.ids[end - 1] in self.tokenizer.all_special_ids:
            end -= 1  # the log does not show it
        return rendered.ids[:first], rendered.ids[first:end]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _decode(self, output: list[int] | str) -> str:
        if isinstance(output, str):
            return output
        return str(self.tokenizer.decode(output, skip_special_tokens=True))

    def _check(self, entry: Entry, prompt: list[int], tokens: list[int]) -> None:
        """Raise UserError if the log shows that its prompt or tokens are others than these."""
        if not prompt:
            raise UserError(f"{entry.place}: found an empty prompt, expected at least one token.")
        for token in [*prompt, *tokens]:
            if token >= self.vocab_size:
                raise UserError(
                    f"{entry.place}: found token {token}, expected ids below {self.vocab_size}, "
                    f"the size of the vocabulary. {OTHER}. {REMEDY}."
                )
        expected = entry.prompt_tokens
        if expected is not None and expected != len(prompt):
            raise UserError(
                f"{entry.place}: the prompt has {len(prompt)} tokens here and {expected} in the "
                f"log. {OTHER}. {REMEDY}, and benchmark.chat_template= to the template."
            )
        counted = entry.output_tokens
        if counted is not None and isinstance(entry.output, str):
            apart = max(LEAST_TOLERANCE, TOLERANCE * counted)
            if abs(counted - len(tokens)) > apart:
                raise UserError(
                    f"{entry.place}: the output has {len(tokens)} tokens here and {counted} in the "
                    f"log. {OTHER}. {REMEDY}."
                )
        if entry.text is not None and isinstance(entry.output, list):
            found, shown = self._decode(entry.output), entry.text.strip().rstrip("\ufffd")
            if not found.strip().startswith(shown):
                raise UserError(
                    f"{entry.place}: the ids are {found.strip()[:40]!r} here and {shown[:40]!r} in "
                    f"the log. {OTHER}. {REMEDY}."
                )

    def _without_prompts(self, texts: list[LoggedText]) -> list[LoggedText]:
        """Return the texts; if all outputs begin with their prompts, without these."""
        lengths = [len(text.prompt) for text in texts]
        repeats = (
            text.tokens[:length] == text.prompt and len(text.tokens) > length
            for text, length in zip(texts, lengths, strict=True)
        )
        if self.log.entries[0].prompt is not None or not all(repeats):
            return texts
        return [
            dataclasses.replace(
                text,
                tokens=text.tokens[length:],
                limit=text.limit if text.limit > len(text.tokens) else len(text.tokens) - length,
            )
            for text, length in zip(texts, lengths, strict=True)
        ]

    def _unusual(self, texts: Sequence[LoggedText]) -> str:
        """Return a warning if the ids are not those that the tokenizer gives the same texts."""
        same = total = 0
        for text in texts[:COMPARED]:
            ids = [token for token in text.tokens if token not in self.stops]
            again = Counter(self._encode(self._decode(ids)))
            same += (Counter(ids) & again).total()
            total += len(ids)
        if not total or same / total >= USUAL:
            return ""
        return (
            f"Only {same / total:.0%} of the log's tokens are those that this tokenizer gives the "
            f"same text, so the log may be of another tokenizer. {REMEDY}."
        )

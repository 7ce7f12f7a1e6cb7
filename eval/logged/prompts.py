"""Prompts of a log: its own, those of its earlier turns, or those of a prompt file."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from decoding.errors import UserError
from eval.config import BenchmarkConfig
from eval.logged.entries import Entry, Message
from eval.measure.benchmarks import conversation, select_prompts
from eval.report.text import count_label
from jobs.paths import resolve
from training.data.chat import choose_rendering
from training.data.readers import Prompt

KEYS = ("benchmark.render", "benchmark.chat_template")


class PromptSource:
    """The text, messages or ids before each output of a log.

    A log without prompts is joined with a prompt file: by the prompts' ids, or by their order if
    the log has no ids. Later turns follow the logged answers to the earlier ones.
    """

    def __init__(
        self,
        cfg: BenchmarkConfig,
        tokenizer: Any,
        entries: Sequence[Entry],
        text_of: Callable[[list[int] | str], str],
    ) -> None:
        """Read the prompt file, if the log needs it.

        text_of: returns the text of an output. Raises UserError if the file is not given, or does
        not hold the prompts of the log.
        """
        self.cfg, self._text_of = cfg, text_of
        without = [entry for entry in entries if entry.prompt is None]
        turns = [entry for entry in entries if isinstance(entry.prompt, str) and entry.is_turn]
        self.render = "text"
        if without or turns:
            self.render = choose_rendering(tokenizer, cfg.render, cfg.chat_template, KEYS)
        self._prompts = self._join(without) if without else {}
        # outputs and turns of the log by prompt, turn and sample
        self._entries = {(one.id, one.turn, one.sample): one for one in entries if one.id}

    def chosen(self, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries of the turns that the settings select."""
        first = self.cfg.turns == "first"
        return [entry for entry in entries if not first or entry.turn == 0]

    def of(self, entry: Entry) -> list[int] | list[Message] | str:
        """Return the ids, the messages or the plain text before an output.

        Raises UserError for a turn whose earlier turns the log lacks.
        """
        if isinstance(entry.prompt, list) or (entry.prompt is not None and not entry.is_turn):
            return entry.prompt
        if entry.prompt is None:
            turns = self._prompts[entry].turns[: entry.turn + 1]
        else:
            turns = [str(self._earlier(entry, turn).prompt) for turn in range(entry.turn)]
            turns.append(entry.prompt)
        if len(turns) <= entry.turn:
            raise UserError(
                f"{entry.place}: found an output of turn {entry.turn + 1} of {entry.id!r}, which "
                f"has {len(turns)} in {self.cfg.path}. Set benchmark.path= to the log's prompts."
            )
        answers = [self._text_of(self._earlier(entry, turn).output) for turn in range(entry.turn)]
        return conversation(turns, answers, self.render)

    def category_of(self, entry: Entry) -> str:
        """Return the category of an output's prompt."""
        known = self._prompts.get(entry)
        return entry.category or (known.category if known else "none")

    def _earlier(self, entry: Entry, turn: int) -> Entry:
        found = self._entries.get((entry.id, turn, entry.sample))
        if found is None:
            raise UserError(
                f"{entry.place}: found an output of turn {entry.turn + 1} of {entry.id!r}, "
                f"expected turn {turn + 1} in the log too, as later turns follow it."
            )
        return found

    def _join(self, entries: Sequence[Entry]) -> dict[Entry, Prompt]:
        """Return the prompt of each entry."""
        if not self.cfg.path:
            raise UserError(
                f"{entries[0].place}: the log holds no prompts. Set benchmark=file "
                f"benchmark.path=PROMPTS, the file that the target answered."
            )
        path = str(resolve(self.cfg.path))
        # without a bad record: the outputs after it would get the prompts of others
        prompts = select_prompts(
            dataclasses.replace(self.cfg, path=path, render=self.render, turns="all"), max_bad=0.0
        )
        if not all(entry.id for entry in entries):
            requests = [entry.place for entry in entries if entry.sample == 0]
            if len(requests) != len(prompts):
                outputs = count_label(len(requests), "output")
                raise UserError(
                    f"the log holds {outputs} without the ids of their prompts, and "
                    f"{self.cfg.path} {count_label(len(prompts), 'prompt')}; expected as many. Set "
                    f"benchmark.path= to the log's prompts, in its order (benchmark.first=N keeps "
                    f"the first N)."
                )
            numbers = itertools.accumulate(entry.sample == 0 for entry in entries)
            return {one: prompts[number - 1] for one, number in zip(entries, numbers, strict=True)}
        by_id = {prompt.id: prompt for prompt in prompts}
        missing = [entry for entry in entries if entry.id not in by_id]
        if missing:
            raise UserError(
                f"{missing[0].place}: found an output of prompt {missing[0].id!r}, expected one of "
                f"those in {self.cfg.path}, which lacks the prompts of {len(missing)} of "
                f"{len(entries)} outputs. Set benchmark.path= to the log's prompts."
            )
        return {entry: by_id[entry.id] for entry in entries}

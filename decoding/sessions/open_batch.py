"""A batch that rows join and leave between rounds, like the requests of a server.

A row has its own settings and seed, and its text is that of a decode of its own. Greedy and coupled
text does not depend on drafts, so rows of different sampling settings run together. Under the other
rules q is part of the text, and the rows of a batch need the same sampling settings.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import torch

from decoding.errors import UserError
from decoding.interfaces import Drafter, Pool, PoolKeeper, Target
from decoding.loop import check, check_costs, make_rows
from decoding.models.prefill import prefill_more
from decoding.rounds.batch import Batch, OnTokens, Row
from decoding.rounds.settings import Settings
from decoding.sampling.logits_processors import make_processors
from decoding.sampling.row_warpers import join_warpers
from decoding.sampling.rule_names import split_rule
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.sessions.draft_lengths import Range, check_ranges, length_at
from decoding.verification.rules import RULES


@dataclass(frozen=True)
class Request:
    """A prompt and its settings.

    settings: those of the batch, but for the sampling settings, seed, stop strings and
    max_new_tokens. request_id: keys its random numbers together with the seed.
    """

    prompt: Sequence[int]
    settings: Settings
    request_id: int = 0
    # of a drafter that keeps pools: what its row begins with; None: an empty one
    pool: Pool | None = None


class OpenBatch(Batch):
    """A serial batch of at most `most_rows` rows, which begins without any.

    Call `round` under torch.inference_mode while it has `rows`. The target's cache for all rows is
    allocated at once.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        settings: Settings,
        most_rows: int,
        on_tokens: OnTokens | None = None,
        lengths: Sequence[Range] = (),
    ) -> None:
        """Claim the models. settings: what all rows share, and the defaults of their own settings.

        lengths: draft lengths by the number of running rows (draft_lengths.py); without any it is
        always num_draft_tokens. Raises UserError for settings that do not fit the models, for an
        overlapped schedule, and for lengths by rows under a rule whose texts depend on drafts.
        """
        check(target, drafter, settings)
        check_costs(drafter, settings)
        if settings.schedule != "serial":
            raise UserError(
                f"schedule is '{settings.schedule}', whose lanes run ahead of the text; a batch "
                f"that rows join needs 'serial'. Set schedule=serial."
            )
        super().__init__(target, drafter, [], settings, on_tokens)
        self.settings, self.most_rows, self.lengths = settings, most_rows, lengths
        self._mixes = split_rule(settings.verify)[0] == "coupled"
        check_ranges(lengths, settings.num_draft_tokens, settings.verify)
        self._capacity = target.max_length + self.width() + 1
        self._next_index = 0
        with self.claim:
            self.claim.take()
            if drafter is not None:
                drafter.prepare(target, settings.costs)
            target.open(most_rows, self.capacity())

    def capacity(self) -> int:
        """Return the cache slots of a row, the same for all that may join."""
        return self._capacity

    def takes(self, requests: Sequence[Request]) -> bool:
        """Return whether these requests may join now, together."""
        warpers = {_warper_of(request) for request in requests}
        warpers |= {row.warper for row in self.rows}
        fits = len(self.rows) + len(requests) <= self.most_rows
        return fits and (self._mixes or len(warpers) <= 1)

    @torch.inference_mode()
    def join(self, requests: Sequence[Request]) -> list[Row]:
        """Read the prompts into new rows and return the rows, whose `index` is unique.

        Raises UserError, before any of them joins, for a prompt that is empty, fills the target's
        context or holds anything but token ids, and if another call has used the models; ValueError
        if `takes` is false.
        """
        if not self.takes(requests):
            raise ValueError("these requests do not fit into the batch; ask `takes` first")
        rows = [self._new_row(request) for request in requests]
        running = len(self.rows)
        with self.claim:
            self.check_claim()
            if self.rows:
                self._read(rows)
                self.rows = [*self.rows, *rows]
            else:
                self.rows = rows
                self.open()
            for place, request in enumerate(requests, running):
                if request.pool is not None:
                    cast(PoolKeeper, self.drafter).use_pool(place, request.pool)
        self._choose()
        return rows

    @torch.inference_mode()
    def leave(self, indices: Collection[int]) -> None:
        """Drop the rows with these indices, such as those of cancelled requests."""
        keep = [place for place, row in enumerate(self.rows) if row.index not in indices]
        if len(keep) < len(self.rows):
            with self.claim:
                self.check_claim()
                self._select(keep)

    def _round(self) -> None:
        if self.drafter is not None:
            self.gamma = length_at(self.lengths, len(self.rows), self.settings.num_draft_tokens)
        super()._round()

    def _new_row(self, request: Request) -> Row:
        models = self.target, self.drafter
        (row,) = make_rows(*models, [request.prompt], [request.request_id], request.settings)
        row.index, row.warper = self._next_index, _warper_of(request)
        self._next_index += 1
        return row

    def _read(self, rows: Sequence[Row]) -> None:
        """Read the prompts of rows that join running ones, but for their last tokens."""
        began = perf_counter()
        prompts_B = [row.sequence for row in rows]
        hidden_BNC = prefill_more(
            self.target,
            [prompt[:-1] for prompt in prompts_B],
            self.capacity(),
            self.wants_hidden,
            self.taps,
        )
        if self.drafter is not None:
            self.drafter.join(prompts_B, hidden_BNC)
        for row in rows:
            row.generation.prefilled = len(row.sequence) - 1
            row.generation.prefill_seconds = perf_counter() - began

    def _select(self, keep: list[int]) -> None:
        super()._select(keep)
        self._choose()

    def _choose(self) -> None:
        """Make the chooser of the running rows, unless it is the last one."""
        if not self.rows:
            return
        warper = join_warpers([row.warper for row in self.rows])
        if warper == self.chooser.warper:
            return
        settings, target = self.settings, self.target
        self.chooser = TokenChooser(
            warper,
            settings.verify,
            settings.seed,
            target.vocab_size,
            target.device,
            make_processors(settings.repetition_penalty, settings.allowed),
        )
        self.rule = RULES[self.chooser.rule]


def _warper_of(request: Request) -> Warper:
    """Return a request's warper, the same one for all greedy requests."""
    warper = request.settings.warper
    return Warper() if warper.greedy else warper

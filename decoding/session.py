"""Rows that go on from turn to turn, so that only what is new is read: one row with all its caches,
or many conversations in batches.

Every turn is given the whole text so far. What its beginning shares with the tokens in the cache
stays there; the cache is rolled back to that and the rest is read. So a turn's tokens are those of
a fresh decode over the whole text, whatever was edited, left out or rendered differently since, and
what they cost is what is new.

Shapes: B rows (one of a `Session`), N new tokens, C hidden size.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.interfaces import Drafter, Target
from decoding.loop import build_batch
from decoding.models.prefill import prefill
from decoding.rounds.batch import Batch, OnTokens, Row
from decoding.rounds.claims import Claim
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.verification.nodes import at_nodes


class Session:
    """A row over several turns. Where another call has used the target or the drafter since the
    last turn, the next one reads the whole text anew.

    The cache takes the target's whole context from the first turn on; `load_target(max_length=...)`
    makes it shorter.
    """

    def __init__(self, target: Target, drafter: Drafter | None, settings: Settings) -> None:
        """Raises UserError for an overlapped schedule: its lanes run ahead of the text."""
        _check_serial(settings)
        self.target, self.drafter, self.settings = target, drafter, settings
        width = drafter.width(settings.num_draft_tokens) if drafter is not None else 0
        self.capacity = target.max_length + width + 1  # the last round is padded past the context
        # of the last turn; the target's cache holds its beginning
        self._sequence: list[int] | None = None
        # what the drafter holds at most; None: nothing, it was never opened
        self._drafted: list[int] | None = None
        self._drafts = False  # whether the last turn is drafted
        self._claim = Claim(target, drafter)  # the last turn's

    @torch.inference_mode()
    def start(
        self,
        prompt: Sequence[int],
        *,
        drafted: bool = True,
        max_new_tokens: int | None = None,
        request_id: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Batch:
        """The turn's batch after its prefill; call `round` under torch.inference_mode while it has
        `rows`, or stop between two rounds.

        prompt: the whole text so far. drafted=False decodes autoregressively in the same cache.
        max_new_tokens, where not the settings'. Raises UserError for an empty prompt, or one that
        fills the target's context; the caches then are as they were. A batch of an earlier turn
        cannot continue afterwards.
        """
        settings = (
            self.settings
            if max_new_tokens is None
            else replace(self.settings, max_new_tokens=max_new_tokens)
        )
        drafter = self.drafter if drafted else None
        claim = Claim(self.target, self.drafter)
        with claim:
            if not self._claim.holds:
                self._sequence = self._drafted = None
            batch = build_batch(
                self.target,
                drafter,
                [prompt],
                settings,
                request_ids=[request_id],
                on_tokens=on_tokens,
                claim=claim,
            )
            self._claim = claim
            self._read(batch, prompt, drafter)
        return batch

    def _read(self, batch: Batch, prompt: Sequence[int], drafter: Drafter | None) -> None:
        """Fill the caches with what is new of the prompt."""
        (row,) = batch.rows
        began = perf_counter()
        kept = self._kept(prompt, drafter)
        self.target.truncate([kept])
        # From here on the cache holds a beginning of this text, wherever a signal ends what
        # follows.
        self._sequence, self._drafts = row.sequence, False
        wants_hidden = drafter is not None and drafter.capabilities.needs_hidden
        hidden_BNC = prefill(self.target, [prompt[kept:-1]], wants_hidden, batch.taps)
        if drafter is not None:
            self._tell(drafter, prompt, hidden_BNC)
        row.generation.prefilled = len(prompt) - 1 - kept
        row.generation.prefill_seconds = perf_counter() - began

    def _kept(self, prompt: Sequence[int], drafter: Drafter | None) -> int:
        """Tokens of the prompt whose keys and values stand in the target's cache; opens it at the
        first turn.
        """
        if self._sequence is None:
            self.target.open(1, self.capacity)
            return 0
        held = self._sequence[: self.target.lengths_B[0]]
        if self._drafts:
            self._drafted = held  # the drafter kept what the target kept
        kept = shared(held, prompt)
        if drafter is not None and drafter.capabilities.needs_hidden:
            # The state before the tip comes out of a forward; a drafter that was never opened wants
            # those of the whole prompt, and one of all states those of a turn without it too.
            if self._drafted is None:
                return 0
            if not drafter.capabilities.last_hidden:
                kept = min(kept, shared(self._drafted, prompt))
            kept = max(0, min(kept, len(prompt) - 2))
        return kept

    def _tell(self, drafter: Drafter, prompt: Sequence[int], hidden_BNC: Tensor | None) -> None:
        """Have the drafter go on with the prompt."""
        if self._drafted is None:
            drafter.open([prompt], hidden_BNC, self.capacity)
        else:
            known = shared(self._drafted, prompt)
            self._drafted = self._drafted[:known]
            drafter.resume(prompt, known, None if hidden_BNC is None else hidden_BNC[0])
        self._drafted, self._drafts = list(prompt[:-1]), True


class Turns:
    """Conversations that are answered in batches, a batch taking one turn of each: what a turn left
    in the target's cache is there for the next.

    Rows end at different times and batches differ, so a row's keys and values are copied out when
    it ends and copied in when its conversation goes
    on: as much memory again, beside the cache, as the batch has committed. The drafter reads every
    prompt anew. For one that wants the target's hidden states of whole prompts
    (`capabilities.last_hidden` is false) the target reads anew as well.
    """

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        # Conversation -> (the target's name for what is kept, its tokens).
        self._held: dict[Hashable, tuple[int, list[int]]] = {}
        self._claim = Claim(target, drafter)  # the last batch's

    def forget(self) -> None:
        """Let the next batch begin from nothing."""
        self._held = {}
        self.target.forget()

    @torch.inference_mode()
    def decode(
        self,
        names: Sequence[Hashable],
        prompts: Sequence[Sequence[int]],
        last: Sequence[bool],
        settings: Settings,
        *,
        request_ids: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Continue every prompt as `decoding.loop.decode` does; those of conversations in the last
        batch read what is new alone.

        names: the prompts' conversations, no two alike. prompts: the whole texts so far. last:
        whether a conversation ends with this turn, so that nothing of it is kept. Raises UserError
        as `decode` does, and for an overlapped schedule.
        """
        _check_serial(settings)
        with Claim(self.target, self.drafter):  # other threads wait for the whole batch
            if not self._claim.holds:  # what another batch keeps has the same names
                self.forget()
            batch = build_batch(
                self.target, self.drafter, prompts, settings, request_ids=request_ids
            )
            self._claim = batch.claim
            return self._run(batch, names, last)

    def _run(
        self, batch: Batch, names: Sequence[Hashable], last: Sequence[bool]
    ) -> list[Generation]:
        """Decode the batch, and keep what its conversations need next."""
        generations = [row.generation for row in batch.rows]
        self._open(batch, names)

        def keep(place: int, row: Row) -> None:
            if last[row.index]:
                return
            self.target.keep(place, row.index)
            self._held[names[row.index]] = row.index, row.sequence[: self.target.lengths_B[place]]

        batch.on_end = keep
        while batch.rows:
            batch.round()
        return generations

    def _open(self, batch: Batch, names: Sequence[Hashable]) -> None:
        """As `Batch.open`, but for what is kept of the last batch, which is then forgotten."""
        began = perf_counter()
        drafter, wants_hidden = (
            self.drafter,
            self.drafter is not None and self.drafter.capabilities.needs_hidden,
        )
        wants_all = drafter is not None and wants_hidden and not drafter.capabilities.last_hidden
        prompts_B = [row.sequence for row in batch.rows]
        held_B = [(0, []) if wants_all else self._held.get(name, (0, [])) for name in names]
        kept_B = [shared(held, prompt) for (_, held), prompt in zip(held_B, prompts_B, strict=True)]
        if wants_hidden:  # the last state comes out of a forward
            kept_B = [
                max(0, min(kept, len(prompt) - 2))
                for kept, prompt in zip(kept_B, prompts_B, strict=True)
            ]
        new_B = [prompt[kept:-1] for kept, prompt in zip(kept_B, prompts_B, strict=True)]
        # Rows near their limit are padded past it, and short ones beside a long new part past its
        # end.
        capacity = max(
            max(row.limit for row in batch.rows) + batch.width() + 1,
            max(kept_B) + max(map(len, new_B)),
        )
        self.target.open(len(prompts_B), capacity)
        for place, ((name, _), kept) in enumerate(zip(held_B, kept_B, strict=True)):
            if kept:
                self.target.begin(place, name, kept)
        self.forget()
        hidden_BNC = prefill(self.target, new_B, wants_hidden, batch.taps)
        if drafter is not None:
            if hidden_BNC is not None and not wants_all:
                hidden_BNC = at_nodes(hidden_BNC, [max(len(new) - 1, 0) for new in new_B])[:, None]
            drafter.open(prompts_B, hidden_BNC, capacity)
        for row, new in zip(batch.rows, new_B, strict=True):
            row.generation.prefilled = len(new)
            row.generation.prefill_seconds = perf_counter() - began


def _check_serial(settings: Settings) -> None:
    if settings.schedule != "serial":
        raise UserError(
            f"a conversation runs schedule=serial, found '{settings.schedule}', whose lanes run "
            f"ahead of the text."
        )


def shared(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Leading tokens that `held` and the prompt have in common, the prompt's last one not counted:
    no cache holds the tip.
    """
    longest = min(len(held), len(prompt) - 1)
    return next((i for i in range(longest) if held[i] != prompt[i]), longest)

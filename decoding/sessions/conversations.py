"""Conversations that read only the new text of each turn: one cached row, or batches of turns.

Every turn receives the complete text so far. The cache is rolled back to the longest prefix that it
shares with this text, and the rest is read. A turn therefore emits the same tokens as a fresh
decode over the complete text, even if earlier text was edited, removed or rendered differently.

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
    """A single conversation that keeps its cache between turns.

    If another call has used the target or the drafter since the last turn, the next turn reads the
    complete text again. The cache has the target's full context from the first turn; use
    `load_target(max_length=...)` for a smaller one.
    """

    def __init__(self, target: Target, drafter: Drafter | None, settings: Settings) -> None:
        """Set the models and the settings; raise UserError for an overlapped schedule."""
        _check_serial(settings)
        self.target, self.drafter, self.settings = target, drafter, settings
        width = drafter.width(settings.num_draft_tokens) if drafter is not None else 0
        self.capacity = target.max_length + width + 1  # the last round is padded past the context
        # the last turn's text; the target's cache holds a prefix of it
        self._sequence: list[int] | None = None
        # tokens that the drafter has cached at most; None: it was never opened
        self._drafted: list[int] | None = None
        # whether the last turn used the drafter
        self._drafts = False
        # claim of the last turn
        self._claim = Claim(target, drafter)

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
        """Return the turn's batch after its prefill.

        Call `round` under torch.inference_mode while the batch has `rows`, or stop between two
        rounds. A batch of an earlier turn cannot continue.

        prompt: the complete text so far. drafted=False decodes autoregressively in the same cache.
        max_new_tokens: None takes the settings' value. request_id: keys the random numbers.
        on_tokens: see `decoding.loop.decode`. Raises UserError as `build_batch` does; the caches
        are then unchanged.
        """
        settings, drafter = self.settings, self.drafter if drafted else None
        if max_new_tokens is not None:
            settings = replace(settings, max_new_tokens=max_new_tokens)
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
        """Fill the caches with the new part of the prompt."""
        (row,) = batch.rows
        began = perf_counter()
        kept = self._reuse_cache(prompt, drafter)
        self.target.truncate([kept])
        # set now, since the cache holds a prefix of this text even if a signal interrupts the rest
        self._sequence, self._drafts = row.sequence, False
        wants_hidden = drafter is not None and drafter.capabilities.needs_hidden
        hidden_BNC = prefill(self.target, [prompt[kept:-1]], wants_hidden, batch.taps)
        if drafter is not None:
            self._open_drafter(drafter, prompt, hidden_BNC)
        row.generation.prefilled = len(prompt) - 1 - kept
        row.generation.prefill_seconds = perf_counter() - began

    def _reuse_cache(self, prompt: Sequence[int], drafter: Drafter | None) -> int:
        """Return the length of the prompt's cached prefix; open the cache at the first turn."""
        if self._sequence is None:
            self.target.open(1, self.capacity)
            return 0
        cached = self._sequence[: self.target.lengths_B[0]]
        if self._drafts:
            self._drafted = cached  # the drafter kept what the target kept
        kept = shared_prefix_length(cached, prompt)
        if drafter is not None and drafter.capabilities.needs_hidden:
            # The hidden state before the tip needs a forward. A drafter that was never opened needs
            # the states of the complete prompt; one that reads all states also needs the states of
            # turns that did not use it.
            if self._drafted is None:
                return 0
            if not drafter.capabilities.last_hidden:
                kept = min(kept, shared_prefix_length(self._drafted, prompt))
            kept = max(0, min(kept, len(prompt) - 2))
        return kept

    def _open_drafter(
        self, drafter: Drafter, prompt: Sequence[int], hidden_BNC: Tensor | None
    ) -> None:
        """Open the drafter with the prompt, or resume it."""
        if self._drafted is None:
            drafter.open([prompt], hidden_BNC, self.capacity)
        else:
            known = shared_prefix_length(self._drafted, prompt)
            self._drafted = self._drafted[:known]
            drafter.resume(prompt, known, None if hidden_BNC is None else hidden_BNC[0])
        self._drafted, self._drafts = list(prompt[:-1]), True


class ConversationBatches:
    """Conversations decoded in batches of one turn each, which reuse what the last batch cached.

    Rows end at different times and batches differ, so a row's cache is copied out when it ends and
    copied in at its next turn. The copies take as much memory as the committed tokens of the batch.
    The drafter reads every prompt from the start; so does the target, if the drafter needs the
    hidden states of complete prompts (`needs_hidden` without `last_hidden`).
    """

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        # conversation -> (name of the stored cache, its tokens)
        self._stored: dict[Hashable, tuple[int, list[int]]] = {}
        # claim of the last batch
        self._claim = Claim(target, drafter)

    def forget(self) -> None:
        """Drop the stored caches, so that the next batch reads every prompt from the start."""
        self._stored = {}
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
        """Continue every prompt like `decoding.loop.decode`, reusing the last batch's caches.

        names: each prompt's conversation, all different. prompts: each conversation's complete text
        so far. last: whether each conversation ends with this turn, so that its cache is not
        stored. Raises UserError as `decoding.loop.decode` does, and for an overlapped schedule.
        """
        _check_serial(settings)
        with Claim(self.target, self.drafter):  # other threads wait for the whole batch
            if not self._claim.holds:  # another batch stores its caches under the same names
                self.forget()
            batch = build_batch(
                self.target, self.drafter, prompts, settings, request_ids=request_ids
            )
            self._claim = batch.claim
            generations = [row.generation for row in batch.rows]
            self._open(batch, names)
            batch.on_end = lambda place, row: (
                None if last[row.index] else self._store(names[row.index], place, row)
            )
            while batch.rows:
                batch.round()
        return generations

    def _store(self, name: Hashable, place: int, row: Row) -> None:
        """Store the cache of a row that has ended, for the conversation's next turn."""
        self.target.keep(place, row.index)
        self._stored[name] = row.index, row.sequence[: self.target.lengths_B[place]]

    def _open(self, batch: Batch, names: Sequence[Hashable]) -> None:
        """Open the batch like `Batch.open`, but reuse the stored caches and then drop them."""
        began = perf_counter()
        drafter = self.drafter
        wants_hidden = drafter is not None and drafter.capabilities.needs_hidden
        wants_all = drafter is not None and wants_hidden and not drafter.capabilities.last_hidden
        prompts_B = [row.sequence for row in batch.rows]
        stored_B = [(0, []) if wants_all else self._stored.get(name, (0, [])) for name in names]
        kept_B, new_B = [], []
        for (_, cached), prompt in zip(stored_B, prompts_B, strict=True):
            kept = shared_prefix_length(cached, prompt)
            if wants_hidden:  # the last hidden state needs a forward
                kept = max(0, min(kept, len(prompt) - 2))
            kept_B.append(kept)
            new_B.append(prompt[kept:-1])
        # drafts may exceed a row's limit, and padding may exceed its end
        drafted_end = max(row.limit for row in batch.rows) + batch.width() + 1
        capacity = max(drafted_end, max(kept_B) + max(map(len, new_B)))
        self.target.open(len(prompts_B), capacity)
        for place, ((name, _), kept) in enumerate(zip(stored_B, kept_B, strict=True)):
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
            f"schedule is '{settings.schedule}', whose lanes run ahead of the text; a conversation "
            f"needs 'serial'. Set schedule=serial."
        )


def shared_prefix_length(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the length of the common prefix; the prompt's last token, the tip, is not counted."""
    longest = min(len(cached), len(prompt) - 1)
    return next((i for i in range(longest) if cached[i] != prompt[i]), longest)

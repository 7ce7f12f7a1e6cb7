"""The decode loop: open a batch and run rounds until all rows have finished.

It serves every drafter, schedule and verification rule, greedy and sampled, and rows of different
lengths; without a drafter it decodes autoregressively. decoding/rounds/batch.py runs a round.
"""

from collections.abc import Sequence

import torch

from decoding import devices
from decoding.errors import UserError
from decoding.interfaces import Drafter, Target
from decoding.models.taps import check_taps
from decoding.rounds.batch import Batch, OnTokens, Row
from decoding.rounds.claims import Claim
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.sampling import noise
from decoding.schedules.by_name import SCHEDULES, batch_type, default_stopping
from decoding.stopping.policies import make_stopping
from decoding.values import check_choice, is_int, quote
from decoding.verification.rules import check_rule


def prefill_batch(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    request_ids: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
) -> Batch:
    """Build the batch of all prompts and run its prefill.

    While the batch has `rows`, call its `round` under torch.inference_mode; then call its `close`.
    It owns the models' caches until another call takes them; `round` then raises UserError. Raises
    UserError as `build_batch` does.
    """
    with Claim(target, drafter):
        batch = build_batch(
            target, drafter, prompts, settings, request_ids=request_ids, on_tokens=on_tokens
        )
        if batch.rows:
            batch.open()
    return batch


def build_batch(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    request_ids: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
    claim: Claim | None = None,
) -> Batch:
    """Build the batch, claim the caches and prepare the drafter, without the prefill.

    claim: None creates a new claim to both models. Raises UserError for a prompt that is empty,
    fills the target's context or contains an id outside the vocabulary, for measured costs that are
    needed but missing, for a schedule that does not fit, and as `check` does.
    """
    check(target, drafter, settings)
    ids = list(range(len(prompts))) if request_ids is None else list(request_ids)
    if len(ids) != len(prompts):
        raise ValueError(
            f"found {len(ids)} request ids for {len(prompts)} prompts, expected one per prompt"
        )
    rows = make_rows(target, drafter, prompts, ids, settings)
    check_costs(drafter, settings)
    kind, schedule = Batch, settings.schedule
    if drafter is not None and schedule != "serial":
        policy = _policy(target, drafter, settings)
        kind = batch_type(schedule, drafter, settings.verify, policy, settings.costs, len(rows))
    batch = kind(target, drafter, rows, settings, on_tokens)
    batch.claim = claim or batch.claim
    with batch.claim:
        batch.claim.take()
        if drafter is not None:
            drafter.prepare(target, settings.costs)
    return batch


def make_rows(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    request_ids: Sequence[int],
    settings: Settings,
) -> list[Row]:
    """Return the rows of prompts that begin. Raises UserError for prompts, as `build_batch` does.

    request_ids: one per prompt, which keys its random numbers.
    """
    keys = [noise.key(settings.seed, request) for request in request_ids]
    costs, per_token = settings.costs, not devices.runs_ahead(target.device)
    if drafter is not None:
        per_token = per_token and drafter.capabilities.stops_by_token
        if costs is not None and drafter.capabilities.steps == "round":
            costs = costs.of_one_pass()
    policy = _policy(target, drafter, settings)
    stopping = make_stopping(policy, keys, settings.stopping_threshold, costs, per_token)
    rows = []
    for index, prompt in enumerate(prompts):
        _check_prompt(index, prompt, target)
        limit = min(len(prompt) + settings.max_new_tokens, target.max_length)
        row = Row(index, keys[index], list(prompt), limit, Generation(), stopping[index])
        row.stop_strings, row.warper = settings.stop_strings, settings.warper
        rows.append(row)
    return rows


def _policy(target: Target, drafter: Drafter | None, settings: Settings) -> str:
    """Return the name of the rows' stopping policy."""
    if settings.stopping is None and settings.costs is not None and drafter is not None:
        return default_stopping(drafter.capabilities, settings.schedule, target)
    return settings.stopping or "fixed"


def _check_prompt(index: int, prompt: Sequence[int], target: Target) -> None:
    """Raise UserError for a prompt that is empty, too long or no token ids."""
    if not prompt:
        raise UserError(
            f"prompt {index} is empty, expected at least one token (such as the start token)."
        )
    _check_ids(index, prompt, target)
    if len(prompt) >= target.max_length:
        raise UserError(
            f"prompt {index} has {len(prompt)} tokens, but '{target.name}' holds at most "
            f"{target.max_length}, output included. Shorten the prompt or use a target with a "
            f"longer context."
        )


def check_costs(drafter: Drafter | None, settings: Settings) -> None:
    """Raise UserError if the drafter needs measured costs and there are none."""
    if drafter is not None and drafter.capabilities.needs_costs and settings.costs is None:
        raise UserError(
            f"drafter '{drafter.name}' needs measured costs, found None. Use "
            f"Settings(costs=time_parts(...).costs)."
        )


def check(target: Target, drafter: Drafter | None, settings: Settings) -> None:
    """Raise UserError if these settings do not fit the target or the drafter."""
    if drafter is not None:
        check_taps(target, drafter.capabilities.taps)
        check_rule(settings.verify, settings.temperature, drafter.capabilities, drafter.name)
    check_choice("schedule", settings.schedule, ("serial", *SCHEDULES))
    if settings.num_draft_tokens > target.max_length:
        raise UserError(
            f"num_draft_tokens is {quote(settings.num_draft_tokens)}, expected at most "
            f"{target.max_length}, the context of '{target.name}' in tokens."
        )


def _check_ids(index: int, prompt: Sequence[int], target: Target) -> None:
    """Raise UserError if the prompt holds anything but ids of the target's vocabulary."""
    wrong = [token for token in prompt if not is_int(token) or not 0 <= token < target.vocab_size]
    if wrong:
        raise UserError(
            f"prompt {index} holds {quote(wrong[0])}, expected token ids: whole numbers from 0 to "
            f"{target.vocab_size - 1}, the vocabulary of '{target.name}'."
        )


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    request_ids: Sequence[int] | None = None,
    on_tokens: OnTokens | None = None,
) -> list[Generation]:
    """Continue all prompts as one ragged batch; return their generations in order.

    drafter: None decodes autoregressively. request_ids: one per prompt, which keys its random
    numbers (default: 0, 1, 2, ...). on_tokens: called with the prompt's index and its new token ids
    after each round. Raises UserError as `build_batch` and `Batch.round` do.
    """
    with Claim(target, drafter):  # other threads wait for the whole call
        batch = prefill_batch(
            target, drafter, prompts, settings, request_ids=request_ids, on_tokens=on_tokens
        )
        generations = [row.generation for row in batch.rows]
        try:
            while batch.rows:
                batch.round()
        finally:
            batch.close()
    return generations

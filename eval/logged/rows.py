"""Rows of replay.jsonl and lines of replays.jsonl, and the table of a replay.

Fields that rows of results.jsonl have too mean the same here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoding.drafters.with_lookup import LookupFirst
from decoding.interfaces import Drafter
from decoding.rounds.stats import LOOPING_BELOW, Generation, distinct_n
from eval.logged.contexts import context_of, positions_past_context
from eval.logged.replay import FIXED, Replay
from eval.logged.texts import LoggedText
from eval.report.tables import Table, make_table
from eval.report.text import amount, count_label, number, rates
from eval.statistics import metrics
from jobs.drafter_use import DrafterUse


@dataclass(frozen=True)
class ReplayRow:
    """One drafter at one draft length on the outputs of a log."""

    log: str
    target: str
    benchmark: str
    drafter: str
    drafter_layers: int
    drafter_parameters: int
    num_draft_tokens: int
    stopping: str
    schedule: str
    temperature: float | None  # of the log; None: not known
    prompts: int
    outputs: int  # of these prompts: one for each turn
    tokenized: int  # outputs that the log holds as text alone
    tokens: int
    rounds: int
    drafted: float  # tokens of a round
    alpha: float | None
    alpha_by_depth: list[float | None]
    tested_by_depth: list[int]
    accepted_by_depth: list[int]
    tau: float
    tau_low: float | None
    tau_high: float | None
    # cost ratio below which drafting pays if verification costs as much as one token (V = 1): an
    # upper bound; None: the drafter has no model, or looks up some of its drafts
    break_even_cost_ratio: float | None
    distinct_4: float  # mean over outputs
    headline_prompts: int  # outputs that do not loop: distinct-4 >= 0.5
    headline_alpha: float | None
    headline_tau: float | None
    passes: int  # over the log, for all draft lengths
    positions_per_second: float
    dtype: str
    threads: int
    hardware: str
    seed: int
    # of the drafter's model, in its own tokens; None: no model, or a row of an older version
    drafter_context: int | None = None
    # tokens of the outputs that lie past it, where the model drafts nothing
    past_context: int | None = None


@dataclass(frozen=True)
class ReplayedOutput:
    """Line of replays.jsonl: one output, replayed with one drafter at one draft length."""

    drafter: str
    num_draft_tokens: int
    prompt_id: str
    category: str
    turn: int
    prompt_tokens: int
    tokens: int
    rounds: int
    drafted: int
    tested_by_depth: list[int]
    accepted_by_depth: list[int]
    trace: str  # see decoding.rounds.stats.Generation.trace


def rows_of(
    name: str,
    drafter: Drafter,
    use: DrafterUse,
    texts: Sequence[LoggedText],
    replay: Replay,
    resamples: int,
    **shared: Any,
) -> list[ReplayRow]:
    """Return a row for each draft length. shared: fields that all rows of the run share."""
    varied = [distinct_n(text.tokens) for text in texts]
    kept = [index for index, share in enumerate(varied) if share >= LOOPING_BELOW]
    context, past = context_of(drafter), positions_past_context(drafter, texts)
    rows = []
    for gamma, generations in replay.generations.items():
        by_prompt: dict[str, list[Generation]] = defaultdict(list)
        for text, generation in zip(texts, generations, strict=True):
            by_prompt[text.prompt_id].append(generation)
        units = list(by_prompt.values())
        tau = metrics.bootstrap_tau(
            [sum(len(one.tokens) for one in unit) for unit in units],
            [sum(one.rounds for one in unit) for unit in units],
            resamples=resamples,
            seed=shared["seed"],
        )
        tested, accepted = _counts(generations)
        headline = [generations[index] for index in kept]
        rounds = sum(one.rounds for one in generations)
        drafted = sum(one.drafted for one in generations) / rounds
        rows.append(
            ReplayRow(
                drafter=name,
                drafter_layers=drafter.num_layers,
                drafter_parameters=drafter.num_parameters,
                num_draft_tokens=gamma,
                stopping=use.stopping or FIXED,
                schedule=use.schedule,
                prompts=len(units),
                outputs=len(texts),
                tokens=sum(len(one.tokens) for one in generations),
                rounds=rounds,
                drafted=drafted,
                alpha=metrics.alpha(tested, accepted),
                alpha_by_depth=metrics.alpha_by_depth(tested, accepted),
                tested_by_depth=tested,
                accepted_by_depth=accepted,
                **metrics.interval_fields("tau", tau),  # type: ignore[arg-type]
                break_even_cost_ratio=_break_even(drafter, tau.value, drafted, gamma),
                distinct_4=sum(varied) / len(varied),
                headline_prompts=len(kept),
                headline_alpha=metrics.alpha(*_counts(headline)),
                headline_tau=metrics.tau(
                    sum(len(one.tokens) for one in headline), sum(one.rounds for one in headline)
                ),
                passes=replay.passes,
                positions_per_second=replay.positions_per_second,
                drafter_context=context,
                past_context=past,
                **shared,
            )
        )
    return rows


def _counts(generations: Sequence[Generation]) -> tuple[list[int], list[int]]:
    return (
        metrics.add_by_depth([one.tested_by_depth for one in generations]),
        metrics.add_by_depth([one.accepted_by_depth for one in generations]),
    )


def _break_even(drafter: Drafter, tau: float, drafted: float, gamma: int) -> float | None:
    """Return the cost ratio c at which tau / (steps c + 1) is 1; None if the steps are unknown."""
    if not drafter.num_parameters or isinstance(drafter, LookupFirst):
        return None
    steps = {"round": 1.0}.get(drafter.capabilities.steps, drafted)
    if drafter.capabilities.shape == "tree":
        steps = float(gamma)
    return (tau - 1) / steps if steps else None


def outputs_of(name: str, texts: Sequence[LoggedText], replay: Replay) -> list[ReplayedOutput]:
    """Return the lines of replays.jsonl of one drafter."""
    return [
        ReplayedOutput(
            name,
            gamma,
            text.prompt_id,
            text.category,
            text.turn,
            len(text.prompt),
            len(text.tokens),
            one.rounds,
            one.drafted,
            one.tested_by_depth,
            one.accepted_by_depth,
            one.trace,
        )
        for gamma, generations in replay.generations.items()
        for text, one in zip(texts, generations, strict=True)
    ]


def replay_table(rows: Sequence[ReplayRow]) -> Table:
    """Return the table of a replay, one row for each drafter and draft length."""
    first = rows[0]
    title = f"{first.target} on {first.log}: {count_label(first.outputs, 'output')} of "
    title += f"{count_label(first.prompts, 'prompt')}, {first.tokens:,} tokens, distinct-4 "
    title += f"{first.distinct_4:.2f}, {first.dtype}, {count_label(first.threads, 'thread')}"
    cells = []
    for row in rows:
        bounded = row.tau_low is not None and row.tau_high is not None
        interval = f" [{row.tau_low:.2f}, {row.tau_high:.2f}]" if bounded else ""
        size = f"{count_label(row.drafter_layers, 'layer')}, {amount(row.drafter_parameters)}"
        cells.append(
            {
                "drafter": f"{row.drafter} ({size if row.drafter_parameters else 'no model'})",
                "gamma": f"{'<= ' * (row.stopping != FIXED)}{row.num_draft_tokens}",
                "tau [95 %]": number(row.tau) + interval,
                "drafted": number(row.drafted),
                "drafts in": f"{_share_drafted(row):.0%}",
                "accepted": number(sum(row.accepted_by_depth) / row.rounds),
                "alpha": number(row.alpha),
                "by depth": rates(row.alpha_by_depth[:4]),
                "not looping": f"{number(row.headline_tau)} ({row.headline_prompts})",
                "pays below c": number(row.break_even_cost_ratio, 3),
                "positions/s": f"{row.positions_per_second:,.0f}",
            }
        )
    spare = ("by depth", "positions/s", "not looping", "accepted")
    return make_table(title, cells, (), spare)


def context_notes(rows: Sequence[ReplayRow]) -> list[str]:
    """Return a sentence for each drafter whose context is shorter than the log's texts."""
    past = {row.drafter: row for row in rows if row.past_context}
    return [
        f"{row.past_context:,} of {row.tokens:,} positions lie past the context of {name} "
        f"({row.drafter_context:,} tokens), where its model drafts nothing. Its tau includes them."
        for name, row in past.items()
    ]


def _share_drafted(row: ReplayRow) -> float:
    """Return the share of rounds with a draft: in each of them its first token is tested."""
    return row.tested_by_depth[0] / row.rounds if row.tested_by_depth else 0.0

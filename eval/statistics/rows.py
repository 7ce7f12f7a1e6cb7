"""Paired samples -> rows of results.jsonl: one drafter x benchmark x setting."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from decoding.rounds.stats import LOOPING_BELOW
from decoding.schedules.by_name import SCHEDULES, WALL
from eval.measure.parts import Slice, median_parts
from eval.measure.records import AUTOREGRESSIVE, Arm, Condition, Record
from eval.statistics import metrics, prediction
from eval.statistics.budgets import UNKNOWN, Shapes, row_budgets
from eval.statistics.lossless import OTHER, Equality, judge
from eval.statistics.paired_samples import (
    PairedSample,
    Pool,
    busy_ms,
    lane_costs,
    mean_beams,
    mean_draft_ms,
    mean_round_ms,
    mean_target_ms,
    pair_samples,
    pool_counts,
    replayable,
    tested_counts,
)
from eval.statistics.replay import replayed_speedup, turns
from eval.statistics.schema import Category, DrafterFacts, PartTimes, Row, RunFacts
from jobs.drafter_use import ALONE

CLOSED_FORM = ("serial", "pearl_virtual", "pearl_wall")  # schedules that a formula predicts


def interval(units: Sequence[PairedSample], run: RunFacts) -> metrics.Interval:
    """Speedup over these units with its paired bootstrap interval."""
    return metrics.paired_bootstrap(
        [unit.tokens for unit in units],
        [unit.seconds for unit in units],
        [unit.base_tokens for unit in units],
        [unit.base_seconds for unit in units],
        resamples=run.bootstrap_resamples,
        seed=run.seed,
    )


def headline_samples(units: Sequence[PairedSample]) -> list[PairedSample]:
    """Return the samples whose target text does not loop."""
    return [unit for unit in units if np.mean(unit.distinct_4) >= LOOPING_BELOW]


def _categories(units: Sequence[PairedSample], run: RunFacts) -> list[Category]:
    """Return the row by category; a batch that mixes categories counts as "mixed"."""
    slices: dict[str, list[PairedSample]] = defaultdict(list)
    for unit in units:
        slices[unit.categories[0] if len(set(unit.categories)) == 1 else "mixed"].append(unit)
    rows = []
    for name, members in sorted(slices.items()):
        speed = interval(members, run)
        prompts = sum(len(unit.ids) for unit in members)
        rows.append(
            Category(
                name, prompts, _alpha(members), _tau(members), speed.value, speed.low, speed.high
            )
        )
    return rows


def _alpha(units: Sequence[PairedSample]) -> float | None:
    return metrics.alpha(*tested_counts(units))


def _tau(units: Sequence[PairedSample]) -> float | None:
    return metrics.tau(sum(unit.tokens for unit in units), sum(unit.rounds for unit in units))


def build_row(
    run: RunFacts,
    facts: DrafterFacts,
    parts: PartTimes,
    records: Sequence[Record],
    units: Sequence[PairedSample],
    pool: Pool,
    shapes: Shapes = UNKNOWN,
) -> Row:
    """Make one row from the records of a drafter at one draft length under one condition.

    shapes: what its models read and compute.
    """
    first = records[0]
    equality = Equality(OTHER, "the drafter's own text") if facts.schedule == ALONE else None
    rule = facts.verify or run.verify
    equality = equality or judge(records, verify=rule, dtype=run.dtype)
    judged = _verdict(facts, pool)
    shared = dataclasses.asdict(run)
    del shared["bootstrap_resamples"]
    return Row(
        **{**shared, "verify": rule if first.temperature else "greedy"},
        run_verify=run.verify if first.temperature else "greedy",
        part=first.part,
        drafter=facts.name,
        drafter_layers=facts.layers,
        drafter_parameters=facts.parameters,
        drafter_dtype=facts.dtype,
        batch_size=first.batch_size,
        temperature=first.temperature,
        num_draft_tokens=first.num_draft_tokens,
        length_rule=facts.length_rule,
        schedule=facts.schedule,
        stopping=facts.stopping,
        lossless=equality.word,
        lossless_detail=equality.detail,
        **_acceptance(units),
        **_costs(units, facts, parts),
        **_speed(units, run),
        **_headline(units, run),
        predicted_speedup=prediction.predicted_speedup(
            pool.pass_rates, first.num_draft_tokens, pool.costs
        )
        if facts.schedule in CLOSED_FORM
        else None,
        replayed_speedup=_replayed(run, facts, first, units, pool),
        best_gamma=judged.gamma,
        best_gamma_speedup=judged.speedup,
        helps=judged.helps,
        verdict=judged.text,
        categories=_categories(units, run),
        **row_budgets(shapes, facts, units, parts.context),
    )


def _verdict(facts: DrafterFacts, pool: Pool) -> prediction.Verdict:
    if facts.schedule == ALONE:
        text = "this is another model's text; no schedule that drafts with it can be faster"
        return prediction.Verdict(False, 0, 1.0, text)
    judged = prediction.verdict(pool.pass_rates, pool.costs)
    if facts.schedule not in CLOSED_FORM:
        text = (
            f"there is no formula for this schedule; that of PEARL gives {judged.speedup:.2f}x "
            f"at its best length, gamma={judged.gamma}"
        )
        return replace(judged, text=text)
    return (
        replace(judged, text=f"if the lanes do not slow each other, {judged.text}")
        if facts.schedule in WALL
        else judged
    )


def _acceptance(units: Sequence[PairedSample]) -> dict[str, Any]:
    tested, accepted = tested_counts(units)
    return {
        "prompts": sum(len(unit.ids) for unit in units),
        "tokens": sum(unit.tokens for unit in units),
        "rounds": sum(unit.rounds for unit in units),
        "alpha": metrics.alpha(tested, accepted),
        "alpha_by_depth": metrics.alpha_by_depth(tested, accepted),
        "tested_by_depth": tested,
        "accepted_by_depth": accepted,
        "tau": _tau(units),
        "drafted": sum(unit.drafted for unit in units) / sum(unit.rounds for unit in units),
        "distinct_4": float(np.mean([value for unit in units for value in unit.distinct_4])),
    }


def _costs(units: Sequence[PairedSample], facts: DrafterFacts, parts: PartTimes) -> dict[str, Any]:
    draft_ms, target_ms = mean_draft_ms(units, facts, parts), mean_target_ms(units, facts, parts)
    round_ms, step_ms = mean_round_ms(units), parts.at(mean_beams(units)).t_draft_ms
    base_seconds = sum(unit.base_seconds for unit in units)
    return {
        "t_draft_ms": step_ms,
        "t_target_ms": parts.t_target_ms,
        "V": metrics.cost_table(parts.t_target_ms),
        "cost_ratio": step_ms / parts.t_target_ms[1],
        "context": parts.context,
        "draft_ms_per_round": draft_ms,
        "target_ms_per_round": target_ms,
        "round_ms": round_ms,
        "overhead": metrics.overhead(round_ms, busy_ms(units, facts, parts)),
        "overlap": _overlap(units) if facts.schedule in SCHEDULES else None,
        "baseline_round_ms": 1000 * base_seconds / sum(unit.base_batch_rounds for unit in units),
        "prefill_ms": 1000 * sum(unit.prefill_seconds for unit in units) / len(units),
        "baseline_prefill_ms": 1000 * sum(unit.base_prefill_seconds for unit in units) / len(units),
    }


def _replayed(
    run: RunFacts, facts: DrafterFacts, first: Record, units: Sequence[PairedSample], pool: Pool
) -> float | None:
    """Return the speedup of an overlapped schedule replayed from its traces and lane times."""
    if not replayable(facts, units):
        return None
    traces, gamma = [trace for unit in units for trace in unit.traces], first.num_draft_tokens
    taken = [
        turn for trace in traces for turn in turns(trace, gamma, run.max_new_tokens, facts.schedule)
    ]
    return replayed_speedup(taken, lane_costs(units, taken, pool.costs.V))


def _overlap(units: Sequence[PairedSample]) -> float | None:
    return metrics.overlap(
        *(
            sum(lane)
            for lane in zip(
                *(
                    (u.draft_seconds, u.target_seconds, u.lanes_seconds, u.shorter_seconds)
                    for u in units
                )
            )
        )
    )


def _speed(units: Sequence[PairedSample], run: RunFacts) -> dict[str, Any]:
    speed = interval(units, run)
    tokens, seconds = sum(unit.tokens for unit in units), sum(unit.seconds for unit in units)
    base_tokens, base_seconds = (
        sum(unit.base_tokens for unit in units),
        sum(unit.base_seconds for unit in units),
    )
    whole = seconds + sum(unit.prefill_seconds for unit in units)
    base_whole = base_seconds + sum(unit.base_prefill_seconds for unit in units)
    worst = min(units, key=lambda unit: unit.speedup)
    return {
        "tokens_per_second": tokens / seconds,
        "baseline_tokens_per_second": base_tokens / base_seconds,
        "speedup": speed.value,
        "speedup_low": speed.low,
        "speedup_high": speed.high,
        "speedup_with_prefill": metrics.rate_ratio([tokens], [whole], [base_tokens], [base_whole]),
        "cpu_share": sum(unit.cpu_seconds for unit in units) / (whole + base_whole),
        "slower_prompts": sum(len(unit.ids) for unit in units if unit.speedup < 1),
        "worst_prompt": worst.ids[0],
        "worst_speedup": worst.speedup,
    }


def _headline(units: Sequence[PairedSample], run: RunFacts) -> dict[str, Any]:
    fair = headline_samples(units)
    speed = interval(fair, run) if fair else None
    return {
        "headline_prompts": sum(len(unit.ids) for unit in fair),
        "headline_alpha": _alpha(fair),
        "headline_tau": _tau(fair),
        "headline_speedup": speed.value if speed else None,
        "headline_speedup_low": speed.low if speed else None,
        "headline_speedup_high": speed.high if speed else None,
    }


def build_rows(
    run: RunFacts,
    facts: dict[str, DrafterFacts],
    slices: Sequence[Slice],
    records: Sequence[Record],
    shapes: Shapes = UNKNOWN,
) -> list[Row]:
    """Make all rows of a run, in the order in which they were measured."""
    rows = []
    for condition, part in dict.fromkeys((record.condition, record.part) for record in records):
        for name in facts:
            by_gamma = _by_gamma(name, condition, part, records)
            if not by_gamma:  # a model that is run alone has no draft length to sweep
                continue
            parts = median_parts(slices, name, condition, part)
            pool = pool_of(name, condition, part, facts[name], slices, records, run.max_new_tokens)
            for mine, units in by_gamma.values():
                rows.append(build_row(run, facts[name], parts, mine, units, pool, shapes))
    return rows


def pool_of(
    name: str,
    condition: Condition,
    part: str,
    facts: DrafterFacts,
    slices: Sequence[Slice],
    records: Sequence[Record],
    limit: int,
) -> Pool:
    """Return what predicts a drafter's speedup under one condition.

    limit: the most tokens of a text. Acceptance and parts are those of the part's own prompts. The
    overhead is that of the sweep, over all its draft lengths, if there was one: so the main part's
    prediction does not contain its own time, and agreement is evidence.
    """
    judged = {
        gamma: units for gamma, (_, units) in _by_gamma(name, condition, part, records).items()
    }
    timed = {
        gamma: units for gamma, (_, units) in _by_gamma(name, condition, "sweep", records).items()
    }
    parts = median_parts(slices, name, condition, part)
    parts_then = median_parts(slices, name, condition, "sweep" if timed else part)
    return pool_counts(judged, timed or judged, facts, parts, parts_then, limit)


def _by_gamma(
    name: str, condition: Condition, part: str, records: Sequence[Record]
) -> dict[int, tuple[list[Record], list[PairedSample]]]:
    """Return for each draft length the drafter's records, and their pairs with the baseline's."""
    here = [record for record in records if record.condition == condition and record.part == part]
    baseline = [record for record in here if record.drafter == AUTOREGRESSIVE]
    found = {}
    for gamma in sorted({record.num_draft_tokens for record in here if record.drafter == name}):
        mine = [record for record in here if record.arm == Arm(name, gamma)]
        found[gamma] = (mine, pair_samples(mine, baseline))
    return found


def samples_of(row: Row, records: Sequence[Record]) -> list[PairedSample]:
    """Return the paired samples behind a row."""
    condition = Condition(row.temperature, row.batch_size)
    return _by_gamma(row.drafter, condition, row.part, records)[row.num_draft_tokens][1]

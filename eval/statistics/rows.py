"""Rows of results.jsonl, each of one drafter, draft length and condition, from paired samples."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decoding.costs import prediction
from decoding.costs.contention import UNDISTURBED, disturbance, waits
from decoding.costs.measure import NEGATIVE
from decoding.rounds.stats import LOOPING_BELOW
from decoding.schedules.by_name import SCHEDULES, WALL
from eval.measure.parts import Slice, median_parts
from eval.measure.records import AUTOREGRESSIVE, Condition, Record
from eval.statistics import metrics
from eval.statistics.budgets import UNKNOWN, Shapes, row_budgets
from eval.statistics.lossless import OTHER, Equality, judge
from eval.statistics.paired_samples import (
    PairedSample,
    Pool,
    busy_ms,
    draft_ms,
    lane_costs,
    pair_samples,
    pool_counts,
    predictable_from_traces,
    speed_columns,
    target_ms,
    total,
)
from eval.statistics.pearl_trace import speedup_from_trace, turns
from eval.statistics.schema import Category, DrafterFacts, PartTimes, Row, RunFacts
from jobs.drafter_use import ALONE
from jobs.malloc import without_collector

CLOSED_FORM = ("serial", "pearl_virtual", "pearl_wall")  # schedules that a formula predicts
# Fields that a row shares with its records.
OF_RECORDS = ("part", "batch_size", "temperature", "num_draft_tokens")
# draft length -> the drafter's records, and the units that pair them with the baseline's
ByGamma = Mapping[int, tuple[list[Record], list[PairedSample]]]


@without_collector()
def build_rows(
    run: RunFacts,
    facts: dict[str, DrafterFacts],
    slices: Sequence[Slice],
    records: Sequence[Record],
    shapes: Shapes = UNKNOWN,
) -> list[Row]:
    """Return all rows of a run, in the order of measurement. facts: by drafter."""
    rows = []
    for condition, part in dict.fromkeys((record.condition, record.part) for record in records):
        for name in facts:
            by_gamma = _by_gamma(name, condition, part, records)
            if not by_gamma:  # a model that decodes alone is not swept
                continue
            parts = median_parts(slices, name, condition, part)
            swept = by_gamma if part == "sweep" else _by_gamma(name, condition, "sweep", records)
            place = (name, condition, part)
            pool = _pool(*place, facts[name], slices, by_gamma, swept, run.max_new_tokens)
            for mine, units in by_gamma.values():
                rows.append(build_row(run, facts[name], parts, mine, units, pool, shapes))
    return rows


def build_row(
    run: RunFacts,
    facts: DrafterFacts,
    parts: PartTimes,
    records: Sequence[Record],
    units: Sequence[PairedSample],
    pool: Pool,
    shapes: Shapes = UNKNOWN,
) -> Row:
    """Return the row of a drafter at one draft length under one condition.

    records: all of that drafter, length and condition. units: their pairs with the baseline. pool:
    acceptance and costs for the prediction. shapes: budgets of the models' forwards.
    """
    first, sample = records[0], total(units)
    rule = facts.verify or run.verify
    equality = judge(records, verify=rule, dtype=run.dtype, backend=run.backend)
    if facts.schedule == ALONE:
        equality = Equality(OTHER, "the drafter's own text")
    predicted = None
    if facts.schedule in CLOSED_FORM:
        gamma = first.num_draft_tokens
        predicted = prediction.predicted_speedup(pool.pass_rates, gamma, pool.costs)
    verdict = _verdict(facts, pool)
    shared = dataclasses.asdict(run)
    del shared["bootstrap_resamples"]
    return Row(
        **{**shared, "verify": rule if first.temperature else "greedy"},
        run_verify=run.verify if first.temperature else "greedy",
        drafter=facts.name,
        drafter_layers=facts.layers,
        drafter_parameters=facts.parameters,
        drafter_dtype=facts.dtype,
        draft_vocab_size=facts.draft_vocab_size,
        calibrated_at=facts.calibrated_at,
        draft_shape=facts.draft_shape,
        tree_nodes=facts.tree_nodes.get(first.num_draft_tokens, 0),
        **{name: vars(first)[name] for name in OF_RECORDS},
        **{name: vars(facts)[name] for name in ("length_rule", "schedule", "stopping")},
        lossless=equality.word,
        lossless_detail=equality.detail,
        **_acceptance(sample),
        **_costs(sample, facts, parts),
        prefill_ms=1000 * sample.prefill_seconds / len(units),
        baseline_prefill_ms=1000 * sample.base_prefill_seconds / len(units),
        **_speed(sample, units, run),
        **_headline(units, run),
        predicted_speedup=predicted,
        unreliable="" if predicted is None else _doubt(run, facts, pool),
        replayed_speedup=_from_traces(run, facts, first.num_draft_tokens, sample, pool),
        best_gamma=verdict.gamma,
        best_gamma_speedup=verdict.speedup,
        helps=verdict.helps,
        verdict=verdict.text,
        categories=_categories(units, run),
        **row_budgets(shapes, facts, sample, first.num_draft_tokens, parts.context),
    )


def _doubt(run: RunFacts, facts: DrafterFacts, pool: Pool) -> str:
    """Return why a prediction from these costs is unreliable, as a clause; "" if it is reliable."""
    disturbed = not waits(run.device, run.backend, facts.schedule) and pool.cpu_share < UNDISTURBED
    if disturbed:
        return disturbance(pool.cpu_share)
    return NEGATIVE if pool.costs.overhead < 0 else ""


def _verdict(facts: DrafterFacts, pool: Pool) -> prediction.Verdict:
    if facts.schedule == ALONE:
        text = "this is another model's text; no schedule that drafts with it can be faster"
        return prediction.Verdict(False, 0, 1.0, text)
    verdict = prediction.verdict(pool.pass_rates, pool.costs)
    text = verdict.text
    if facts.schedule not in CLOSED_FORM:
        text = (
            f"there is no formula for this schedule; that of PEARL gives {verdict.speedup:.2f}x "
            f"at its best length, gamma={verdict.gamma}"
        )
    elif facts.schedule in WALL:
        text = f"if the lanes do not slow each other, {text}"
    return dataclasses.replace(verdict, text=text)


def _acceptance(sample: PairedSample) -> dict[str, Any]:
    tested, accepted = sample.tested_counts
    return {
        "prompts": len(sample.ids),
        "tokens": sample.tokens,
        "rounds": sample.rounds,
        "alpha": metrics.alpha(tested, accepted),
        "alpha_by_depth": metrics.alpha_by_depth(tested, accepted),
        "tested_by_depth": tested,
        "accepted_by_depth": accepted,
        "tau": metrics.tau(sample.tokens, sample.rounds),
        "drafted": sample.drafted / sample.rounds,
        "distinct_4": float(np.mean(sample.distinct_4)),
    }


def _costs(sample: PairedSample, facts: DrafterFacts, parts: PartTimes) -> dict[str, Any]:
    step_ms = parts.at(sample.beams).t_draft_ms
    lanes = (sample.draft_seconds, sample.target_seconds, sample.lanes_seconds)
    overlap = metrics.overlap(*lanes, sample.shorter_seconds)
    return {
        "t_draft_ms": step_ms,
        "t_target_ms": parts.t_target_ms,
        "V": metrics.cost_table(parts.t_target_ms),
        "cost_ratio": step_ms / parts.t_target_ms[1],
        "context": parts.context,
        "draft_ms_per_round": draft_ms(sample, facts, parts),
        "target_ms_per_round": target_ms(sample, facts, parts),
        "round_ms": sample.round_ms,
        "overhead": metrics.overhead(sample.round_ms, busy_ms(sample, facts, parts)),
        "overlap": overlap if facts.schedule in SCHEDULES else None,
        "baseline_round_ms": sample.base_round_ms,
        "parts_ms": sample.parts_ms,
        "baseline_parts_ms": sample.base_parts_ms,
    }


def _speed(sample: PairedSample, units: Sequence[PairedSample], run: RunFacts) -> dict[str, Any]:
    seconds = sample.seconds + sample.prefill_seconds
    base_seconds = sample.base_seconds + sample.base_prefill_seconds
    worst = min(units, key=lambda unit: unit.speedup)
    return {
        "tokens_per_second": sample.tokens / sample.seconds,
        "baseline_tokens_per_second": sample.base_tokens / sample.base_seconds,
        **metrics.interval_fields("speedup", _interval(units, run)),
        "speedup_with_prefill": sample.tokens / seconds * base_seconds / sample.base_tokens,
        "cpu_share": sample.cpu_share,
        "slower_prompts": sum(len(unit.ids) for unit in units if unit.speedup < 1),
        "worst_prompt": worst.ids[0],
        "worst_speedup": worst.speedup,
    }


def _interval(units: Sequence[PairedSample], run: RunFacts) -> metrics.Interval:
    """Return the speedup over these units with its paired bootstrap interval."""
    return metrics.paired_bootstrap(
        *speed_columns(units), resamples=run.bootstrap_resamples, seed=run.seed
    )


def headline_samples(units: Sequence[PairedSample]) -> list[PairedSample]:
    """Return the units whose target text does not loop."""
    return [unit for unit in units if np.mean(unit.distinct_4) >= LOOPING_BELOW]


def _headline(units: Sequence[PairedSample], run: RunFacts) -> dict[str, Any]:
    fair = headline_samples(units)
    sample = total(fair)
    return {
        "headline_prompts": len(sample.ids),
        "headline_alpha": metrics.alpha(*sample.tested_counts),
        "headline_tau": metrics.tau(sample.tokens, sample.rounds),
        **metrics.interval_fields("headline_speedup", _interval(fair, run) if fair else None),
    }


def _categories(units: Sequence[PairedSample], run: RunFacts) -> list[Category]:
    """Return the figures by prompt category; a batch of several categories counts as "mixed"."""
    members: dict[str, list[PairedSample]] = defaultdict(list)
    for unit in units:
        members[unit.categories[0] if len(set(unit.categories)) == 1 else "mixed"].append(unit)
    rows = []
    for name in sorted(members):
        sample, speed = total(members[name]), _interval(members[name], run)
        alpha = metrics.alpha(*sample.tested_counts)
        tau = metrics.tau(sample.tokens, sample.rounds)
        rows.append(Category(name, len(sample.ids), alpha, tau, *dataclasses.astuple(speed)))
    return rows


def _from_traces(
    run: RunFacts, facts: DrafterFacts, gamma: int, sample: PairedSample, pool: Pool
) -> float | None:
    """Return the speedup of an overlapped schedule, predicted from its traces and lane times."""
    if not predictable_from_traces(facts, sample):
        return None
    taken = [
        turn
        for trace in sample.traces
        for turn in turns(trace, gamma, run.max_new_tokens, facts.schedule)
    ]
    return speedup_from_trace(taken, lane_costs(sample, taken, pool.costs.V))


def pool_of(
    name: str,
    condition: Condition,
    part: str,
    facts: DrafterFacts,
    slices: Sequence[Slice],
    records: Sequence[Record],
    limit: int,
) -> Pool:
    """Return the acceptance and costs that predict a drafter's speedup under one condition.

    limit: maximum number of tokens of a generation. Acceptance and part times come from the part's
    own prompts. The overhead comes from the sweep, over all its draft lengths, if there was one. So
    the prediction of the main part does not contain its own time, and agreement is evidence.
    """
    by_gamma, swept = (_by_gamma(name, condition, one, records) for one in (part, "sweep"))
    return _pool(name, condition, part, facts, slices, by_gamma, swept, limit)


def _pool(
    name: str,
    condition: Condition,
    part: str,
    facts: DrafterFacts,
    slices: Sequence[Slice],
    by_gamma: ByGamma,
    swept: ByGamma,
    limit: int,
) -> Pool:
    """Return `pool_of` the records and pairs of a part and of the sweep."""
    judged, timed = (
        {gamma: total(units) for gamma, (_, units) in found.items()} for found in (by_gamma, swept)
    )
    parts = median_parts(slices, name, condition, part)
    parts_then = median_parts(slices, name, condition, "sweep" if timed else part)
    return pool_counts(judged, timed or judged, facts, parts, parts_then, limit)


def _by_gamma(name: str, condition: Condition, part: str, records: Sequence[Record]) -> ByGamma:
    sides: dict[str, list[Record]] = {name: [], AUTOREGRESSIVE: []}
    place = (part, *dataclasses.astuple(condition))
    for record in records:
        if (record.part, record.temperature, record.batch_size) == place:
            sides.get(record.drafter, []).append(record)
    baseline, lengths = sides[AUTOREGRESSIVE], defaultdict[int, list[Record]](list)
    for record in sides[name]:
        lengths[record.num_draft_tokens].append(record)
    return {
        gamma: (lengths[gamma], pair_samples(lengths[gamma], baseline)) for gamma in sorted(lengths)
    }


def samples_of(row: Row, records: Sequence[Record]) -> list[PairedSample]:
    """Return the paired samples from which a row was made; raise KeyError if records lack some."""
    return _by_gamma(row.drafter, row.condition, row.part, records)[row.num_draft_tokens][1]

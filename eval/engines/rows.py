"""Rows of results.jsonl for engines, from the records of their batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from eval.engines.agreement import NOT_COMPARED, Agreement, Counts, compare, counts_of
from eval.engines.distribution import Verdict
from eval.engines.plan import EngineArm, Trial
from eval.engines.records import EngineRecord
from eval.measure.records import AUTOREGRESSIVE, Condition
from eval.statistics.engine_row import EngineRow
from eval.statistics.lossless import EQUAL, Equality, judge
from eval.statistics.metrics import alpha, alpha_by_depth, interval_fields, paired_bootstrap, tau
from eval.statistics.schema import DrafterFacts, RunFacts
from jobs.drafters import CONTROL
from serving.engines.registry import OURS

# Fields that a row shares with the run.
OF_RUN = (
    *("target", "target_layers", "target_parameters", "benchmark", "top_k", "top_p"),
    *("max_new_tokens", "dtype", "device", "threads", "seed", "hardware"),
)
NOT_TESTED, BIASED, NO_BIAS = "not tested", "biased", "no bias found"


def build_engine_rows(
    run: RunFacts,
    facts: Mapping[str, DrafterFacts],
    records: Sequence[EngineRecord],
    arms: Sequence[EngineArm],
    versions: Mapping[str, str],
    verdicts: Sequence[Verdict],
    ignore_eos: bool,
) -> list[EngineRow]:
    """Return a row of each arm under each condition that it ran under.

    facts: by drafter. versions: by engine. verdicts: on sampling with drafters. ignore_eos: whether
    speeds are measured past stop tokens.
    """
    rows = []
    for condition in dict.fromkeys(record.condition for record in records):
        here = [record for record in records if record.condition == condition]
        by_trial: dict[Trial, list[EngineRecord]] = defaultdict(list)
        for record in here:
            by_trial[record.trial].append(record)
        for arm in arms:
            trials = [t for t in by_trial if (t.arm, t.ignore_eos) == (arm, ignore_eos)]
            if arm.engine == OURS:  # the rule of point masses serves the comparison alone
                trials = [trial for trial in trials if trial.rule != "point_mass"]
            for trial in trials:
                rows.append(_row(run, facts, by_trial, trial, condition, versions, verdicts))
    return rows


def _row(
    run: RunFacts,
    facts: Mapping[str, DrafterFacts],
    by_trial: Mapping[Trial, list[EngineRecord]],
    trial: Trial,
    condition: Condition,
    versions: Mapping[str, str],
    verdicts: Sequence[Verdict],
) -> EngineRow:
    arm, records = trial.arm, by_trial[trial]
    drafter = facts.get(arm.drafter)
    backend = f"{arm.engine} {versions.get(arm.engine, run.backend)}"
    equality = _equality(trial, condition, records, run.dtype, backend, verdicts)
    return EngineRow(
        **{name: vars(run)[name] for name in OF_RUN},
        **vars(arm),
        backend=backend,
        drafter_layers=drafter.layers if drafter else 0,
        drafter_parameters=drafter.parameters if drafter else 0,
        drafter_dtype=drafter.dtype if drafter else "",
        prompts=len({prompt for record in records for prompt in record.prompt_ids}),
        batch_size=condition.batch_size,
        temperature=condition.temperature,
        schedule="serial",
        verify=trial.rule,
        lossless=equality.word,
        lossless_detail=equality.detail,
        **_acceptance(records),
        **_speeds(run, by_trial, trial),
        first_token_ms=_first_token_ms(records),
        **_agreement(by_trial, trial),
    )


def _first_token_ms(records: Sequence[EngineRecord]) -> float | None:
    times = [seconds for record in records for seconds in record.first_token_seconds]
    known = [seconds for seconds in times if seconds is not None]
    return 1000 * mean(known) if len(known) == len(times) else None


def _acceptance(records: Sequence[EngineRecord]) -> dict[str, Any]:
    """Return the counts and rates of a row. Every target forward emits one token of its own."""
    tokens = sum(len(row) for record in records for row in record.outputs)
    sums = {
        name: None if None in (values := [vars(r)[name] for r in records]) else sum(values)
        for name in ("rounds", "drafted", "accepted")
    }
    counts, accepted = _counts(records), sums["accepted"]
    depths = alpha_by_depth(counts.tested, counts.accepted) if counts else None
    return {
        **sums,
        "tokens": tokens,
        "alpha": alpha(counts.tested, counts.accepted) if counts else None,
        "alpha_by_depth": depths,
        "tested_by_depth": counts.tested if counts else None,
        "accepted_by_depth": counts.accepted if counts else None,
        "tau": None if accepted is None else tau(tokens, max(1, tokens - accepted)),
    }


def _counts(records: Sequence[EngineRecord]) -> Counts | None:
    return counts_of(
        [record.tested_by_depth for record in records],
        [record.accepted_by_depth for record in records],
        [record.rounds for record in records],
    )


def _totals(records: Sequence[EngineRecord]) -> Counts | None:
    """Return drafted and accepted tokens over all depths; None if the engine does not report them.

    Tokens of one draft are accepted together, so the test of these totals is not exact.
    """
    drafted = [record.drafted for record in records if record.drafted is not None]
    accepted = [record.accepted for record in records if record.accepted is not None]
    known = len(drafted) == len(accepted) == len(records)
    return Counts([sum(drafted)], [sum(accepted)]) if known else None


def _speeds(
    run: RunFacts, by_trial: Mapping[Trial, list[EngineRecord]], trial: Trial
) -> dict[str, Any]:
    """Return tokens/s and the ratios to two baselines: the engine's own, and ours."""

    def baseline(engine: str) -> list[EngineRecord]:
        [found] = [
            one
            for one in by_trial
            if one.arm == EngineArm(engine) and one.ignore_eos == trial.ignore_eos
        ]
        return by_trial[found]

    mine, own = by_trial[trial], baseline(trial.arm.engine)
    options = {"resamples": run.bootstrap_resamples, "seed": run.seed}
    gain = paired_bootstrap(*_columns(mine), *_columns(own), **options)
    over_ours = paired_bootstrap(*_columns(mine), *_columns(baseline(OURS)), **options)
    return {
        "tokens_per_second": _pace(mine),
        "baseline_tokens_per_second": _pace(own),
        **interval_fields("speedup", gain),
        **interval_fields("over_ours", over_ours),
    }


def _columns(records: Sequence[EngineRecord]) -> tuple[list[float], list[float]]:
    """Return tokens and seconds of each unit, in the order of the units."""
    units: dict[int, list[float]] = {}
    for record in sorted(records, key=lambda record: record.unit):
        sums = units.setdefault(record.unit, [0.0, 0.0])
        sums[0] += sum(map(len, record.outputs))
        sums[1] += record.seconds
    tokens, seconds = zip(*units.values(), strict=True)
    return list(tokens), list(seconds)


def _pace(records: Sequence[EngineRecord]) -> float:
    tokens, seconds = _columns(records)
    return sum(tokens) / sum(seconds)


def _equality(
    trial: Trial,
    condition: Condition,
    records: Sequence[EngineRecord],
    dtype: str,
    backend: str,
    verdicts: Sequence[Verdict],
) -> Equality:
    """Return whether the outputs are the target's own, or what a test of the sampling found."""
    arm = trial.arm
    if arm.engine == OURS and arm.method == AUTOREGRESSIVE:
        return Equality(EQUAL, "the target's own")
    if condition.temperature == 0 or arm.engine == OURS:
        generations = [one for record in records for one in record.generations]
        return judge(generations, verify=trial.rule, dtype=dtype, backend=backend)
    for verdict in verdicts:
        place = (verdict.engine, verdict.method, verdict.temperature)
        if place == (arm.engine, arm.method, condition.temperature):
            word = BIASED if verdict.is_biased else NO_BIAS
            return Equality(word, verdict.detail)
    return Equality(NOT_TESTED, f"sampling of {arm.engine} was not tested against the target's law")


def _agreement(by_trial: Mapping[Trial, list[EngineRecord]], trial: Trial) -> dict[str, Any]:
    """Return the comparison of a drafter's acceptance with that in our own loop."""
    arm = trial.arm
    engine = ours = None
    if arm.engine == OURS or arm.method == AUTOREGRESSIVE:
        found = Agreement(NOT_COMPARED, "")
    elif arm.drafter == CONTROL:
        found = Agreement(NOT_COMPARED, "its lookup is another one than ours")
    else:
        own = EngineArm(OURS, arm.method, arm.drafter, arm.num_draft_tokens)
        engine = _counts(by_trial[Trial(arm, trial.rule, True)])
        ours = _counts(by_trial[Trial(own, trial.rule, True)])
        found = Agreement(NOT_COMPARED, f"{arm.engine} does not report its acceptance")
        if engine and ours:
            found = compare(engine, ours)
        elif totals := _totals(by_trial[Trial(arm, trial.rule, True)]):
            of_ours = _totals(by_trial[Trial(own, trial.rule, True)])
            assert of_ours is not None, "our loop counts its drafts"
            found = compare(totals, of_ours, arm.num_draft_tokens)
    return {
        "agreement": found.word,
        "agreement_detail": found.detail,
        "checked_alpha_by_depth": engine and alpha_by_depth(engine.tested, engine.accepted),
        "ours_alpha_by_depth": ours and alpha_by_depth(ours.tested, ours.accepted),
    }

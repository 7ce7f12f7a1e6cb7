"""`python -m eval.run drafters=[FOLDER,...]`: the acceptance, costs and speed of drafters.

The prompts are split in two. The sweep tries every draft length on a few of them, or on those of
another file, and chooses each drafter's best length from its acceptance and costs. The main part
runs the drafters at that length on all other prompts and gives the results. So no draft length is
chosen on the prompts that measure it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from decoding.schedules.by_name import SCHEDULES, batch_type
from decoding.verification.rules import check_rule
from eval.config import EvalConfig
from eval.engines.job import measure_engines
from eval.engines.measure import read_not_run
from eval.engines.plan import (
    DRAFT_LENGTH,
    check_engines,
    describe_arms,
    engine_names,
    find_engines,
    plan_engines,
)
from eval.measure.coverage import with_coverage
from eval.measure.deadline import Deadline
from eval.measure.origins import FILE as ORIGINS
from eval.measure.origins import Origin, origin_of, write_origins
from eval.measure.records import Record
from eval.measure.session import Session, generations, max_tokens, prompts_by_part
from eval.measure.setup import EMBEDDED, Loaded, check, conditions, load
from eval.measure.shards import Shard, check_shards, measure_shards, this_shard
from eval.provenance import describe_draft_lengths, provenance
from eval.report.engines import condition_label, print_engines
from eval.report.page import engines_page, evaluation_page
from eval.report.terminal import print_evaluation
from eval.statistics.budgets import with_limits
from eval.statistics.engine_row import EngineRow
from eval.statistics.lossless import LOSSY
from eval.statistics.rows import build_rows
from eval.statistics.schema import Row, flat, main_rows, read_all_rows, write_rows
from eval.tasks.checking import check_answers, describe_checks, with_answers, write_answers
from jobs.files import write_text
from jobs.job import job_main
from jobs.run_folder import RunFolder
from jobs.tracker import Tracker, track_run
from serving.engines.registry import OURS
from training.models.build import target_is_here

TRACKED = (
    *("speedup", "tau", "alpha"),
    *("tokens_per_second", "baseline_tokens_per_second", "cost_ratio"),
)


def run(cfg: EvalConfig, clock: Callable[[], float] = time.monotonic) -> Path:
    """Measure and report; return the run folder with results.jsonl, records and report.html.

    A dry run prints the plan and writes nothing. clock: returns seconds, for max_seconds alone.
    Raises UserError for invalid input and, after the report, for an output that differs from the
    target's (unless require_lossless is false).
    """
    check_before_loading(cfg)
    if OURS not in engine_names(cfg):  # whose loop alone has a sweep
        lengths = cfg.num_draft_tokens or [DRAFT_LENGTH]
        cfg = dataclasses.replace(cfg, sweep=[], num_draft_tokens=lengths)
    if not cfg.drafters and cfg.prompt_lookup_control:
        print(
            "no drafters= given: only prompt lookup, the control, and autoregressive decoding are "
            "measured"
        )
    if cfg.dry_run:
        _print_plan(cfg)
        return Path(cfg.output_dir)
    folder = RunFolder(cfg)
    results, report = folder.path / "results.jsonl", folder.path / "report.html"
    also = [folder.path / name for name in ("records.jsonl", "parts.jsonl", ORIGINS)]
    if folder.finished(results, report, also=also):
        rows, engine_rows = read_all_rows(results)
        print(
            f"{folder.path} is finished; nothing is measured again. Delete it, or set another "
            f"output_dir=, to measure again."
        )
    elif shard := this_shard():
        _measure_shard(cfg, folder, shard, clock)
        return folder.path
    else:
        if cfg.shards > 1 and OURS in engine_names(cfg):
            measure_shards(cfg, folder.path)
        rows, engine_rows = _measure(cfg, folder, results, report, clock)
    if rows:
        print_evaluation(rows)
    if engine_rows:
        versions = folder.manifest["versions"]
        print_engines(engine_rows, read_not_run(folder.path), versions)
    print(f"\nrows: {results}\nreport: {report}")
    broken = sorted({row.drafter for row in rows if row.lossless == "differs"})
    if broken and cfg.require_lossless:
        raise UserError(
            f"the output with {', '.join(broken)} differs from the target's; the report shows "
            f"where. This is a fault of the decoding, not of the drafter: please report it. "
            f"Set require_lossless=false to end without this error."
        )
    return folder.path


def _measure_shard(
    cfg: EvalConfig, folder: RunFolder, shard: Shard, clock: Callable[[], float]
) -> None:
    """Measure a share of the prompts into the folder of a shard."""
    loaded = load(cfg)
    check_plan(cfg, loaded)
    folder.write_manifest(loaded.inputs, {}, finished=False)
    Session(cfg, loaded, folder.path, Deadline(0, folder.path, clock), shard).measure()


def _measure(
    cfg: EvalConfig, folder: RunFolder, results: Path, report: Path, clock: Callable[[], float]
) -> tuple[list[Row], list[EngineRow]]:
    """Measure missing units, write all files of the run folder and return the rows."""
    loaded = load(cfg)
    check_plan(cfg, loaded)
    folder.write_manifest(loaded.inputs, {}, finished=False)
    write_origins(folder.path, _origins(loaded, folder.manifest["inputs"]))
    plan = plan_engines(cfg, loaded)
    # first, as an engine that refuses a drafter should do so before an hour of measuring
    engine_rows = measure_engines(cfg, loaded, plan, folder.path) if plan.arms else []
    rows, records = list[Row](), list[Record]()
    if OURS in engine_names(cfg) and loaded.facts:
        rows, records = _measure_ours(cfg, loaded, folder, clock)
        rows = with_coverage(rows, loaded.bench, records)
        rows = _with_checked_answers(cfg, loaded, folder.path, rows, records)
    write_rows(results, [*rows, *engine_rows])
    made = provenance(cfg, folder, loaded, rows, records)
    if rows:
        page = evaluation_page(rows, records, made, engine_rows, plan.not_run)
    else:
        page = engines_page(engine_rows, plan.not_run, made)
    write_text(report, page)
    # Started last: the work of a tracker during the decoding would be measured too.
    with track_run(folder, cfg, loaded.inputs) as tracker:
        record_rows(tracker, rows, engine_rows)
    folder.write_manifest(loaded.inputs, _summary(rows, loaded), finished=True)
    return rows, engine_rows


def _measure_ours(
    cfg: EvalConfig, loaded: Loaded, folder: RunFolder, clock: Callable[[], float]
) -> tuple[list[Row], list[Record]]:
    """Measure the drafters in our own loop; return their rows and all records."""
    deadline = Deadline(cfg.max_seconds, folder.path, clock)
    shapes = with_limits(loaded.shapes, max_tokens(cfg, loaded), folder.path / "limits.json")
    session = Session(cfg, loaded, folder.path, deadline)
    session.measure()
    rows = build_rows(loaded.run, loaded.facts, session.slices, session.records, shapes)
    return add_bound(rows, cfg, loaded, session.overrun_seconds), session.records


def _with_checked_answers(
    cfg: EvalConfig, loaded: Loaded, folder: Path, rows: list[Row], records: Sequence[Record]
) -> list[Row]:
    """Check the answers of the main part, write answers.jsonl, and return rows with the counts."""
    text_of = loaded.bench.settings.text_of
    assert text_of is not None, "eval.measure.setup sets it"
    prompts = loaded.bench.benchmark.prompts
    answers = check_answers(prompts, records, text_of, cfg.benchmark.execute)
    write_answers(folder, answers)
    return with_answers(rows, answers)


def check_before_loading(cfg: EvalConfig) -> None:
    """Raise UserError for settings that cannot be measured, before any model is loaded.

    A dry run does not need the engines where it does not need the target.
    """
    check(cfg)
    check_shards(cfg)
    check_engines(cfg)
    if not cfg.dry_run:
        find_engines(cfg)


def check_plan(cfg: EvalConfig, loaded: Loaded) -> None:
    """Raise UserError for a plan that would otherwise fail in the middle of the measurement.

    It covers a sweep or main part with too few prompts, engines that measure none of the drafters,
    verification rules that do not fit a drafter, and schedules that do not fit a drafter, rule or
    batch size. It runs before the run folder is tied to this configuration, so the corrected
    command can use the same folder.
    """
    generations(cfg, loaded)
    plan_engines(cfg, loaded)
    describe_checks(loaded.bench.benchmark.prompts, cfg.benchmark.execute)
    for name, use in loaded.bench.uses.items():
        drafter, rule = loaded.bench.drafters[name], use.verify or cfg.verify
        if use.schedule in SCHEDULES:
            costs = RoundCosts(1.0, (1.0,))  # a placeholder, as costs do not affect the check
            for size in cfg.batch_sizes:
                batch_type(use.schedule, drafter, rule, use.stopping or "fixed", costs, size)
        check_rule(rule, max(cfg.temperatures), drafter.capabilities, name)


def _print_plan(cfg: EvalConfig) -> None:
    """Print the plan of the run; without the target's folder, only what the settings show."""
    within = f", as many of them as fit into {cfg.max_seconds:g} s" if cfg.max_seconds else ""
    labels = ", ".join(condition.label for condition in conditions(cfg))
    if not target_is_here(cfg.target):
        prompts = f"at most {cfg.max_prompts} prompts" if cfg.max_prompts else "all prompts"
        print(
            f"would measure the drafters ({len(cfg.drafters)} given) on {cfg.benchmark.path} "
            f"({prompts}), {cfg.max_new_tokens} tokens each{within}; {labels}"
        )
        _hint_prompts(cfg)
        print(
            f"note: {cfg.target.path} is not there, and measuring needs its weights: which prompts "
            f"fit is not known yet"
        )
        return
    find_engines(cfg)
    loaded = load(cfg)
    check_plan(cfg, loaded)
    target, benchmark = loaded.run, loaded.bench.benchmark
    counts = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in benchmark.counts.items())
    print(f"target: {target.target} ({target.backend}, {target.dtype}, {target.device})")
    print(f"drafters: {', '.join(loaded.facts)}")
    print(f"prompts ({benchmark.name}): {counts}")
    if checks := describe_checks(benchmark.prompts, cfg.benchmark.execute):
        print(f"answers: {checks}")
    _hint_prompts(cfg)
    print(f"draft lengths: {describe_draft_lengths(cfg, loaded)}")
    print(f"conditions: {labels}")
    plan = plan_engines(cfg, loaded)
    if plan.arms:
        print(f"engines: {describe_arms(plan.arms)}")
    for note in plan.not_run:
        print(f"not run by other engines: {note}")
    if OURS not in engine_names(cfg) or not loaded.facts:
        work = f"{len(benchmark.prompts)} prompts in each, {cfg.max_new_tokens} tokens each"
        print(f"would decode {work}, into {cfg.output_dir}")
        return
    print(
        f"would decode {sum(generations(cfg, loaded).values())} batches, at most "
        f"{max_tokens(cfg, loaded)} tokens{within}, into {cfg.output_dir}"
    )


def _hint_prompts(cfg: EvalConfig) -> None:
    """Warn if a custom target is evaluated on the embedded prompts."""
    if cfg.benchmark.path.startswith(EMBEDDED) and not cfg.target.path.startswith(EMBEDDED):
        print(
            f"note: {cfg.benchmark.path} are requests for Python functions. Use prompts of the "
            f"kind that will be served: benchmark=file benchmark.path=PROMPTS.jsonl (of a recipe: "
            f"benchmark_prompts=PROMPTS.jsonl)"
        )


def add_bound(
    rows: Sequence[Row], cfg: EvalConfig, loaded: Loaded, overrun_seconds: float
) -> list[Row]:
    """Return the rows; with max_seconds they also have the prompts requested, in full batches.

    overrun_seconds: see Row.overrun_seconds.
    """
    if not cfg.max_seconds:
        return list(rows)
    asked = dict(zip(("sweep", "main"), map(len, prompts_by_part(cfg, loaded)), strict=True))
    return [
        dataclasses.replace(
            row,
            max_seconds=cfg.max_seconds,
            overrun_seconds=overrun_seconds,
            prompts_asked=asked[row.part] // row.batch_size * row.batch_size,
        )
        for row in rows
    ]


def _summary(rows: Sequence[Row], loaded: Loaded) -> dict[str, Any]:
    """Return the manifest's metrics: speedups of the main rows and prompt counts."""
    speedups = {
        _label(row): [row.speedup, row.speedup_low, row.speedup_high] for row in main_rows(rows)
    }
    return {"speedup": speedups, "prompts": loaded.bench.benchmark.counts}


def _label(row: Row) -> str:
    lossy = f", {LOSSY}" if row.lossless == LOSSY else ""
    return f"{row.drafter}, {row.condition_label}, gamma {row.num_draft_tokens}{lossy}"


def record_rows(
    tracker: Tracker, rows: Sequence[Row], engine_rows: Sequence[EngineRow] = ()
) -> None:
    """Record the main rows' figures by drafter and condition, and all rows as tables."""
    tracker.rewind(-1)  # removes the figures of an earlier report
    figures = {
        f"{name}/{_label(row)}": vars(row)[name] for row in main_rows(rows) for name in TRACKED
    }
    figures |= {
        f"{name}/{row.engine} {row.method} {row.drafter}, {condition_label(row)}": vars(row)[name]
        for row in engine_rows
        for name in ("tokens_per_second", "speedup", "alpha")
    }
    tracker.log(0, {name: value for name, value in figures.items() if value is not None})
    tables = {"rows": list(map(flat, rows)), "engines": list(map(flat, engine_rows))}
    tracker.show({name: table for name, table in tables.items() if table}, [], {})


def _origins(loaded: Loaded, hashes: dict[str, str]) -> dict[str, Origin]:
    """Return the origin of each drafter that has a folder."""
    return {
        name: origin_of(folder, hashes[str(folder)], dtype, loaded.bench.drafters[name])
        for name, (folder, dtype) in loaded.folders.items()
    }


if __name__ == "__main__":
    job_main("eval.run", EvalConfig, run, check_before_loading)

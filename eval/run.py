"""`python -m eval.run drafters=[FOLDER,...]`: measure drafters on prompts on this machine.

The prompts are split in two. The sweep tries every draft length on a few of them, or on those of
another file, and chooses each drafter's best length from its acceptance and costs. The main part
runs the drafters at that length on all other prompts and gives the results. So no draft length is
chosen on the prompts that judge it.
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
from eval.measure.deadline import Deadline
from eval.measure.origins import FILE as ORIGINS
from eval.measure.origins import Origin, origin_of, write_origins
from eval.measure.records import Record
from eval.measure.session import Session, drafting, generations, most_tokens, prompts_by_part
from eval.measure.setup import EMBEDDED, Loaded, check, conditions, load
from eval.report.page import Provenance, evaluation_page
from eval.report.tables import print_evaluation
from eval.report.text import TracedText, traced_texts
from eval.statistics.budgets import with_limits
from eval.statistics.rows import build_rows
from eval.statistics.schema import Row, flat, main_rows, read_rows, write_rows
from jobs.files import write_text
from jobs.job import job_main
from jobs.run_folder import RunFolder
from jobs.tracker import TrackedRun, Tracker
from training.models.build import target_is_here

TRACKED = (
    "speedup",
    "tau",
    "alpha",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "cost_ratio",
)
NOT_MEASURED = (
    "Any machine, dtype, batch size, temperature or prompt that is not named above.",
    "Quality of the target's answers: drafting does not change them.",
)


def run(cfg: EvalConfig, clock: Callable[[], float] = time.monotonic) -> Path:
    """Measure and report; return the run folder with results.jsonl, records and report.html.

    clock: seconds, used for max_seconds alone. Raises UserError for invalid input, and, after the
    report, for an output that differs from the target's.
    """
    check(cfg)
    if not cfg.drafters and cfg.prompt_lookup_control:
        print(
            "no drafters= given: prompt lookup, the control, is all that is measured beside "
            "autoregressive decoding"
        )
    if cfg.dry_run:
        if target_is_here(cfg.target):
            loaded = load(cfg)
            check_plan(cfg, loaded)
            _say_plan(cfg, loaded)
        else:
            _say_intent(cfg)
        return Path(cfg.output_dir)
    folder = RunFolder(cfg)
    results = folder.path / "results.jsonl"
    report = folder.path / "report.html"
    if folder.finished(
        results,
        report,
        also=[folder.path / name for name in ("records.jsonl", "parts.jsonl", ORIGINS)],
    ):
        rows = read_rows(results)
        print(
            f"{folder.path} is finished; nothing is measured again. Delete it, or give another "
            f"output_dir=, to do so."
        )
    else:
        loaded = load(cfg)
        check_plan(cfg, loaded)
        folder.write_manifest(loaded.inputs, {}, finished=False)
        write_origins(folder.path, _origins(loaded, folder.manifest["inputs"]))
        deadline = Deadline(cfg.max_seconds, folder.path, clock)
        shapes = with_limits(loaded.shapes, most_tokens(cfg, loaded), folder.path / "limits.json")
        session = Session(cfg, loaded, folder.path, deadline)
        session.measure()
        rows = build_rows(loaded.run, loaded.facts, session.slices, session.records, shapes)
        rows = with_asked(rows, cfg, loaded)
        write_rows(results, rows)
        made = _provenance(cfg, folder, loaded, rows, session.records)
        write_text(report, evaluation_page(rows, session.records, made))
        # Not before: what a tracker does beside the decoding would be measured too.
        with TrackedRun(folder, cfg, loaded.inputs, is_main=True) as tracker:
            assert tracker is not None, "this is the only process"
            record_rows(tracker, rows)
        folder.write_manifest(loaded.inputs, _summary(rows, loaded), finished=True)
    print_evaluation(rows)
    print(f"\nrows: {results}\nreport: {report}")
    broken = sorted({row.drafter for row in rows if row.lossless == "differs"})
    if broken and cfg.require_lossless:
        raise UserError(
            f"the output with {', '.join(broken)} is not the target's own; the report says where. "
            f"This is a fault of "
            "the decoding, not of the drafter: please report it. require_lossless=false ends "
            "without this error."
        )
    return folder.path


def check_plan(cfg: EvalConfig, loaded: Loaded) -> None:
    """Raise UserError for what would fail only after time was spent.

    This covers parts without prompts and schedules that do not fit a drafter, rule or batch. It
    runs before the run folder is tied to this configuration, so that the corrected command can use
    the same folder.
    """
    generations(cfg, loaded)
    for name, use in loaded.bench.uses.items():
        drafter, rule = loaded.bench.drafters[name], use.verify or cfg.verify
        if use.schedule in SCHEDULES:
            costs = RoundCosts(1.0, (1.0,))  # none are needed to see whether the rest fits
            for size in cfg.batch_sizes:
                batch_type(use.schedule, drafter, rule, use.stopping or "fixed", costs, size)
        check_rule(rule, max(cfg.temperatures), drafter.capabilities, name)


def _say_plan(cfg: EvalConfig, loaded: Loaded) -> None:
    """Print what the run would do and the most tokens it would emit."""
    batches = generations(cfg, loaded)
    drafters = ", ".join(loaded.facts)
    prompts = ", ".join(
        f"{number} {name.replace('_', ' ')}"
        for name, number in loaded.bench.benchmark.counts.items()
    )
    print(
        f"target: {loaded.run.target} ({loaded.run.backend}, {loaded.run.dtype}, "
        f"{loaded.run.device})"
    )
    print(f"drafters: {drafters}")
    print(f"prompts of {loaded.bench.benchmark.name}: {prompts}")
    _hint_prompts(cfg)
    print(f"draft lengths: {_draft_lengths(cfg, loaded)}")
    print(f"conditions: {', '.join(condition.label for condition in conditions(cfg))}")
    print(
        f"would decode {sum(batches.values())} batches, at most {most_tokens(cfg, loaded)} "
        f"tokens{_within(cfg)}, into {cfg.output_dir}"
    )


def _say_intent(cfg: EvalConfig) -> None:
    """Print the plan as far as the configuration gives it, if the target's folder is missing."""
    told = ", ".join(condition.label for condition in conditions(cfg))
    prompts = f"at most {cfg.max_prompts} prompts" if cfg.max_prompts else "all prompts"
    print(
        f"would measure the drafters ({len(cfg.drafters)} given) on {prompts} of "
        f"{cfg.benchmark.path}, {cfg.max_new_tokens} tokens each"
        f"{_within(cfg)}; {told}"
    )
    _hint_prompts(cfg)
    print(
        f"note: {cfg.target.path} is not there, and measuring needs its weights: which prompts fit "
        f"is not known yet"
    )


def _within(cfg: EvalConfig) -> str:
    return f", as many of them as fit into {cfg.max_seconds:g} s" if cfg.max_seconds else ""


def _hint_prompts(cfg: EvalConfig) -> None:
    """Warn if a custom target is evaluated on the embedded prompts."""
    if cfg.benchmark.path.startswith(EMBEDDED) and not cfg.target.path.startswith(EMBEDDED):
        print(
            f"note: {cfg.benchmark.path} are requests for Python functions. Give prompts of the "
            f"kind that will be served: benchmark=file "
            "benchmark.path=PROMPTS.jsonl (of a recipe: benchmark_prompts=PROMPTS.jsonl)"
        )


def with_asked(rows: Sequence[Row], cfg: EvalConfig, loaded: Loaded) -> list[Row]:
    """Add to the rows of a time-bounded run the number of prompts requested, in whole batches."""
    if not cfg.max_seconds:
        return list(rows)
    asked = {
        name: len(prompts)
        for name, prompts in zip(("sweep", "main"), prompts_by_part(cfg, loaded), strict=True)
    }
    return [
        dataclasses.replace(
            row,
            max_seconds=cfg.max_seconds,
            prompts_asked=asked[row.part] // row.batch_size * row.batch_size,
        )
        for row in rows
    ]


def _summary(rows: Sequence[Row], loaded: Loaded) -> dict[str, Any]:
    """Return the manifest's metrics: speedups of the main rows and prompt counts."""
    speedups = {
        _label(row): [row.speedup, row.speedup_low, row.speedup_high]
        for row in main_rows(list(rows))
    }
    return {"speedup": speedups, "prompts": loaded.bench.benchmark.counts}


def _label(row: Row) -> str:
    return f"{row.drafter}, {row.condition_label}, gamma {row.num_draft_tokens}"


def record_rows(tracker: Tracker, rows: Sequence[Row]) -> None:
    """Record the main rows' figures by drafter and condition, and all rows as a table."""
    tracker.rewind(-1)  # of a report that was made before
    figures = {
        f"{name}/{_label(row)}": vars(row)[name]
        for row in main_rows(list(rows))
        for name in TRACKED
    }
    tracker.log(0, {name: value for name, value in figures.items() if value is not None})
    tracker.show({"rows": [flat(row) for row in rows]}, [], {})


def _origins(loaded: Loaded, hashes: dict[str, str]) -> dict[str, Origin]:
    """Return the origin of each drafter that has a folder."""
    return {
        name: origin_of(folder, hashes[str(folder)], dtype)
        for name, (folder, dtype) in loaded.folders.items()
    }


def _provenance(
    cfg: EvalConfig,
    folder: RunFolder,
    loaded: Loaded,
    rows: Sequence[Row],
    records: Sequence[Record],
) -> Provenance:
    manifest = folder.manifest
    versions = {
        name: version for name, version in manifest["versions"].items() if version != "absent"
    }
    missing = list(NOT_MEASURED)
    if all(row.temperature == 0 for row in rows):
        missing.insert(0, "Temperatures above 0.")
    if all(row.temperature > 0 for row in rows):
        missing.insert(0, "Greedy decoding.")
    for name, count in (
        ("too_long", "too long for the context"),
        ("over_limit", "over the limit of max_prompts"),
    ):
        if loaded.bench.benchmark.counts[name]:
            missing.append(f"{loaded.bench.benchmark.counts[name]} prompts: {count}.")
    missing += [text for row in main_rows(list(rows))[:1] if (text := _over_time(row))]
    for batch in {row.batch_size for row in rows}:
        left = sum(len(part) % batch for part in prompts_by_part(cfg, loaded))
        if left:
            missing.append(f"{left} prompts at batch {batch}: they do not fill a batch.")
    return Provenance(
        command=manifest["command"],
        date=manifest["started"].replace("T", " "),
        versions=versions,
        prompt_counts=loaded.bench.benchmark.counts,
        prompt_file=loaded.prompt_file.name,
        revision=manifest["git_revision"],
        unmeasured=missing,
        draft_lengths=_draft_lengths(
            cfg, loaded, len({record.prompt_id for record in records if record.part == "sweep"})
        ),
        repeats=cfg.repeats,
        texts=_texts(cfg, loaded, records),
    )


def _over_time(row: Row) -> str:
    """Describe the prompts that did not fit into max_seconds; empty if all were measured."""
    left = row.prompts_asked - row.prompts
    if left <= 0:
        return ""
    return (
        f"{left} of {row.prompts_asked} prompts: max_seconds={row.max_seconds:g} ended before they "
        f"were measured. "
        "The prompts are measured in an order shuffled by the seed."
    )


def _draft_lengths(cfg: EvalConfig, loaded: Loaded, measured: int | None = None) -> str:
    """Describe how draft lengths are set, and on which prompts.

    measured: number of sweep prompts that were measured, if not all.
    """
    caps: dict[int, list[str]] = {}
    for name, facts in loaded.facts.items():
        if facts.own_cap is not None:
            caps.setdefault(facts.own_cap, []).append(name)
    own = [f"up to {cap} by the stopping rule of {', '.join(names)}" for cap, names in caps.items()]
    return "; ".join([_given_or_swept(cfg, loaded, measured), *own])


def _given_or_swept(cfg: EvalConfig, loaded: Loaded, measured: int | None) -> str:
    lengths = ", ".join(map(str, cfg.num_draft_tokens))
    count = len(prompts_by_part(cfg, loaded)[0])
    if not count:
        return f"given: {lengths}"
    file = Path(cfg.benchmark.sweep_path or loaded.prompt_file).name
    some = f"{measured} of " if measured is not None and measured < count else ""
    swept = f"{some}{count} prompts from all over {file}, none of which is measured"
    return (
        f"given: {lengths}; a sweep on {swept}"
        if lengths
        else f"chosen for each drafter in a sweep on {swept}"
    )


def _texts(cfg: EvalConfig, loaded: Loaded, records: Sequence[Record]) -> list[TracedText]:
    text_of = loaded.bench.settings.text_of
    assert text_of is not None, "eval.measure.setup gives it"
    return traced_texts(records, drafting(loaded), text_of, cfg.show_texts)


if __name__ == "__main__":
    job_main("eval.run", EvalConfig, run, check)

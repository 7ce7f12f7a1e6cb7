"""`python -m eval.run drafters=[FOLDER,...]`: is this drafter worth it, on these prompts and this machine?

Prompts are split in two. On the first few, every draft length of the sweep is tried, and each drafter's best one is
chosen from its acceptance and its costs; on all others the drafters run at that length, and those runs are the result.
So the draft length is never chosen on the prompts that judge it. Part times are measured once, first, and frozen into
the run folder; a run that was interrupted goes on with the next prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from eval.config import EvalConfig
from eval.measure import measure_unit, units_of
from eval.metrics import predicted_speedup
from eval.records import BASELINE, Arm, Condition, Record, append_records, read_records, write_records
from eval.report import Provenance, write_report
from eval.rows import build_rows, pool_of
from eval.schema import Row, read_rows, write_rows
from eval.setup import Loaded, Parts, check, conditions, freeze_parts, load, warm_up
from eval.table import print_table
from eval.words import condition_label, main_rows
from training.data import Prompt
from training.job import job_main
from training.progress import ProgressBar
from training.run_folder import RunFolder

Group = tuple[int, list[Prompt]]  # the number of a unit and its prompts
NOT_MEASURED = (
    "Any machine, dtype, batch size, temperature or prompt that is not named above.",
    "Quality of the target's answers: drafting does not change them.",
)


def run(cfg: EvalConfig) -> Path:
    """Measure and report; returns the run folder with results.jsonl, records.jsonl, parts.json and report.html.

    Raises UserError for input that does not fit, and for an output that is not the target's own (after the report).
    """
    check(cfg)
    if cfg.dry_run:
        _say_plan(cfg, load(cfg))
        return Path(cfg.output_dir)
    folder = RunFolder(cfg)
    results = folder.path / "results.jsonl"
    if folder.finished:
        rows = read_rows(results)
        print(
            f"{folder.path} is finished; nothing is measured again. Delete it, or give another output_dir=, to do so."
        )
    else:
        loaded = load(cfg)
        folder.write_manifest(loaded.inputs, {}, finished=False)
        parts = freeze_parts(folder.path / "parts.json", loaded, cfg)
        records = _measure(cfg, loaded, parts, folder.path / "records.jsonl")
        rows = build_rows(loaded.run, loaded.facts, parts, records)
        write_rows(results, rows)
        folder.write_manifest(loaded.inputs, _summary(rows, loaded), finished=True)
        write_report(folder.path / "report.html", rows, records, _provenance(folder, loaded, rows))
    print_table(rows)
    print(f"\nrows: {results}\nreport: {folder.path / 'report.html'}")
    broken = sorted({row.drafter for row in rows if row.lossless == "differs"})
    if broken and cfg.require_lossless:
        raise UserError(
            f"the output with {', '.join(broken)} is not the target's own; the report says where. This is a fault of "
            "the decoding, not of the drafter: please report it. require_lossless=false ends without this error."
        )
    return folder.path


def _measure(cfg: EvalConfig, loaded: Loaded, parts: Parts, path: Path) -> list[Record]:
    """Sweep, choose, measure, under each condition; what `path` holds already is not measured again."""
    records = read_records(path)
    write_records(path, records)
    warm_up(loaded, cfg)
    with ProgressBar("eval", _generations(cfg, loaded)) as bar:
        progress = _Progress(bar)
        for condition in conditions(cfg):
            sweep, main = _split(cfg, loaded, condition)
            arms = [Arm(name, gamma) for name in loaded.facts for gamma in cfg.sweep]
            _measure_units(loaded, condition, "sweep", sweep, arms, records, path, progress)
            arms = _chosen_arms(cfg, loaded, condition, parts, records)
            _measure_units(loaded, condition, "main", main, arms, records, path, progress)
    return records


def _split(cfg: EvalConfig, loaded: Loaded, condition: Condition) -> tuple[list[Group], list[Group]]:
    """(units of the sweep, units of the main part). Raises UserError when one of them has no prompt."""
    prompts = loaded.bench.benchmark.prompts
    count = cfg.sweep_prompts if cfg.sweep else 0
    sweep = units_of(prompts[:count], condition.batch_size, 0)
    main = units_of(prompts[count:], condition.batch_size, len(sweep))
    if not main or (count and not sweep):
        raise UserError(
            f"{len(prompts)} prompts are too few: {count} go to the sweep over gamma, and each part needs at least one "
            f"batch of {condition.batch_size}. Lower sweep_prompts or batch_sizes, or raise max_prompts."
        )
    return sweep, main


def _measure_units(
    loaded: Loaded,
    condition: Condition,
    part: str,
    units: Sequence[Group],
    arms: Sequence[Arm],
    records: list[Record],
    path: Path,
    progress: _Progress,
) -> None:
    """Measure the units of one part that `records` lacks, append them there and to the file at `path`."""
    for unit, prompts in units:
        have = [record for record in records if (record.condition, record.part, record.unit) == (condition, part, unit)]
        if _complete(have, arms):
            progress.skip(len(arms) + 1)
            continue
        # A unit that a killed run wrote in part is measured again as a whole: its pairs must be neighbours in time.
        if have:
            records[:] = [record for record in records if record not in have]
            write_records(path, records)
        new = measure_unit(loaded.bench, condition, part, unit, prompts, arms, progress.done)
        records += new
        append_records(path, new)


def _complete(have: Sequence[Record], arms: Sequence[Arm]) -> bool:
    counts = {arm: sum(record.arm == arm for record in have) for arm in (BASELINE, *arms)}
    return min(counts.values()) > 0 and len(set(counts.values())) == 1


def _chosen_arms(
    cfg: EvalConfig,
    loaded: Loaded,
    condition: Condition,
    parts: Parts,
    records: Sequence[Record],
) -> list[Arm]:
    """The arms of the main part: the draft lengths asked for, else each drafter's best of the sweep by prediction."""
    if cfg.num_draft_tokens:
        return [Arm(name, gamma) for name in loaded.facts for gamma in cfg.num_draft_tokens]
    arms = []
    for name, facts in loaded.facts.items():
        pool = pool_of(
            name, condition, facts, parts[name, condition.batch_size], [r for r in records if r.part == "sweep"]
        )
        arms.append(Arm(name, max(cfg.sweep, key=lambda gamma: predicted_speedup(pool.pass_rates, gamma, pool.costs))))
    return arms


def _generations(cfg: EvalConfig, loaded: Loaded) -> int:
    """Batches decoded in a whole run, for the progress bar and the dry run."""
    total = 0
    for condition in conditions(cfg):
        sweep, main = _split(cfg, loaded, condition)
        drafters, lengths = len(loaded.facts), max(len(cfg.num_draft_tokens), 1)
        total += len(sweep) * (1 + drafters * len(cfg.sweep)) + len(main) * (1 + drafters * lengths)
    return total


class _Progress:
    """Feeds the bar between generations, outside the clocks."""

    def __init__(self, bar: ProgressBar) -> None:
        self.bar = bar
        self.count, self.tokens, self.seconds = 0, 0, 0.0

    def skip(self, generations: int) -> None:
        self.count += generations
        self.bar.update(self.count, "already measured")

    def done(self, arm: Arm, tokens: int, seconds: float) -> None:
        self.count, self.tokens, self.seconds = self.count + 1, self.tokens + tokens, self.seconds + seconds
        self.bar.update(self.count, f"{self.tokens / self.seconds:.0f} tokens/s, {arm.drafter}")


def _say_plan(cfg: EvalConfig, loaded: Loaded) -> None:
    """What a run would do, and at most how many tokens it would emit."""
    count = _generations(cfg, loaded)
    tokens = count * cfg.max_new_tokens * max(cfg.batch_sizes)
    drafters = ", ".join(loaded.facts)
    prompts = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in loaded.bench.benchmark.counts.items())
    print(f"target: {loaded.run.target} ({loaded.run.backend}, {loaded.run.dtype}, {loaded.run.device})")
    print(f"drafters: {drafters}")
    print(f"prompts of {loaded.bench.benchmark.name}: {prompts}")
    print(f"conditions: {', '.join(condition.label for condition in conditions(cfg))}")
    print(f"would decode {count} batches, at most {tokens} tokens, into {cfg.output_dir}")


def _summary(rows: Sequence[Row], loaded: Loaded) -> dict[str, Any]:
    """The manifest's metrics: the main rows' speedups, and the prompts' counts."""
    speedups = {
        f"{row.drafter}, {condition_label(row)}, gamma {row.num_draft_tokens}": [
            row.speedup,
            row.speedup_low,
            row.speedup_high,
        ]
        for row in main_rows(list(rows))
    }
    return {"speedup": speedups, "prompts": loaded.bench.benchmark.counts}


def _provenance(folder: RunFolder, loaded: Loaded, rows: Sequence[Row]) -> Provenance:
    manifest = folder.manifest
    versions = {name: version for name, version in manifest["versions"].items() if version != "absent"}
    missing = list(NOT_MEASURED)
    if all(row.temperature == 0 for row in rows):
        missing.insert(0, "Temperatures above 0.")
    if all(row.temperature > 0 for row in rows):
        missing.insert(0, "Greedy decoding.")
    for name, count in (("too_long", "too long for the context"), ("over_limit", "over the limit of max_prompts")):
        if loaded.bench.benchmark.counts[name]:
            missing.append(f"{loaded.bench.benchmark.counts[name]} prompts: {count}.")
    return Provenance(
        command=manifest["command"],
        date=manifest["started"].replace("T", " "),
        versions=versions,
        prompt_counts=loaded.bench.benchmark.counts,
        prompt_file=loaded.prompt_file.name,
        revision=manifest["git_revision"],
        unmeasured=missing,
    )


if __name__ == "__main__":
    job_main("eval.run", EvalConfig, run)

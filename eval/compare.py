"""`python -m eval.compare runs=[RUN,...]`: any number of evaluated drafters in one report.

It reads finished runs of eval.run and measures nothing. Rows with the same target, machine, backend
and workload form a panel, which shows speedup against depth, acceptance against cost, the Pareto
front and a table of all its rows. Runs are compared by their speedups over their own baselines.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from eval.config import CompareConfig
from eval.report.comparison_plots import panel_plots, styles_of_entries
from eval.report.engines_compared import (
    compared_engine_notes,
    compared_engine_tables,
    compared_engine_warnings,
)
from eval.report.page import Provenance, comparison_page
from eval.report.plots import Plot
from eval.report.terminal import print_comparison
from eval.statistics.comparison.entries import ALL, HEADLINE, entries_of
from eval.statistics.comparison.evaluations import Evaluation, find_runs, labels_of, read_evaluation
from eval.statistics.comparison.panels import ComparedEntry, Panel, panels_of
from eval.statistics.comparison.series import with_series
from eval.statistics.metrics import interval_fields
from eval.statistics.schema import flat
from jobs.files import write_text
from jobs.job import job_main
from jobs.run_folder import RunFolder
from jobs.tracker import Chart, Tracker, track_run

READ = ("results.jsonl", "records.jsonl")  # of every run


def run(cfg: CompareConfig) -> Path:
    """Compare finished runs and report; return the folder with comparison.jsonl and the page.

    A dry run prints the plan and writes nothing. Raises UserError for invalid settings, for runs
    that are missing, unfinished, damaged or not of eval.run, and for labels and group_by fields
    that match no drafter.
    """
    check(cfg)
    if cfg.dry_run:
        _print_plan(cfg)
        return Path(cfg.output_dir)
    folders = find_runs(cfg.runs)
    labels = labels_of(folders)
    evaluations = [read_evaluation(*each) for each in zip(folders, labels, strict=True)]
    entries = with_series(entries_of(evaluations, cfg.prompts), cfg.labels or {}, cfg.group_by)
    panels = panels_of(entries, cfg.bootstrap_resamples, cfg.seed)
    folder = RunFolder(cfg)
    rows, report = folder.path / "comparison.jsonl", folder.path / "comparison.html"
    inputs = [one / name for one in folders for name in READ]
    # A glob may find more runs than before, and the comparison is made again.
    if folder.finished(rows, report) and list(folder.manifest["inputs"]) == [*map(str, inputs)]:
        print(
            f"{folder.path} is finished and its runs are the same; nothing is made again. Delete "
            f"it to compare them again."
        )
    else:
        tracker_cfg = dataclasses.replace(cfg.tracker, group=group_of(cfg, evaluations))
        tracked = dataclasses.replace(cfg, tracker=tracker_cfg)
        with track_run(folder, tracked, inputs) as tracker:
            _write(folder, panels, evaluations, tracker)
        folder.write_manifest(inputs, _summary(panels), finished=True)
    print_comparison(
        panels,
        evaluations,
        of_engines=compared_engine_tables(evaluations),
        engine_warnings=compared_engine_warnings(evaluations),
        engine_notes=compared_engine_notes(evaluations),
    )
    print(f"\nrows: {rows}\nreport: {report}")
    return folder.path


def check(cfg: CompareConfig) -> None:
    """Raise UserError for empty runs=, unknown prompts= or fewer than one bootstrap resample."""
    if cfg.prompts not in (HEADLINE, ALL):
        raise UserError(f"prompts={cfg.prompts} is unknown, expected {HEADLINE} or {ALL}.")
    if cfg.bootstrap_resamples < 1:
        raise UserError(f"bootstrap_resamples is {cfg.bootstrap_resamples}, expected 1 or more.")
    if not cfg.runs:
        find_runs([])  # raises the error


def _print_plan(cfg: CompareConfig) -> None:
    """Print the runs that would be read.

    Runs that cannot be read are printed too: in the dry run of an experiment none exists yet.
    """
    for pattern in cfg.runs:
        try:
            for folder in find_runs([pattern]):
                rows = read_evaluation(folder, folder.name).rows
                drafters = ", ".join(dict.fromkeys(row.drafter for row in rows))
                conditions = ", ".join(dict.fromkeys(row.condition_label for row in rows))
                print(
                    f"would read {folder}: {len(rows)} rows; {drafters}; {rows[0].benchmark}, "
                    f"{conditions}"
                )
        except UserError as error:
            print(f"not there yet: {error}")
    print(f"would write comparison.jsonl, comparison.html and plots/*.png into {cfg.output_dir}")


def group_of(cfg: CompareConfig, evaluations: Sequence[Evaluation]) -> str:
    """Return the Weights & Biases group of the comparison.

    This is tracker.group if it is set. Otherwise it is the one experiment of the runs (`default`
    does not count), or the comparison's own experiment if they have several or none.
    """
    experiments = {str(one.config["experiment"]) for one in evaluations} - {"default"}
    return cfg.tracker.group or (experiments.pop() if len(experiments) == 1 else cfg.experiment)


def _write(
    folder: RunFolder, panels: Sequence[Panel], evaluations: Sequence[Evaluation], tracker: Tracker
) -> None:
    records = [record_of(panel, compared) for panel in panels for compared in panel.compared]
    lines = (json.dumps(record) + "\n" for record in records)
    write_text(folder.path / "comparison.jsonl", "".join(lines))
    styles = styles_of_entries([entry for panel in panels for entry in panel.entries])
    plots = [panel_plots(panel, styles) for panel in panels]
    images = _save(folder.path / "plots", [plot for drawn in plots for plot in drawn])
    manifest = folder.manifest
    started = manifest["started"].replace("T", " ")
    made = Provenance(manifest["command"], started, manifest["git_revision"])
    write_text(folder.path / "comparison.html", comparison_page(panels, plots, evaluations, made))
    tracker.rewind(-1)  # removes the figures of an earlier comparison
    figures = {}
    for panel in panels:
        for entry in panel.fastest:
            figures[f"speedup/{panel.label}/{entry.name}"] = entry.ranked_speedup.value
            figures[f"tokens_per_second/{panel.label}/{entry.name}"] = entry.row.tokens_per_second
    tracker.log(0, figures)
    tables = {"comparison": [flat(record) for record in records]}
    tracker.show(tables, _charts(panels), {f"plots/{name}": file for name, file in images.items()})


def record_of(panel: Panel, compared: ComparedEntry) -> dict[str, Any]:
    """Return a line of comparison.jsonl: the row of results.jsonl and the comparison's findings."""
    entry = compared.entry
    return {
        "condition": panel.label,
        "run": entry.run,
        "run_folder": entry.folder,
        "name": entry.name,
        "series": entry.series,
        "bytes_per_step": entry.bytes_per_step,
        "training_tokens": entry.training_tokens,
        "counted_prompts": entry.prompts,
        "counted_alpha": entry.alpha,
        **interval_fields("counted_speedup", entry.speedup),
        "not_ranked": entry.not_ranked,
        "drafts_nothing": entry.idle,
        "pareto_parameters": compared.on_front.get("parameters"),
        "pareto_training_tokens": compared.on_front.get("training_tokens"),
        "rival": compared.rival.name if compared.rival else None,
        **interval_fields("over_rival", compared.ratio),
        "shared_prompts": compared.shared,
        "target_hash": entry.setting.target_hash,
        "prompts_hash": entry.workload.prompts_hash,
        "execution": entry.setting.execution,
        **dataclasses.asdict(entry.row),
    }


def _save(folder: Path, plots: Sequence[Plot]) -> dict[str, Path]:
    """Write the plots as PNG files and delete an earlier comparison's; return name -> file."""
    folder.mkdir(exist_ok=True)
    for left in folder.glob("*.png"):
        left.unlink()
    files = {plot.name: folder / f"{plot.name}.png" for plot in plots}
    for plot in plots:
        files[plot.name].write_bytes(plot.png)
    return files


def _charts(panels: Sequence[Panel]) -> list[Chart]:
    """Return scatter charts of each panel: speedup and tokens/s over depth, alpha over cost.

    Tokens/s of different runs are not comparable; speedups are.
    """
    charts = []
    for panel in panels:
        rows = [
            {
                "drafter": entry.name,
                "series": entry.series,
                "layers": entry.row.drafter_layers,
                "speedup": entry.ranked_speedup.value,
                "tokens_per_second": entry.row.tokens_per_second,
                "cost_ratio": entry.row.cost_ratio,
                "alpha": entry.alpha,
            }
            for entry in panel.fastest
        ]
        for name, title, x, y in (
            ("depth", "Depth against speedup", "layers", "speedup"),
            ("throughput", "Depth against tokens/s", "layers", "tokens_per_second"),
            ("acceptance", "Acceptance against cost", "cost_ratio", "alpha"),
        ):
            known = [row for row in rows if row[y] is not None]
            if known:
                title = f"{title}: {panel.label}"
                charts.append(Chart(f"charts/{name}_{panel.slug}", title, known, x, y))
    return charts


def _summary(panels: Sequence[Panel]) -> dict[str, Any]:
    """Return the manifest's metrics: the best drafter of each panel, and its speedup."""
    best = {panel.label: panel.fastest[0] for panel in panels if panel.fastest}
    return {
        label: {"best": entry.name, "speedup": dataclasses.astuple(entry.ranked_speedup)}
        for label, entry in best.items()
    }


if __name__ == "__main__":
    job_main("eval.compare", CompareConfig, run)

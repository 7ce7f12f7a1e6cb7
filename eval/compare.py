"""`python -m eval.compare runs=[RUN,...]`: any number of evaluated drafters in one report.

It reads finished runs of eval.run and measures nothing. Per benchmark, batch and temperature: depth
against throughput, acceptance against cost, the Pareto front, and a table of all rows. Speeds of
different runs meet only as ratios to the baseline of their own run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from eval.config import CompareConfig
from eval.report.compare.comparison import Panel, Standing, chains, panels_of
from eval.report.compare.entries import ALL, HEADLINE, Entry, entries_of
from eval.report.compare.evaluations import Evaluation, find_runs, labels_of, read_evaluation
from eval.report.compare.page import Making, Plot, page
from eval.report.compare.palette import Look, Paint, looks, paints
from eval.report.compare.plots import acceptance, depth, pareto
from eval.report.compare.series import with_series
from eval.report.compare.table import print_comparison
from eval.report.words import condition_label
from eval.statistics.schema import flat
from jobs.files import write_text
from jobs.job import job_main
from jobs.run_folder import RunFolder
from jobs.tracker import Chart, TrackedRun, Tracker

READ = ("results.jsonl", "records.jsonl")  # of every run


def run(cfg: CompareConfig) -> Path:
    """Compare and report; returns the run folder with comparison.jsonl, comparison.html and plots/.

    Raises UserError for runs that are missing, unfinished or no evaluations, and for labels and
    fields that name nothing.
    """
    check(cfg)
    if cfg.dry_run:
        _say_plan(cfg)
        return Path(cfg.output_dir)
    folders = find_runs(cfg.runs)
    evaluations = [
        read_evaluation(folder, label)
        for folder, label in zip(folders, labels_of(folders), strict=True)
    ]
    entries = with_series(entries_of(evaluations, cfg.prompts), cfg.labels or {}, cfg.group_by)
    panels = panels_of(entries, cfg.bootstrap_resamples, cfg.seed)
    folder = RunFolder(cfg)
    rows, report = folder.path / "comparison.jsonl", folder.path / "comparison.html"
    inputs = [one / name for one in folders for name in READ]
    # A glob may find more runs than it did: then the comparison is another one.
    if folder.finished(rows, report) and list(folder.manifest["inputs"]) == [
        str(path) for path in inputs
    ]:
        print(
            f"{folder.path} is finished and its runs are the same; nothing is made again. Delete "
            f"it to do so."
        )
    else:
        tracked = dataclasses.replace(
            cfg, tracker=dataclasses.replace(cfg.tracker, group=group_of(cfg, evaluations))
        )
        with TrackedRun(folder, tracked, inputs, is_main=True) as tracker:
            assert tracker is not None, "this is the only process"
            _write(folder, panels, evaluations, tracker)
        folder.write_manifest(inputs, _summary(panels), finished=True)
    print_comparison(panels, evaluations)
    print(f"\nrows: {rows}\nreport: {report}")
    return folder.path


def check(cfg: CompareConfig) -> None:
    """Raise UserError for settings that nothing can be compared by."""
    if cfg.prompts not in (HEADLINE, ALL):
        raise UserError(f"prompts={cfg.prompts} is unknown, expected {HEADLINE} or {ALL}")
    if cfg.bootstrap_resamples < 1:
        raise UserError(f"bootstrap_resamples is {cfg.bootstrap_resamples}, expected 1 or more")
    if not cfg.runs:
        find_runs([])  # says what to give


def _say_plan(cfg: CompareConfig) -> None:
    """What would be read. Runs that are not there yet, as in the dry run of an experiment's stages,
    are told and no error.
    """
    for pattern in cfg.runs:
        try:
            for folder in find_runs([pattern]):
                rows = read_evaluation(folder, folder.name).rows
                drafters = ", ".join(dict.fromkeys(row.drafter for row in rows))
                conditions = ", ".join(dict.fromkeys(condition_label(row) for row in rows))
                print(
                    f"would read {folder}: {len(rows)} rows; {drafters}; {rows[0].benchmark}, "
                    f"{conditions}"
                )
        except UserError as error:
            print(f"not there yet: {error}")
    print(f"would write comparison.jsonl, comparison.html and plots/*.png into {cfg.output_dir}")


def group_of(cfg: CompareConfig, evaluations: Sequence[Evaluation]) -> str:
    """The Weights & Biases group: the one given, else the experiment that all runs share, which is
    a sweep's group too, else this experiment.
    """
    experiments = {str(one.config["experiment"]) for one in evaluations} - {"default"}
    return cfg.tracker.group or (experiments.pop() if len(experiments) == 1 else cfg.experiment)


def _write(
    folder: RunFolder, panels: Sequence[Panel], evaluations: Sequence[Evaluation], tracker: Tracker
) -> None:
    records = [record_of(panel, standing) for panel in panels for standing in panel.standings]
    write_text(
        folder.path / "comparison.jsonl", "".join(json.dumps(record) + "\n" for record in records)
    )
    look = looks([entry for panel in panels for entry in panel.entries])
    plots = [_plots(panel, look) for panel in panels]
    images = _save(folder.path / "plots", [plot for drawn in plots for plot in drawn])
    manifest = folder.manifest
    making = Making(
        manifest["command"], manifest["started"].replace("T", " "), manifest["git_revision"]
    )
    write_text(folder.path / "comparison.html", page(panels, plots, evaluations, making))
    tracker.rewind(-1)  # of a comparison that was made before
    figures = {}
    for panel in panels:
        for entry in panel.fastest:
            figures[f"speedup/{panel.label}/{entry.name}"] = _speed(entry)
            figures[f"tokens_per_second/{panel.label}/{entry.name}"] = entry.row.tokens_per_second
    tracker.log(0, figures)
    tracker.show(
        {"comparison": [flat(record) for record in records]},
        _charts(panels),
        {f"plots/{name}": file for name, file in images.items()},
    )


def record_of(panel: Panel, standing: Standing) -> dict[str, Any]:
    """A line of comparison.jsonl: the row of results.jsonl, and what the comparison
    found about it.
    """
    entry, ratio = standing.entry, standing.ratio
    speedup = entry.speedup
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
        "counted_speedup": speedup.value if speedup else None,
        "counted_speedup_low": speedup.low if speedup else None,
        "counted_speedup_high": speedup.high if speedup else None,
        "not_ranked": entry.not_ranked,
        "drafts_nothing": entry.idle,
        "pareto_parameters": standing.on_front.get("parameters"),
        "pareto_training_tokens": standing.on_front.get("training_tokens"),
        "rival": standing.rival.name if standing.rival else None,
        "over_rival": ratio.value if ratio else None,
        "over_rival_low": ratio.low if ratio else None,
        "over_rival_high": ratio.high if ratio else None,
        "shared_prompts": standing.shared,
        "target_hash": entry.setting.target_hash,
        "prompts_hash": entry.workload.prompts_hash,
        "execution": entry.setting.execution,
        **dataclasses.asdict(entry.row),
    }


def _plots(panel: Panel, look: dict[str, Look]) -> list[Plot]:
    """The plots of a panel, each where there is something to draw."""
    if not panel.fastest:
        return []
    drawn: dict[str, tuple[Callable[[Paint], bytes], str]] = {
        "depth": (
            lambda paint: depth(panel, look, paint),
            "Drafter depth against speedup, with 95 % intervals; each at its fastest draft length; "
            "hollow where it drafts nothing, at plain decoding's speed. Dashed: the control, in a "
            "band over the runs.",
        )
    }
    if any(entry.alpha is not None for entry in chains(panel)):
        drawn["acceptance"] = (
            lambda paint: acceptance(panel, look, paint),
            "Acceptance against cost. On a curve the closed form gives that speedup at the best "
            "gamma, with V and overheads as measured (medians); the points are what was measured. "
            "Drafters without a model, those that drafted nothing and overlapped schedules have no "
            "place here.",
        )
    drawn["pareto"] = (
        lambda paint: pareto(panel, "parameters", look, paint),
        "Pareto front: filled where no drafter with as few parameters is faster, else hollow. The "
        "control has no parameters.",
    )
    if len({entry.training_tokens for entry in panel.fastest if entry.training_tokens}) > 1:
        drawn["training"] = (
            lambda paint: pareto(panel, "training_tokens", look, paint),
            "Pareto front over the tokens that drafters were distilled on; those whose cards do "
            "not say are left out.",
        )
    themes = paints()
    return [
        Plot(f"{kind}_{panel.slug}", caption, draw(themes["light"]), draw(themes["dark"]))
        for kind, (draw, caption) in drawn.items()
    ]


def _save(folder: Path, plots: Sequence[Plot]) -> dict[str, Path]:
    """Write the light PNGs in place of those of an earlier comparison; returns name -> file."""
    folder.mkdir(exist_ok=True)
    for left in folder.glob("*.png"):
        left.unlink()
    files = {plot.name: folder / f"{plot.name}.png" for plot in plots}
    for plot in plots:
        files[plot.name].write_bytes(plot.light)
    return files


def _charts(panels: Sequence[Panel]) -> list[Chart]:
    """Scatter charts of each panel: depth against speedup and against tokens/s, cost ratio against
    acceptance.

    Tokens/s are each run's own, measured at its own time; speedups are what rows of several runs
    are compared by.
    """
    charts = []
    for panel in panels:
        rows = [
            {
                "drafter": entry.name,
                "series": entry.series,
                "layers": entry.row.drafter_layers,
                "speedup": _speed(entry),
                "tokens_per_second": entry.row.tokens_per_second,
                "cost_ratio": entry.row.cost_ratio,
                "alpha": entry.alpha,
            }
            for entry in panel.fastest
        ]
        known = [row for row in rows if row["alpha"] is not None]
        charts += [
            Chart(
                f"charts/depth_{panel.slug}",
                f"Depth against speedup: {panel.label}",
                rows,
                "layers",
                "speedup",
            ),
            Chart(
                f"charts/throughput_{panel.slug}",
                f"Depth against tokens/s: {panel.label}",
                rows,
                "layers",
                "tokens_per_second",
            ),
            Chart(
                f"charts/acceptance_{panel.slug}",
                f"Acceptance against cost: {panel.label}",
                known,
                "cost_ratio",
                "alpha",
            ),
        ]
    return [chart for chart in charts if chart.rows]


def _summary(panels: Sequence[Panel]) -> dict[str, Any]:
    """The manifest's metrics: the best drafter of each panel."""
    return {
        panel.label: {
            "best": panel.fastest[0].name,
            "speedup": dataclasses.astuple(panel.fastest[0].speedup),
        }
        for panel in panels
        if panel.fastest and panel.fastest[0].speedup
    }


def _speed(entry: Entry) -> float:
    assert entry.speedup is not None, "of ranked entries alone"
    return entry.speedup.value


if __name__ == "__main__":
    job_main("eval.compare", CompareConfig, run)

"""report.html and comparison.html: self-contained pages without scripts, fonts or addresses.

Both extend templates/page.html.j2 and are made from the files of run folders alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from decoding.rounds.stats import LOOPING_BELOW
from decoding.schedules.by_name import VIRTUAL
from eval.measure.records import STALL, Record
from eval.report import (
    comparison_tables,
    engines,
    engines_compared,
    evaluation_plots,
    evaluation_tables,
    plots,
    text,
)
from eval.report.tables import WORDS, by_setting, used_words
from eval.statistics.comparison.entries import ALL, counted_speedup
from eval.statistics.comparison.evaluations import Evaluation
from eval.statistics.comparison.panels import Panel
from eval.statistics.engine_row import EngineRow
from eval.statistics.lossless import LOSSY
from eval.statistics.metrics import MIN_PROMPTS
from eval.statistics.rows import samples_of
from eval.statistics.schema import Row, main_rows
from jobs.drafter_use import ALONE
from jobs.drafters import CONTROL
from jobs.malloc import without_collector

PAGES = Environment(
    loader=PackageLoader("eval.report"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
PAGES.filters |= {
    one.__name__: one
    for one in (*(text.amount, text.count_label, text.gamma_label, text.number), text.prompts_label)
}
PAGES.filters["with_interval"] = text.with_interval
PAGES.filters["breakable"] = lambda words: Markup(re.sub("([/_:])", r"\1<wbr>", str(escape(words))))
PAGES.globals |= {"evaluation_tables": evaluation_tables, "comparison_tables": comparison_tables}
PAGES.globals |= {"words": text, "used_words": used_words, "WORDS": WORDS}
PAGES.globals |= {"by_setting": by_setting}
PAGES.globals |= {"LOOPING_BELOW": LOOPING_BELOW, "STALL": STALL, "MIN_PROMPTS": MIN_PROMPTS}


@dataclass(frozen=True)
class Provenance:
    """Facts on how the numbers were obtained, shown at the end of the page."""

    command: str
    date: str
    revision: str
    versions: dict[str, str] = field(default_factory=dict)
    prompt_counts: dict[str, int] = field(default_factory=dict)  # see eval.measure.benchmarks
    prompt_file: str = ""
    prompt_notes: list[str] = field(default_factory=list)  # on the form of the prompts
    raw_data: dict[str, str] = field(default_factory=dict)  # file -> what a line of it is
    unmeasured: list[str] = field(default_factory=list)  # sentences
    draft_lengths: str = "given"  # how they were set
    repeats: int = 1  # of every generation
    texts: list[text.TracedText] = field(default_factory=list)


@without_collector()
def evaluation_page(
    rows: list[Row],
    records: Sequence[Record],
    made: Provenance,
    engine_rows: Sequence[EngineRow] = (),
    not_run: Sequence[str] = (),
) -> str:
    """Return the content of report.html.

    rows: of both parts, the sweep and the main part. not_run: what other engines do not run.
    """
    shown = main_rows(rows)
    return PAGES.get_template("evaluation.html.j2").render(
        title=f"Speculative decoding of {shown[0].target}",
        warnings=[*text.warnings(shown), *engines.engine_warnings(engine_rows)],
        engine_tables=engines.engine_tables(engine_rows),
        engine_versions=engines.versions_note(engine_rows, made.versions),
        not_run=not_run,
        cards=_cards(shown),
        rows=shown,
        first=shown[0],
        named=[(text.drafter_name(row), row) for row in shown],
        pairs=evaluation_tables.pairs_table(shown, records),
        plots=_plots(rows, shown, records),
        made=made,
        stalls=len({(r.condition, r.part, r.unit) for r in records if r.attempt > 1}),
    )


def engines_page(rows: Sequence[EngineRow], not_run: Sequence[str], made: Provenance) -> str:
    """Return the content of report.html of a run that measures engines alone."""
    return PAGES.get_template("engines.html.j2").render(
        title=f"{rows[0].target} in other engines",
        warnings=engines.engine_warnings(rows),
        cards=[],
        first=rows[0],
        engine_tables=engines.engine_tables(rows),
        engine_versions=engines.versions_note(rows, made.versions),
        not_run=not_run,
        made=made,
    )


def comparison_page(
    panels: Sequence[Panel],
    plots_by_panel: Sequence[Sequence[plots.Plot]],
    evaluations: Sequence[Evaluation],
    made: Provenance,
) -> str:
    """Return the content of comparison.html."""
    entries = [entry for panel in panels for entry in panel.entries]
    targets = dict.fromkeys(panel.setting.target for panel in panels)
    threads = [text.count_label(one.rows[0].threads, "thread") for one in evaluations]
    shown = [
        table
        for panel in panels
        for table in (
            comparison_tables.seeds_table(panel),
            *comparison_tables.panel_tables(panel),
        )
        if table.rows
    ]
    return PAGES.get_template("comparison.html.j2").render(
        title=f"Drafters compared: {', '.join(targets)}",
        warnings=[
            *comparison_tables.comparison_warnings(evaluations),
            *engines_compared.compared_engine_warnings(evaluations),
        ],
        engine_tables=engines_compared.compared_engine_tables(evaluations),
        engine_notes=engines_compared.compared_engine_notes(evaluations),
        cards=[_panel_card(panel) for panel in panels],
        drafters=len({entry.plotted for entry in entries if entry.row.drafter != CONTROL}),
        machines=dict.fromkeys(
            f"{one.rows[0].hardware} with {label}, {one.rows[0].dtype}"
            for one, label in zip(evaluations, threads, strict=True)
        ),
        evaluations=evaluations,
        differences=comparison_tables.differences_table(panels, evaluations),
        notes=comparison_tables.comparison_notes(evaluations),
        panels=list(zip(panels, plots_by_panel, strict=True)),
        legend=used_words(text.COMPARISON_LEGEND, shown),
        everything=entries[0].prompts == ALL,
        made=made,
    )


def _cards(shown: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a headline card for the best row under each condition, measured on a wall clock.

    Lossy rows have none. Drafters without a model count only if there is no other. If the prompts
    that do not loop are too few for an interval, the best row on all prompts is named without a
    headline figure.
    """
    lossless = [row for row in shown if row.lossless != LOSSY]
    ranked = [row for row in lossless if row.schedule not in (ALONE, *VIRTUAL)]
    models = [row for row in ranked if row.drafter_parameters] or ranked
    cards = []
    for label, rivals in evaluation_tables.by_condition(models).items():
        everything = all(row.headline_prompts < MIN_PROMPTS for row in rivals)
        speeds = [counted_speedup(row, everything) for row in rivals]
        best, _ = max(
            zip(rivals, speeds, strict=True), key=lambda one: one[1].value if one[1] else 0.0
        )
        group = [row for row in ranked if row.condition_label == label]
        card = _card(label, text.drafter_label(best), best, len(rivals), group, everything)
        card["few"] |= everything
        cards.append(card)
    return cards


def _panel_card(panel: Panel) -> dict[str, Any]:
    models = [one for one in panel.fastest if one.row.drafter_parameters] or panel.fastest
    if not models:
        return {"label": panel.label, "row": None, "speed": None}
    best, group = models[0], [one.row for one in panel.fastest]
    size = f" ({text.model_size(best.row)})" if best.row.drafter_parameters else ""
    name = comparison_tables.entry_name(best) + size
    return _card(panel.label, name, best.row, len(models), group, best.prompts == ALL)


def _card(
    label: str, name: str, row: Row, rivals: int, group: Sequence[Row], everything: bool = False
) -> dict[str, Any]:
    """Return the values of a headline card for the best row of a group.

    rivals: number of rows that it was chosen from. everything: whether looping prompts count.
    """
    speed, tone = counted_speedup(row, everything), ""
    controls = [one for one in group if one.drafter == CONTROL and one is not row]
    if speed and speed.low is not None and speed.high is not None:
        tone = "good" if speed.low > 1 else "bad" if speed.high < 1 else ""
    control = counted_speedup(controls[0], everything) if controls else None
    if tone == "good" and control and speed and control.value >= speed.value:
        tone = ""  # what needs no training is as fast
    return {
        **{"label": label, "name": name, "row": row, "rivals": rivals},
        **{"speed": speed, "tone": tone, "everything": everything},
        "unreliable": _unreliable(group),
        "few": speed is not None and speed.low is None,  # too few prompts for a headline
        "alpha": row.alpha if everything else row.headline_alpha,
        "tau": row.tau if everything else row.headline_tau,
        "control": control,
    }


def _unreliable(rows: Sequence[Row]) -> str:
    """Return why the speedups of rows are unreliable, as a clause; empty if they are not."""
    if text.sharing(rows):
        return "processes of this run shared a device"
    return "the machine was busy" if text.disturbance(rows) else ""


def _plots(
    rows: Sequence[Row], shown: Sequence[Row], records: Sequence[Record]
) -> list[plots.Plot]:
    """Return the plots of every condition; lossy rows are in none."""
    rows = [row for row in rows if row.lossless != LOSSY]
    styles, drawn = plots.drafter_styles({row.drafter: "" for row in rows}), []
    for label, here in evaluation_tables.by_condition(rows).items():
        main = [row for row in here if row in shown]
        best = {row.drafter: row for row in sorted(main, key=lambda row: row.speedup)}
        fastest = [best[name] for name in dict.fromkeys(row.drafter for row in main)]
        pairs = {row.drafter: samples_of(row, records) for row in fastest}
        swept = [row for row in here if row.part == "sweep"] or here
        drawn.append(evaluation_plots.speedup_by_gamma(swept, styles, label))
        if len({row.drafter_layers for row in fastest} - {0}) > 1:
            drawn.append(evaluation_plots.throughput_by_depth(fastest, styles, label))
        drawn += [
            evaluation_plots.alpha_by_depth(here, styles, label),
            evaluation_plots.time_of_a_round(fastest, label),
            evaluation_plots.speed_by_prompt(pairs, styles, label),
        ]
    return drawn

"""comparison.html: one page with every evaluated drafter on it. The plots are inside it, as data;
nothing is fetched.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from eval.report.compare.comparison import Panel
from eval.report.compare.entries import Entry
from eval.report.compare.evaluations import Evaluation
from eval.report.compare.words import (
    DEFINITIONS,
    IDLE,
    best_sentence,
    busy,
    cautions,
    cells,
    drafter_label,
    heading,
    headline_note,
    kept_apart,
    losses,
    prompts_label,
    terms,
)
from eval.report.markup import bullets, definitions, document, figure, section, table, tr, warned
from eval.report.run_page import words
from jobs.drafters import CONTROL

# Columns of the first table; the second has the others, by which the outcome is understood.
OUTCOME = [
    "drafter",
    "layers",
    "parameters",
    "speedup [95 %]",
    "not looping",
    "over the best",
    "front",
    "tokens/s",
    "alone",
    "output",
]
UNMEASURED = (
    "Any machine, dtype, batch size, temperature or prompt that is not named above.",
    "One drafter's speed against another's where they ran at different times: what is compared is "
    "each one's ratio to its own run's baseline.",
)


@dataclass(frozen=True)
class Plot:
    """A plot in both themes."""

    name: str  # of its file, without .png
    caption: str
    light: bytes  # PNG files
    dark: bytes


@dataclass(frozen=True)
class Making:
    """How the comparison came about; shown at the end of the page."""

    command: str
    date: str
    revision: str


def page(
    panels: Sequence[Panel],
    plots: Sequence[Sequence[Plot]],
    evaluations: Sequence[Evaluation],
    making: Making,
) -> str:
    """The whole page as HTML; plots: those of each panel."""
    title = "Drafters compared: " + ", ".join(
        dict.fromkeys(panel.setting.target for panel in panels)
    )
    return document(
        title,
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="lead">{escape(_lead(panels, evaluations))}</p>',
            warned(busy(evaluations)),
            f'<div class="headlines">{"".join(_headline(panel) for panel in panels)}</div>',
            section("What is best where", bullets([best_sentence(panel) for panel in panels])),
            section(
                "What is not compared, and what to bear in mind",
                bullets([*kept_apart(panels), *cautions(panels, evaluations)]),
            ),
            *(_panel(panel, drawn) for panel, drawn in zip(panels, plots, strict=True)),
            section("What the words mean", definitions(DEFINITIONS)),
            section("How it was measured", _provenance(evaluations, making)),
            section("What was not measured", bullets(UNMEASURED)),
        ],
    )


def _lead(panels: Sequence[Panel], evaluations: Sequence[Evaluation]) -> str:
    names = {
        entry.name for panel in panels for entry in panel.entries if entry.row.drafter != CONTROL
    }
    drafters = "1 drafter" if len(names) == 1 else f"{len(names)} drafters"
    runs = "1 evaluation" if len(evaluations) == 1 else f"{len(evaluations)} evaluations"
    machines = ", ".join(
        dict.fromkeys(
            f"{one.rows[0].hardware} with {words.threads(one.rows[0])}, {one.rows[0].dtype}"
            for one in evaluations
        )
    )
    return (
        f"{drafters} from {runs} on {machines}, and prompt lookup as the control. Every speedup is "
        f"over autoregressive decoding that was interleaved with it in its own run."
    )


def _headline(panel: Panel) -> str:
    """The best model of a panel, with the control beside it."""
    models = [entry for entry in panel.fastest if entry.row.drafter_parameters] or panel.fastest
    head = f'<div class="headline"><h3>{escape(panel.label)}</h3>'
    if not models:
        return f"{head}<p>Nothing to rank.</p></div>"
    if models[0].idle:
        return (
            f"{head}<p>Every drafter {IDLE}: the rule that ends drafts found that none pays "
            f"here.</p></div>"
        )
    best, control = models[0], [entry for entry in panel.fastest if entry.row.drafter == CONTROL]
    speed = best.speedup
    assert speed is not None, "of ranked entries alone"
    spread, tone = "95 % interval: needs more prompts", ""
    if speed.low is not None and speed.high is not None:
        spread = f"95 % interval {speed.low:.2f} to {speed.high:.2f}"
        tone = "good" if speed.low > 1 else "bad" if speed.high < 1 else ""
    beside = (
        f" Prompt lookup, the control: {words.times(_value(control[0]))}."
        if control and best is not control[0]
        else ""
    )
    text = (
        f"{words.best_of(len(models))}{drafter_label(best)}, gamma {words.gamma_cell(best.row)}: "
        f"alpha {words.number(best.alpha)}, c {best.row.cost_ratio:.3f}.{beside} Output: "
        f"{best.row.lossless}."
    )
    return (
        f'{head}<div class="big {tone}">{speed.value:.2f}×</div><div class="range">{spread}</div>'
        f"<p>On {escape(prompts_label(best))}.</p><p>{escape(text)}</p></div>"
    )


def _value(entry: Entry) -> float | None:
    return entry.speedup.value if entry.speedup else None


def _panel(panel: Panel, plots: Sequence[Plot]) -> str:
    rows = [cells(standing) for standing in panel.standings]
    why = ["drafter", *(name for name in rows[0] if name not in OUTCOME)]
    tables = "".join(
        table(names, [tr([row[name] for name in names]) for row in rows])
        for names in (OUTCOME, why)
    )
    drawings = "".join(figure("", _picture(plot), plot.caption) for plot in plots)
    note = f'<p class="note">{escape(headline_note(panel.entries[0]))}</p>' if plots else ""
    return section(
        escape(heading(panel)),
        f"<p>{escape(_work(panel))}</p>{tables}{_terms(panel)}{_plots(drawings, note)}"
        f"<h3>Where each loses</h3>{bullets(losses(panel))}",
    )


def _plots(drawings: str, note: str) -> str:
    return f'<div class="plots">{drawings}</div>{note}' if drawings else ""


def _terms(panel: Panel) -> str:
    found = terms(panel)
    return f"<h3>On what terms they meet</h3>{bullets(found)}" if found else ""


def _work(panel: Panel) -> str:
    """What was decoded, and by what."""
    setting, work = panel.setting, panel.workload
    return (
        f"{work.benchmark}, up to {work.max_new_tokens} new tokens. {setting.target}, "
        f"{setting.backend} backend ({setting.execution}), {setting.dtype}, {setting.hardware}, "
        f"{'1 thread' if setting.threads == 1 else f'{setting.threads} threads'}."
    )


def _picture(plot: Plot) -> str:
    """The plot as data in the page, in the theme that the reader prefers."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{_data(plot.dark)}">'
        f'<img src="{_data(plot.light)}" alt="{escape(plot.caption)}"></picture>'
    )


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _provenance(evaluations: Sequence[Evaluation], making: Making) -> str:
    body = []
    for one in evaluations:
        versions = one.manifest["versions"]
        body.append(
            tr(
                [
                    one.label,
                    one.manifest["started"].replace("T", " "),
                    one.rows[0].hardware,
                    f"torch {versions['torch']}, transformers {versions['transformers']}",
                    one.manifest["git_revision"][:12],
                    one.manifest["command"],
                ]
            )
        )
    return definitions(
        {
            "command": making.command,
            "date": making.date,
            "code": making.revision,
            "raw data": "comparison.jsonl; results.jsonl and records.jsonl of each run",
        }
    ) + table(("run", "measured", "hardware", "versions", "code", "command"), body, texts=6)

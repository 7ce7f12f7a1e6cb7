"""The card of a drafter for the Hugging Face Hub: its README with measured figures and plots."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from decoding.errors import UserError
from decoding.models.folder import hash_input
from eval.report import evaluation_plots, plots
from eval.report.evaluation_tables import by_condition, result_cells
from eval.report.tables import make_table, used_words
from eval.report.text import LEGEND, count_label, drafter_name, prompts_label, warnings
from eval.statistics.comparison.evaluations import JOB, Evaluation, labels_of, read_evaluation
from eval.statistics.metrics import MIN_PROMPTS
from eval.statistics.schema import Row, main_rows, read_rows
from jobs.drafters import CONTROL
from jobs.overrides import overrides_of
from jobs.saved_config import upgrade_config
from jobs.stages import ON_FILE
from training.model_card import read_front_matter

README = "README.md"
FIGURES = "figures"  # folder of the plots in the repository
# a section that an earlier run of these functions wrote, up to the next one
_MEASURED_SECTION = re.compile(r"\n## Measured\n.*?(?=\n## |\Z)", re.DOTALL)
# columns of the table, from those of an evaluation's page
_COLUMNS = ("speedup [95 %]", "not looping", "gamma", "alpha", "tau", "c", "output")
# settings that do not change the figures of a run
_ELSEWHERE = ("experiment", "output_dir", "assumed_tflops", "tracker", "target.config")
_METRICS = {"speedup": "speedup", "acceptance rate": "alpha", "block efficiency": "tau"}


@dataclass(frozen=True)
class ModelCard:
    """A README with front matter, and the plots that it shows."""

    text: str
    figures: dict[str, bytes] = field(default_factory=dict)  # path in the repository -> PNG


def make_card(
    folder: Path, runs: Sequence[Path], base_model: str = "", license_name: str = ""
) -> ModelCard:
    """Return the card of a drafter folder: its README with front matter, measurements and plots.

    Measurements that the README has already are replaced by those of `runs`, and kept without any.
    Figures with a warning are below it in the text, and not in the front matter's model-index.
    runs: finished run folders of eval.run that measured these weights. base_model: name of the
    target on the Hub; empty: none is stated. license_name: the Hub's identifier; empty: none.
    Raises UserError for a folder without a README, and for a run of other weights.
    """
    path = folder / README
    if not path.is_file():
        raise UserError(f"{folder} has no {README}, expected a drafter folder of a training job.")
    front, body = read_front_matter(path)
    measured = [
        _measured(folder, read_evaluation(run, label))
        for run, label in zip(runs, labels_of(runs) if runs else [], strict=True)
    ]
    if base_model:
        front["base_model"] = base_model
    if license_name:
        front = {key: value for key, value in front.items() if not key.startswith("license_")}
        front["license"] = license_name
    sections, figures = list[str](), dict[str, bytes]()
    for one in measured:
        made = _figures(one, len(figures))
        figures |= {name: plot.png for name, plot in made.items()}
        sections.append(_section(one, made, with_terms=not sections))
    if measured:
        name = str(front.get("model_name") or _title(body) or folder.name)
        results = [
            _result(row, one.evaluation.label if len(measured) > 1 else "")
            for one in measured
            for row in one.shown
            if not _doubts([row])
        ]
        front.pop("model-index", None)
        if results:
            front["model-index"] = [{"name": name, "results": results}]
        body = _MEASURED_SECTION.sub("", body).rstrip()
        body += "\n\n## Measured\n\n" + "\n\n".join(sections) + "\n"
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return ModelCard(f"---\n{head}---\n{body}", figures)


def hashes_of(folder: Path) -> set[str]:
    """Return the hashes of a model folder with and without the legal texts that people add."""
    legal = [one.name for one in folder.iterdir() if one.name.startswith(("LICENSE", "NOTICE"))]
    return {hash_input(folder), hash_input(folder, legal)}


@dataclass(frozen=True)
class _Measured:
    evaluation: Evaluation
    rows: list[Row]  # of this drafter, of the sweep and the main part
    controls: list[Row]  # of prompt lookup, of the main part

    @property
    def shown(self) -> list[Row]:
        return main_rows(self.rows)


def _measured(folder: Path, evaluation: Evaluation) -> _Measured:
    """Return the rows of a run that measured the weights in a folder.

    Raises UserError if it measured others.
    """
    digests, inputs = hashes_of(folder), evaluation.manifest["inputs"]
    names = {name for name, one in evaluation.origins.items() if inputs.get(one.folder) in digests}
    everything = read_rows(evaluation.folder / "results.jsonl")
    rows = [row for row in everything if row.drafter in names]
    if not rows:
        others = ", ".join(f"{name} ({one.folder})" for name, one in evaluation.origins.items())
        raise UserError(
            f"{evaluation.folder} did not measure the weights in {folder}; it measured "
            f"{others or 'no drafter with a folder'}. Name runs of these weights, or evaluate them."
        )
    control = {CONTROL} - names
    return _Measured(
        evaluation, rows, [row for row in main_rows(everything) if row.drafter in control]
    )


def _figures(one: _Measured, before: int) -> dict[str, plots.Plot]:
    """Return path in the repository -> plot, numbered from `before` + 1."""
    styles = plots.drafter_styles(dict.fromkeys((row.drafter for row in one.rows), ""))
    drawn: list[plots.Plot] = []
    for label, here in by_condition(one.rows).items():
        swept = [row for row in here if row.part == "sweep"]
        if swept:
            drawn.append(evaluation_plots.speedup_by_gamma(swept, styles, label))
        drawn += [
            evaluation_plots.alpha_by_depth(here, styles, label),
            evaluation_plots.time_of_a_round(main_rows(here), label),
        ]
    return {f"{FIGURES}/{before + n}.png": plot for n, plot in enumerate(drawn, start=1)}


def _section(one: _Measured, figures: dict[str, plots.Plot], with_terms: bool) -> str:
    """Return the Markdown of one run: what was measured, its table, its plots and its command.

    with_terms: explain the columns below the table.
    """
    columns = ("drafter", "setting", *_COLUMNS)
    listed = [row for rows in by_condition([*one.shown, *one.controls]).values() for row in rows]
    found = [result_cells(row) | {"setting": row.condition_label} for row in listed]
    cells = [{name: row[name] for name in columns} for row in found]
    terms = used_words(LEGEND, [make_table("", cells)]) if with_terms else {}
    lines = [
        *(f"**{warning}**\n" for warning in _doubts(listed)),
        _conditions(one),
        "",
        _line(columns),
        _line(["---"] * len(columns)),
        *(_line(list(row.values())) for row in cells),
        "",
        *(f"- `{word}`: {meaning}" for word, meaning in terms.items()),
        *([""] if terms else []),
        *(f"![{plot.title}]({name})\n\n{plot.caption}\n" for name, plot in figures.items()),
        "The command of this measurement:",
        "",
        f"```bash\n{_command(one.evaluation)}\n```",
    ]
    return "\n".join(lines)


def _conditions(one: _Measured) -> str:
    """Return a paragraph on what was measured, where, and beside what."""
    first = one.shown[0]
    paces = [
        f"{rows[0].baseline_tokens_per_second:.1f} tokens/s ({label})"
        for label, rows in by_condition(one.shown).items()
    ]
    control = (
        f"{CONTROL} is the control of the same run: it copies from the text and has no model."
        if one.controls
        else f"The run has no control row of {CONTROL}, so it does not show how much of the "
        f"speedup copying from the text would give."
    )
    return (
        f"Benchmark {first.benchmark}, {prompts_label(first)}, up to {first.max_new_tokens} new "
        f"tokens each, in {first.dtype} on {first.hardware} with "
        f"{count_label(first.threads, 'thread')}. Without a drafter, the same loop decodes "
        f"{' and '.join(paces)}. {control}"
    )


def _command(evaluation: Evaluation) -> str:
    """Return the command of a run, without folders of this machine.

    The settings of a stage of an experiment lie in a file, and are written as overrides instead.
    """
    command = str(evaluation.manifest["command"])
    if ON_FILE in shlex.split(command):
        overrides = overrides_of(JOB, upgrade_config(evaluation.config))
        hidden = tuple(f"{key}{end}" for key in _ELSEWHERE for end in ".=")
        shown = [one for one in overrides if not one.lstrip("+").startswith(hidden)]
        command = shlex.join(["python", "-m", JOB, *shown])
    return without_folders(command)


def without_folders(text: str) -> str:
    """Return a text in which absolute paths are cut to their last part."""
    return re.sub(r"(?<![\w.:/])(?:/[\w.+@~-]+)+/([\w.+@~-]+)", r"\1", text)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _title(body: str) -> str:
    found = re.search(r"^# (.+)$", body, re.MULTILINE)
    return found[1] if found else ""


def _doubts(rows: Sequence[Row]) -> list[str]:
    """Return warnings that precede the figures: those of a report, and of too few prompts."""
    found = warnings(rows)
    if any(row.speedup_low is None for row in rows):
        found.append(
            f"Fewer than {MIN_PROMPTS} prompts: the speedups without an interval may be chance. "
            f"Measure on more prompts."
        )
    looping = [row for row in rows if row.headline_prompts < MIN_PROMPTS <= row.prompts]
    if looping:
        few = min(row.headline_prompts for row in looping)
        found.append(
            f"Only {count_label(few, 'text')} of the target {'does' if few == 1 else 'do'} not "
            f"loop: repeated text is easy to draft, so these speedups hold for it alone. Measure "
            f"on prompts with at least {MIN_PROMPTS} other texts."
        )
    return found


def _result(row: Row, run: str) -> dict[str, Any]:
    """Return a row as an entry of the Hub's model-index, in names that no other row has.

    run: the run's label if the card shows several, else empty.
    """
    what = ", ".join(part for part in (drafter_name(row), row.condition_label, run) if part)
    metrics = [
        {"type": name.replace(" ", "_"), "name": f"{name} ({what})", "value": round(value, 4)}
        for name, key in _METRICS.items()
        if (value := vars(row)[key]) is not None
    ]
    kind = re.sub(r"[^a-z0-9]+", "-", row.benchmark.lower())
    return {
        "task": {"type": "text-generation", "name": "speculative decoding"},
        "dataset": {"type": kind, "name": f"{row.benchmark} ({what})"},
        "metrics": metrics,
    }

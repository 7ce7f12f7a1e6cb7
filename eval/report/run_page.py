"""report.html: one page that says what was measured, on what, how sure it is, and where the drafter
loses.

The page stands alone: no script, no font, no address outside of it. `python -m eval.run` writes it,
from the rows and records in the run folder and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from decoding.rounds.stats import LOOPING_BELOW
from decoding.schedules.by_name import SCHEDULES, VIRTUAL
from eval.measure.records import STALL, Record
from eval.report import plots, words
from eval.report.markup import (
    bullets,
    colour_key,
    definitions,
    document,
    figure,
    section,
    table,
    tr,
    warned,
)
from eval.report.texts import Text, page_part
from eval.statistics import agreement
from eval.statistics.duels import duels
from eval.statistics.rows import units_at
from eval.statistics.schema import Row
from jobs.drafter_use import ALONE
from jobs.drafters import CONTROL


@dataclass(frozen=True)
class Provenance:
    """How the numbers came about; shown at the end of the page."""

    command: str
    date: str
    versions: dict[str, str]
    prompt_counts: dict[str, int]  # see eval.measure.benchmarks
    prompt_file: str
    revision: str
    unmeasured: list[str]  # sentences
    draft_lengths: str = "given"  # how they came about
    repeats: int = 1  # times that every generation was run
    texts: list[Text] = field(default_factory=list)  # shown token by token


def write_report(
    path: Path, rows: list[Row], records: Sequence[Record], provenance: Provenance
) -> None:
    """Write the page under a temporary name, then rename it."""
    partial = path.with_suffix(".partial")
    partial.write_text(page(rows, records, provenance), encoding="utf-8")
    partial.rename(path)


def page(rows: list[Row], records: Sequence[Record], provenance: Provenance) -> str:
    """The whole page as HTML."""
    shown = words.main_rows(rows)
    first = shown[0]
    title = f"Speculative decoding of {first.target}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(_lead(shown))}</p>',
        warned(words.warnings(shown)),
        _headlines(shown),
        section("All drafters", _tables(shown)),
        section("Where it wins and where it loses", _verdicts(shown)),
        section("What a round must read and compute", _budgets(shown)),
        section("Against each other", _duels(shown, records)),
        section("Overlapped schedules and their replay", _replays(shown)),
        section("Plots", _plots(rows, shown, records)),
        section("By category", _categories(shown)),
        section("Who wrote what", page_part(provenance.texts)),
        section("What the words mean", _definitions()),
        section("How it was measured", _provenance(shown, provenance, records)),
        section("What was not measured", bullets(provenance.unmeasured)),
    ]
    return document(title, parts)


def _lead(shown: Sequence[Row]) -> str:
    first = shown[0]
    return (
        f"{first.target_layers} layers, {words.millions(first.target_parameters)} parameters, "
        f"{first.dtype}, on {first.hardware} with {words.threads(first)}. {words.prompts(first)} "
        f"of {first.benchmark}, up to {first.max_new_tokens} new tokens each. Baseline: our own "
        f"autoregressive decoding, interleaved with them."
    )


def _headlines(shown: list[Row]) -> str:
    """Under each condition the drafter that does best, of those that are models and ran on the
    wall's clock; the control stands beside it.
    """
    models = [
        row for row in shown if row.drafter_parameters and row.schedule not in (ALONE, *VIRTUAL)
    ]
    models = models or [row for row in shown if row.schedule not in (ALONE, *VIRTUAL)]
    cards = []
    for label in dict.fromkeys(words.condition_label(row) for row in models):
        rivals = [row for row in models if words.condition_label(row) == label]
        best = max(rivals, key=lambda row: row.headline_speedup or 0.0)
        control = [
            row for row in shown if row.drafter == CONTROL and row is not best and _same(row, best)
        ]
        cards.append(
            f'<div class="headline"><h3>{escape(label)}</h3>'
            f"{_headline(best, control, len(rivals), not words.disturbance(shown))}</div>"
        )
    return f'<div class="headlines">{"".join(cards)}</div>'


def _headline(row: Row, control: Sequence[Row], rivals: int, undisturbed: bool) -> str:
    """rivals: rows that it is the best of; undisturbed: whether the machine was free, so that the
    colour says something.
    """
    if row.headline_speedup is None:
        return (
            f"<p>Every text of the target loops (distinct-4 below {LOOPING_BELOW}): no "
            f"headline.</p>"
        )
    spread, tone = "95 % interval: needs more prompts", ""
    if row.headline_speedup_low is not None and row.headline_speedup_high is not None:
        spread = f"95 % interval {row.headline_speedup_low:.2f} to {row.headline_speedup_high:.2f}"
        tone = (
            "good"
            if row.headline_speedup_low > 1 and undisturbed
            else "bad"
            if row.headline_speedup_high < 1
            else ""
        )
    counted = f"{row.headline_prompts} prompts whose text does not loop"
    everywhere = (
        f"all {row.prompts} prompts: {words.times(row.speedup)}"
        if row.headline_prompts < row.prompts
        else ""
    )
    beside = (
        f" Prompt lookup, the control: {words.times(control[0].headline_speedup)}."
        if control
        else ""
    )
    text = (
        f"{words.best_of(rivals)}{words.drafter_label(row)}, gamma {words.gamma_cell(row)}: alpha "
        f"{words.number(row.headline_alpha)}, c {row.cost_ratio:.3f}, tau "
        f"{words.number(row.headline_tau)}.{beside} Output: {row.lossless}."
    )
    big = f'<div class="big {tone}">{row.headline_speedup:.2f}×</div>'
    over = (
        f"{counted} ({everywhere})"
        if everywhere
        else f"all {row.prompts} prompts; none of their texts loops"
    )
    return f'{big}<div class="range">{spread}</div><p>On {over}.</p><p>{escape(text)}</p>'


def _same(one: Row, other: Row) -> bool:
    return words.condition_label(one) == words.condition_label(other)


def _tables(shown: Sequence[Row]) -> str:
    parts = []
    for label in dict.fromkeys(words.condition_label(row) for row in shown):
        rows = [row for row in shown if words.condition_label(row) == label]
        columns = list(words.cells(rows[0]))
        body = [tr([words.baseline_cells(rows[0]).get(name, "") for name in columns], "baseline")]
        body += [tr(list(words.cells(row).values())) for row in rows]
        parts.append(f"<h3>{escape(label[0].upper() + label[1:])}</h3>{table(columns, body)}")
    note = (
        "Speeds leave the prefill out; with it the speedups are "
        + ", ".join(
            f"{words.times(row.speedup_with_prefill)} ({row.drafter}, T={row.temperature:g})"
            for row in shown
        )
        + "."
    )
    return "".join(parts) + f'<p class="note">{escape(note)}</p>'


def _budgets(shown: Sequence[Row]) -> str:
    """Both budgets of every row, in one table."""
    body = []
    for label in dict.fromkeys(words.condition_label(row) for row in shown):
        here = [row for row in shown if words.condition_label(row) == label]
        body.append(tr([label, *words.baseline_budget_cells(here[0]).values()], "baseline"))
        body += [tr([label, *words.budget_cells(row).values()]) for row in here]
    columns = ["setting", *words.budget_cells(shown[0])]
    return (
        f'{table(columns, body, texts=2)}<p class="note">{escape(words.limits_line(shown[0]))}.</p>'
    )


def _verdicts(shown: Sequence[Row]) -> str:
    items = []
    for row in shown:
        which, measured, predicted = (escape(text) for text in words.verdict_line(row))
        items.append(
            f'<li><strong>{which}</strong>: {measured} <span class="note">{predicted}</span></li>'
        )
    return f'<ul class="plain">{"".join(items)}</ul>'


def _duels(shown: Sequence[Row], records: Sequence[Record]) -> str:
    """A row a drafter and condition; empty where there is one drafter alone."""
    body = []
    for label in dict.fromkeys(words.condition_label(row) for row in shown):
        for duel in duels([row for row in shown if words.condition_label(row) == label], records):
            spread = words.with_interval(duel.ratio.value, duel.ratio.low, duel.ratio.high)
            names = [
                row.drafter + " (virtual clock)" * (row.schedule in VIRTUAL)
                for row in (duel.row, duel.rival)
            ]
            body.append(tr([*names, label, spread]))
    if not body:
        return ""
    columns = ("drafter", "its best rival", "setting", "tokens/s over it [95 %]")
    note = '<p class="note">Paired over prompts: both sides of a prompt are resampled together.</p>'
    return table(columns, body, texts=3) + note


def _replays(shown: Sequence[Row]) -> str:
    """Every row under an overlapped schedule beside its closed form and its replay; empty where
    there are none.
    """
    body = []
    for row in shown:
        if row.schedule in SCHEDULES:
            clock = "virtual" if row.schedule in VIRTUAL else "two workers"
            speeds = [
                words.times(speed)
                for speed in (row.speedup, row.predicted_speedup, row.replayed_speedup)
            ]
            cells = [
                row.drafter,
                words.condition_label(row),
                clock,
                *speeds,
                words.number(agreement.ratio(row)),
            ]
            body.append(
                tr([*cells, agreement.verdict(row)], "bad" if agreement.departs(row) else "")
            )
    columns = (
        "drafter",
        "setting",
        "clock",
        "measured",
        "closed form",
        "replay",
        "replay / measured",
        "verdict",
    )
    return table(columns, body, texts=3) if body else ""


def _plots(rows: Sequence[Row], shown: Sequence[Row], records: Sequence[Record]) -> str:
    palette = plots.colours(list(dict.fromkeys(row.drafter for row in rows)))
    figures = []
    for label in dict.fromkeys(words.condition_label(row) for row in shown):
        here = [row for row in rows if words.condition_label(row) == label]
        sweep = [row for row in here if row.part == "sweep"] or here
        best = [
            max(group, key=lambda row: row.speedup)
            for group in _by_drafter([row for row in shown if row in here])
        ]
        pairs = {row.drafter: units_at(row, records) for row in best}
        figures += [
            figure(
                f"Speedup by draft length, {label}",
                plots.speedup_by_gamma(sweep, palette),
                f"Points: measured on {sweep[0].prompts} prompts, with 95 % intervals. Dashed: "
                f"predicted from the parts. Below the line at 1x the drafter costs more than it "
                f"gives.",
            ),
            figure(
                f"Acceptance by depth, {label}",
                plots.alpha_over_depth(here, palette),
                "alpha at depth k: draft tokens that pass, of those whose predecessors all passed.",
            ),
            figure(
                f"Where the time of a token goes, {label}",
                plots.time_per_token(best)
                + colour_key({name: plots.VARIABLES[c] for name, c in plots.PART_COLOURS.items()}),
                "Time of a round over the tokens it emits; the parts were timed between the "
                "generations.",
            ),
            figure(
                f"Every prompt, {label}",
                plots.prompt_scatter(pairs, palette),
                "Above the line the drafter is faster. Hollow: the target's text loops.",
            ),
        ]
    return (
        colour_key({name: plots.VARIABLES[colour] for name, colour in palette.items()})
        + f'<div class="plots">{"".join(figures)}</div>'
    )


def _by_drafter(rows: Sequence[Row]) -> list[list[Row]]:
    return [
        [row for row in rows if row.drafter == name]
        for name in dict.fromkeys(row.drafter for row in rows)
    ]


def _categories(shown: Sequence[Row]) -> str:
    body = []
    for row in shown:
        if len(row.categories) < 2:
            continue
        for part in row.categories:
            spread = words.with_interval(part.speedup, part.speedup_low, part.speedup_high)
            cells = [row.drafter, words.condition_label(row), part.category, str(part.prompts)]
            body.append(tr([*cells, words.number(part.alpha), words.number(part.tau), spread]))
    names = ("drafter", "setting", "category", "prompts", "alpha", "tau", "speedup [95 %]")
    return table(names, body, texts=3) if body else ""


def _definitions() -> str:
    return definitions(words.DEFINITIONS) + (
        '<p class="note">Predicted speedup = E(γ) (1 + o₁) / (γ c + V(γ+1) + o), with '
        "E(γ) = 1 + α₁ + α₁α₂ + … + α₁…α_γ; o is the rest of a round and o₁ that of an "
        "autoregressive step, both in "
        "units of a target forward over one token. α is that of the same prompts (depths that were "
        "not reached "
        "take the deepest measured α); o and o₁ come from the sweep over gamma, which other "
        "prompts ran.</p>"
    )


def _provenance(shown: Sequence[Row], provenance: Provenance, records: Sequence[Record]) -> str:
    again = len(
        {(record.condition, record.part, record.unit) for record in records if record.attempt > 1}
    )
    first = shown[0]
    timed = "; ".join(f"{n}: {ms:.2f}" for n, ms in first.t_target_ms.items())
    left_out = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in provenance.prompt_counts.items()
    )
    return definitions(
        {
            "command": provenance.command,
            "date": provenance.date,
            "code": provenance.revision,
            "hardware": f"{first.hardware}; {first.device}, {words.threads(first)}",
            "versions": ", ".join(
                f"{name} {version}" for name, version in provenance.versions.items()
            ),
            "target": f"{first.target}, {first.backend} backend, {first.dtype}",
            "prompts": f"{provenance.prompt_file}: {left_out}",
            "draft lengths": provenance.draft_lengths,
            "stalls": f"{again} unit(s) were measured again, as a round of theirs took {STALL:g} "
            f"times its usual"
            if again
            else "none",
            "order": "baseline and drafters take every prompt one after the other, in an order "
            "that rotates"
            + (
                f"; each {provenance.repeats} times, of which the fastest counts"
                if provenance.repeats > 1
                else ""
            ),
            "t_target in ms": f"{timed} (new tokens: milliseconds, at a context of {first.context} "
            f"tokens)",
            "t_draft in ms": "; ".join(
                f"{row.drafter}: {row.t_draft_ms:.3f}" for row in shown if _same(row, first)
            ),
            "distinct-4": ", ".join(
                f"{row.distinct_4:.2f} at T={row.temperature:g}" for row in _one_each(shown)
            ),
            "output": "; ".join(
                f"{row.drafter}, T={row.temperature:g}: {row.lossless_detail}" for row in shown
            ),
            "raw data": "results.jsonl (rows), records.jsonl (all generations), parts.jsonl (part "
            "times)",
        }
    )


def _one_each(shown: Sequence[Row]) -> list[Row]:
    """One row a condition."""
    return list({words.condition_label(row): row for row in shown}.values())

"""Tables of an evaluation: results, losses, predictions, budgets, rivals and categories."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from decoding.costs.machine_limits import SLOW_YARDSTICK
from decoding.schedules.by_name import SCHEDULES, VIRTUAL
from eval.measure.lengths import RULES
from eval.measure.records import Record
from eval.report import text
from eval.report.tables import Table, make_table
from eval.report.text import NONE, number, percent, times, with_interval
from eval.statistics.budgets import NO_LIMITS
from eval.statistics.paired_comparison import paired_comparisons
from eval.statistics.schema import RoundBudget, Row
from jobs.drafter_use import ALONE

# Shares by which a prediction, by formula and from a trace, may be off without a mark.
PREDICTED_WITHIN, FROM_TRACE_WITHIN = 0.1, 0.05
LEAST_OVERHEAD = -0.05  # below it more than clock noise was wrong with the separate timings
BASELINE = {"drafter": "none (autoregressive)"}
# Columns that narrow terminals leave out.
SPARE = (
    *("predicted", "drafted", "overhead", "output", "tokens/s", "not looping", "V", "gamma", "tau"),
)


def by_condition(rows: Sequence[Row]) -> dict[str, list[Row]]:
    labels = dict.fromkeys(row.condition_label for row in rows)
    return {label: [row for row in rows if row.condition_label == label] for label in labels}


def result_cells(row: Row) -> dict[str, str]:
    verifies = row.schedule != ALONE
    virtual = " virtual" if row.schedule in VIRTUAL else ""
    return {
        "drafter": text.drafter_label(row),
        "speedup [95 %]": with_interval(row.speedup, row.speedup_low, row.speedup_high),
        "not looping": f"{times(row.headline_speedup)} ({row.headline_prompts})",
        "tokens/s": number(row.tokens_per_second, 1) + virtual,
        "gamma": text.gamma_label(row),
        "drafted": number(row.drafted, 1) if row.num_draft_tokens else NONE,
        "alpha": number(row.alpha),
        "tau": number(row.tau),
        "c": number(row.cost_ratio, 3),
        "V": number(row.target_ms_per_round / row.t_target_ms[1]) if verifies else NONE,
        "overhead": percent(row.overhead) if row.overhead >= LEAST_OVERHEAD else text.UNRELIABLE,
        "predicted": text.predicted(row.predicted_speedup, row),
        "output": row.lossless,
    }


def result_tables(rows: Sequence[Row]) -> list[Table]:
    """Return one table for each condition: the baseline, then the drafters."""
    tables = []
    for label, group in by_condition(rows).items():
        pace = number(group[0].baseline_tokens_per_second, 1)
        baseline = {**BASELINE, "speedup [95 %]": "1.00x", "tokens/s": pace, "tau": "1.00"}
        marks = ["baseline", *[""] * len(group)]
        cells = [baseline, *map(result_cells, group)]
        tables.append(make_table(label[0].upper() + label[1:], cells, marks, SPARE))
    return tables


def _place(name: str, row: Row) -> dict[str, str]:
    return {"drafter": name, "setting": row.condition_label, "gamma": text.gamma_label(row)}


def losses_table(named: Sequence[tuple[str, Row]]) -> Table:
    """Return a table of the prompts and categories on which each drafter loses to the baseline."""
    cells = [
        {
            **_place(name, row),
            "slower prompts": f"{row.slower_prompts} of {row.prompts}",
            "worst prompt": row.worst_prompt,
            "speedup there": times(row.worst_speedup),
            "slower categories": ", ".join(c.category for c in row.categories if c.loses) or "none",
            "speedup with prefill": times(row.speedup_with_prefill),
        }
        for name, row in named
    ]
    spare = ("speedup with prefill", "slower categories", "gamma")
    return make_table("Where each drafter loses", cells, (), spare)


def answers_table(named: Sequence[tuple[str, Row]]) -> Table:
    """Return a table of right answers with each drafter and of the target alone."""
    cells = [
        {
            "drafter": name,
            "setting": row.condition_label,
            "right answers": f"{row.answers_right} of {row.answers_checked}",
            "target alone": f"{row.baseline_answers_right} of {row.answers_checked}",
            "output": row.lossless,
        }
        for name, row in named
        if row.answers_checked
    ]
    return make_table("Answers checked", cells)


def off_by(predicted: float | None, row: Row, within: float) -> bool:
    """Return whether a prediction differs from the row's speedup by more than `within` of it."""
    return predicted is not None and abs(predicted / row.speedup - 1) > within


def predictions_table(named: Sequence[tuple[str, Row]]) -> Table:
    """Return a table of speedups predicted by formula and from traces next to the measured ones."""
    overlapped = any(row.schedule in SCHEDULES for _, row in named)
    cells, marks = [], []
    for name, row in named:
        best = str(row.best_gamma) if row.helps else "none"
        doubtful = f" ({text.UNRELIABLE})" * bool(row.length_rule == "predicted" and row.unreliable)
        reliable = None if row.unreliable else row.predicted_speedup
        there = text.predicted(row.best_gamma_speedup, row)
        cells.append(
            {
                **_place(name, row),
                "length set by": RULES[row.length_rule] + doubtful,
                "speedup": times(row.speedup),
                "predicted": text.predicted(row.predicted_speedup, row),
                "predicted / measured": _ratio(reliable, row),
                "best gamma": best if row.num_draft_tokens and not row.unreliable else NONE,
                "predicted there": there if row.num_draft_tokens else NONE,
            }
        )
        if overlapped:
            clock = "virtual" if row.schedule in VIRTUAL else "two workers"
            cells[-1] |= {
                "clock": clock if row.schedule in SCHEDULES else NONE,
                "lanes hidden": percent(row.overlap),
                "from trace": times(row.replayed_speedup),
                "from trace / measured": _ratio(row.replayed_speedup, row),
            }
        predicted_off = off_by(reliable, row, PREDICTED_WITHIN) or bool(row.unreliable)
        trace_off = off_by(row.replayed_speedup, row, FROM_TRACE_WITHIN)
        marks.append("bad" if predicted_off or trace_off else "")
    spare = (
        *("length set by", "predicted there", "best gamma", "lanes hidden", "clock"),
        *("predicted / measured", "from trace / measured"),
    )
    return make_table("Predicted and measured speedup", cells, marks, spare)


def _ratio(predicted: float | None, row: Row) -> str:
    return number(None if predicted is None else predicted / row.speedup)


def budgets_table(rows: Sequence[Row]) -> Table:
    """Return a table of the mean round's bytes and operations, and their shares of the limits."""
    cells, marks = [], []
    for label, group in by_condition(rows).items():
        cells.append({**BASELINE, "setting": label, **budget_cells(group[0].baseline_budget)})
        for row in group:
            budget = budget_cells(row.budget, row.schedule in VIRTUAL)
            cells.append({"drafter": text.drafter_label(row), "setting": label, **budget})
        marks += ["baseline", *[""] * len(group)]
    return make_table("What a round must read and compute", cells, marks)


def budget_cells(budget: RoundBudget | None, virtual: bool = False) -> dict[str, str]:
    if budget is None:
        return dict.fromkeys(("MB read", "of bandwidth", "MFLOP", "of arithmetic"), "not known")

    def share(value: float | None) -> str:
        if value is None:
            return "virtual clock" if virtual else "not measured"
        return percent(value, 1) + (f" ({SLOW_YARDSTICK})" if value > 1 else "")

    return {
        "MB read": f"{budget.megabytes:.1f}",
        "of bandwidth": share(budget.bandwidth_share),
        "MFLOP": f"{budget.megaflop:.1f}",
        "of arithmetic": share(budget.operations_share),
    }


def limits_note(row: Row) -> str:
    """Return the caption of the budgets table, with the machine's limits that it compares to."""
    reading, computing = row.reading_gigabytes_per_second, row.product_gigaflop_per_second
    limits = f"the machine's limits were not measured ({NO_LIMITS})."
    if reading is not None and computing is not None:
        limits = (
            f"shares of plain reading ({reading:.1f} GB/s) and of a plain product "
            f"({computing:.0f} GFLOP/s), both measured before the run."
        )
    return f"Least weights, keys and values that a mean round of both models needs; {limits}"


def pairs_table(rows: Sequence[Row], records: Sequence[Record]) -> Table:
    """Return a table of each drafter's tokens/s over its best rival's, paired by prompt."""
    cells = [
        {
            "drafter": text.drafter_name(pair.row),
            "best rival": text.drafter_name(pair.rival),
            "setting": label,
            "tokens/s over it [95 %]": with_interval(*dataclasses.astuple(pair.ratio)),
        }
        for label, group in by_condition(rows).items()
        for pair in paired_comparisons(group, records)
    ]
    return make_table("", cells)


def categories_table(rows: Sequence[Row]) -> Table:
    """Return a table by prompt category; a category whose interval lies below 1 is marked."""
    parts = [(row, c) for row in rows if len(row.categories) > 1 for c in row.categories]
    cells = [
        {
            "drafter": text.drafter_name(row),
            "setting": row.condition_label,
            "category": part.category,
            "speedup [95 %]": with_interval(part.speedup, part.speedup_low, part.speedup_high),
            "prompts": str(part.prompts),
            "alpha": number(part.alpha),
            "tau": number(part.tau),
        }
        for row, part in parts
    ]
    return make_table("", cells, ["bad" if part.loses else "" for _, part in parts])

"""The plan's page, on the terminal and as plan.html."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from decoding.costs.contention import group_by_kind
from eval.plan.acceptance import FEWEST_FORMS
from eval.plan.config import PlanConfig
from eval.plan.curves import TREE, Curve
from eval.plan.plots import plan_plots
from eval.plan.rows import (
    MEASURED,
    PREDICTED,
    Need,
    Outlook,
    PlanRow,
    best_trained,
    ranked,
    worth_training,
)
from eval.report import text
from eval.report.page import PAGES
from eval.report.tables import Table, make_table, used_words
from eval.report.terminal import print_tables
from jobs.amounts import operations, size

SPARE = ("memory", "parameters", "tokens/s")


def subject(outlook: Outlook, config: PlanConfig) -> str:
    """Return what is planned, in one line."""
    how = f"temperature {config.temperature:g}" if config.temperature else "greedy"
    pace = f": {outlook.baseline_tokens_per_second:,.0f} tokens/s without a drafter"
    return (
        f"{config.target.path}, {config.target.dtype}, {how}, batch {config.batch_size}, context "
        f"{config.context:,}{pace if outlook.reliable else ''}"
    )


def advice(outlook: Outlook, config: PlanConfig) -> list[str]:
    """Return what to train, in sentences, and first which costs to measure again."""
    if not outlook.reliable:
        return [_nothing_concluded(outlook.rows)]
    rows, found = outlook.rows, _doubts(outlook.rows)
    nothing = "train nothing until then" if found else "train nothing"
    chosen, speedup = worth_training(rows), f"{config.speedups[0]:g}x"
    if not outlook.knows_acceptance:
        if not chosen:
            return [*found, f"No acceptance would reach {speedup} here: {nothing}."]
        return [
            *found,
            f"No acceptance of this target was measured yet, so nothing is predicted. "
            f"{chosen[0].drafter} needs the least: an acceptance rate of "
            f"{_need(chosen[0].needs[0])} for {speedup}, at the draft length in parentheses. "
            f"Train it or any other one, evaluate it, and plan again.",
        ]
    if trained := best_trained(rows):
        found.append(
            f"Fastest of the trained drafters: {trained.drafter}, "
            f"{_interval(trained)} by its measured acceptance, {_draft(trained)}."
        )
    if not chosen:
        found.append(f"No other drafter is predicted to be faster: {nothing}.")
    for number, row in enumerate(chosen):
        expected = (
            f"{_interval(row)} predicted {_draft(row)}, {row.tokens_per_second:,.0f} tokens/s"
        )
        if row.trained:
            found.append(f"Evaluate {row.drafter}, whose weights are trained: {expected}.")
            continue
        doubt = ""
        if row.speedup_low is not None and row.speedup_low < 1:
            doubt = " It may slow decoding down: the bounds hold 1x."
        start = "Train" if not number else "Or, for less training, train"
        found.append(
            f"{start} {row.drafter}: {expected}, after {operations(row.training_flop)} on "
            f"{row.training_tokens:,} tokens, {_training_time(row, outlook, config)}.{doubt}"
        )
    return found


def plan_table(outlook: Outlook, config: PlanConfig) -> Table:
    """Return the table of all candidates, the fastest first.

    It has the columns that depend on costs, and the hours that depend on this machine's speed, if
    any costs are reliable.
    """
    timed = bool(outlook.reliable or config.assumed_tflops)
    worth = {row.drafter for row in worth_training(outlook.rows)}
    cells, marks = [], []
    for row in ranked(outlook.rows):
        cell = {
            "drafter": row.drafter + " *" * (row.drafter in worth),
            "parameters": text.amount(row.parameters),
            "memory": size(row.memory_bytes),
        }
        if outlook.reliable:
            cell["c"] = text.NONE if row.unreliable else text.number(row.cost_ratio, 3)
            for one in row.needs:
                cell[f"needs for {one.speedup:g}x"] = _reliable(row, _need(one))
        if outlook.knows_acceptance:
            cell["accepted"] = _accepted(row)
        if outlook.reliable:
            cell |= _gain(row, outlook)
        flop, time = operations(row.training_flop), _duration(row.training_hours)
        cell |= {"training": f"{flop}, {time}"} if timed else {"to train": flop}
        cells.append(cell)
        slow = row.speedup_high is not None and row.speedup_high < 1
        marks.append("bad" if slow and not row.unreliable else "")
    return make_table(subject(outlook, config), cells, marks, SPARE)


def _gain(row: PlanRow, outlook: Outlook) -> dict[str, str]:
    """Return a row's cells on what it gains, as far as that is known."""
    cell = {}
    if outlook.knows_acceptance:
        cell["gamma"] = text.NONE if row.unreliable else str(row.num_draft_tokens)
        if any(one.tree_nodes for one in outlook.rows):
            cell["nodes"] = _nodes(row)
        cell["speedup"] = _reliable(row, _interval(row))
        cell["tokens/s"] = _reliable(row, text.number(row.tokens_per_second, 1))
    if any(not one.best for one in outlook.rows):
        cell["best"] = "best" if row.best and not row.unreliable else ""
    return cell


def _nodes(row: PlanRow) -> str:
    """Return the nodes of a row's tree at its best depth."""
    known = row.tree_nodes and not row.unreliable
    return str(row.nodes[row.num_draft_tokens or 0]) if known else text.NONE


def _draft(row: PlanRow) -> str:
    """Return the size of a row's best draft, in words."""
    if row.tree_nodes:
        return f"with {_nodes(row)} nodes at depth {row.num_draft_tokens}"
    return f"at draft length {row.num_draft_tokens}"


def _need(one: Need) -> str:
    return text.NONE if one.alpha is None else f"{one.alpha:.2f} ({one.num_draft_tokens})"


def _reliable(row: PlanRow, shown: str) -> str:
    """Return what is computed from the row's costs, or that they are unreliable."""
    return text.UNRELIABLE if row.unreliable else shown


def _doubts(rows: Sequence[PlanRow]) -> list[str]:
    """Return a sentence for each kind of reason for which costs are unreliable."""
    by_reason: dict[str, list[str]] = {}
    kinds = group_by_kind(row.unreliable for row in rows if row.unreliable)
    for row in rows:
        if row.unreliable:
            by_reason.setdefault(kinds[row.unreliable], []).append(row.drafter)
    return [
        f"Unreliable costs, as {why}: {', '.join(names)}. Nothing is concluded from them: "
        f"plan again with remeasure=true on an idle machine."
        for why, names in by_reason.items()
    ]


def _nothing_concluded(rows: Sequence[PlanRow]) -> str:
    """Return why no costs are reliable, and what to do."""
    kinds = group_by_kind(row.unreliable for row in rows)
    why = ", and ".join(dict.fromkeys(kinds[row.unreliable] for row in rows))
    which = f"all {len(rows)} drafters" if rows[1:] else "the only drafter"
    return (
        f"Nothing is concluded: {why}, so the costs of {which} are unreliable. Plan again with "
        f"remeasure=true on an idle machine."
    )


def _training_time(row: PlanRow, outlook: Outlook, config: PlanConfig) -> str:
    time = _duration(row.training_hours)
    if config.assumed_tflops:
        return f"{time} at {config.assumed_tflops:g} TFLOP/s"
    return f"at least {time} at the {outlook.tflops:.2g} TFLOP/s of this machine's matrix products"


def _duration(hours: float) -> str:
    """Format hours as `1,014.2 h`, `12 min` or `7 s`."""
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{60 * hours:.0f} min" if 60 * hours >= 1 else f"{3600 * hours:.0f} s"


def _interval(row: PlanRow) -> str:
    """Return the predicted speedup, with the bounds that those of the acceptance give."""
    return text.with_interval(row.predicted_speedup, row.speedup_low, row.speedup_high)


def _accepted(row: PlanRow) -> str:
    rate = f"{row.alpha_by_depth[0]:.2f} [{row.alpha_low[0]:.2f}, {row.alpha_high[0]:.2f}]"
    return rate if row.acceptance == MEASURED else f"~{rate}"


def curves_table(curves: Sequence[Curve]) -> Table:
    """Return the measured acceptances that the predictions use."""
    cells = [
        {
            "drafter": one.drafter,
            "category": _category(one),
            "temperature": f"{one.temperature:g}",
            "tokens trained on": text.amount(one.training_tokens),
            "by depth": text.rates(one.alpha_by_depth[:6]),
            "measured": f"{one.source}, {one.benchmark}",
        }
        for one in curves
    ]
    return make_table("acceptances that the predictions use", cells)


def _category(one: Curve) -> str:
    """Return a curve's kind, and the size of its trees if it is known."""
    if one.draft_shape != TREE:
        return one.kind
    return f"{one.kind} tree" + f" of {one.tree_nodes}" * (one.tree_nodes > 0)


def notes_of(outlook: Outlook) -> list[str]:
    """Return what limits the plan, in sentences."""
    found = list[str]()
    tokens, (least, most) = outlook.rows[0].training_tokens, outlook.known_tokens
    if most and not least <= tokens <= most:
        nearest = min(max(tokens, least), most)
        found.append(
            f"The known drafters were trained on {least:,} to {most:,} tokens, so for {tokens:,} "
            f"the acceptance of {nearest:,} is predicted."
        )
    shapes = {row.draft_shape for row in outlook.rows if row.acceptance == PREDICTED}
    if TREE in shapes and all(one.draft_shape != TREE for one in outlook.curves):
        found.append(
            "No tree of this target was evaluated yet, so a tree's acceptance is predicted as that "
            "of a chain, which is too low."
        )
    found += _about_sizes(outlook)
    if outlook.error is not None:
        found.append(_about_prompts(outlook))
        error = f"a standard error of {outlook.error:.2f} in its log-odds"
        found.append(
            f"Acceptance is predicted from {outlook.forms} forms of trained drafters, with {error}."
            if outlook.forms
            else f"Acceptance is predicted from fewer than {FEWEST_FORMS} forms of trained "
            f"drafters, for which {error} is assumed."
        )
    return found


def _about_sizes(outlook: Outlook) -> list[str]:
    """Return which predicted trees are larger or smaller than all evaluated ones."""
    known = {one.tree_nodes for one in outlook.curves if one.tree_nodes}
    predicted = {row.tree_nodes for row in outlook.rows if row.acceptance == PREDICTED} - {0}
    if not known or all(min(known) <= nodes <= max(known) for nodes in predicted):
        return []
    span = " to ".join(str(nodes) for nodes in sorted({min(known), max(known)}))
    return [
        f"The evaluated trees have {span} nodes. Smaller and larger ones are predicted to accept "
        f"what the nearest of these does."
    ]


def _about_prompts(outlook: Outlook) -> str:
    """Return on which prompts the known acceptances were measured."""
    others = sorted({one.benchmark for one in outlook.curves} - {outlook.prompts})
    about = f"Acceptance is that on {outlook.prompts}"
    if not others:
        return f"{about}, the only prompts with measured drafters."
    about += (
        f". Those on {', '.join(others)} count in the predictions too, less what the prompts "
        f"change on average (prompts= chooses others)."
    )
    elsewhere = [
        row for row in outlook.rows if row.measured_on and outlook.prompts not in row.measured_on
    ]
    if elsewhere:
        names = [f"{row.drafter} ({', '.join(row.measured_on)})" for row in elsewhere]
        about += f" Measured on other prompts alone, and shown as there: {', '.join(names)}."
    return about


def print_plan(outlook: Outlook, config: PlanConfig, notes: Sequence[str]) -> None:
    """Print the table, the advice and the notes; above the table that nothing is concluded."""
    warnings, lines = _lines(outlook, config)
    table, lines = plan_table(outlook, config), [*lines, *notes, *notes_of(outlook)]
    print_tables([table], warnings, lines, text.PLAN_LEGEND, None)


def _lines(outlook: Outlook, config: PlanConfig) -> tuple[list[str], list[str]]:
    """Return the advice as a warning if nothing is concluded, else as what to train."""
    lines = advice(outlook, config)
    return ([], lines) if outlook.reliable else (lines, [])


def plan_page(
    outlook: Outlook, config: PlanConfig, notes: Sequence[str], provenance: dict[str, str]
) -> str:
    """Return the content of plan.html. provenance: words and their meanings."""
    table, (warnings, lines) = plan_table(outlook, config), _lines(outlook, config)
    return PAGES.get_template("plan.html.j2").render(
        title=f"Plan: drafters for {Path(config.target.path).name}",
        warnings=warnings,
        cards=[],
        subject=subject(outlook, config),
        advice=lines,
        table=table,
        legend=used_words(text.PLAN_LEGEND, [table]),
        notes=[*notes, *notes_of(outlook)],
        plots=plan_plots(outlook, config.speedups),
        curves=curves_table(outlook.curves),
        provenance=provenance,
    )

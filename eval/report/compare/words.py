"""The comparison put into words: cells of its tables, who is best, what is not compared and why.
Terminal and page share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decoding.rounds.stats import LOOPING_BELOW
from eval.report.compare.comparison import Panel, Standing, telling
from eval.report.compare.entries import ALL, Entry
from eval.report.compare.evaluations import Evaluation
from eval.report.compare.series import EQUAL_WITHIN, rounded
from eval.report.run_page import words
from eval.statistics.lossless import DIFFERS
from jobs.drafters import CONTROL

IDLE = "drafts nothing"
DRIFT = 0.1  # baselines of two runs that differ by more are told
# Settings of eval.run that change what a speedup stands on, though not what is compared with what.
WAYS = (
    "max_prompts",
    "samples",
    "repeats",
    "stop_at_eos",
    "stop_strings",
    "sweep",
    "sweep_prompts",
    "num_draft_tokens",
    "max_draft_tokens",
)

DEFINITIONS: dict[str, str] = {
    **words.DEFINITIONS,
    "bytes/step": "weights that one draft step reads: the layers and the lm_head, in its own "
    "dtype.",
    "trained on": "tokens that the drafter was distilled on, epochs included, by its card.",
    "t_draft": "milliseconds of one draft step; of one whole proposal for a tree, a lookup and "
    "other drafters that propose in one pass.",
    "alone": "tokens a second of the baseline in the same run, without a drafter.",
    "over the best": "this drafter's speedup over that of the best other one, on the prompts that "
    "both ran, with the 95 % interval of a bootstrap that keeps each prompt's "
    "four sides together: both drafters, and each one's own baseline.",
    "front": "P: no drafter with as few parameters is faster (Pareto front). T: the same of tokens "
    "trained on. What drafts nothing is on neither.",
}


def cells(standing: Standing) -> dict[str, str]:
    """Column -> text, in order."""
    entry, row = standing.entry, standing.entry.row
    ratio = standing.ratio
    return {
        "drafter": _with_rule(entry) + _remark(entry),
        "layers": str(row.drafter_layers) if row.drafter_layers else "–",
        "speedup [95 %]": words.with_interval(row.speedup, row.speedup_low, row.speedup_high),
        "not looping": f"{words.times(row.headline_speedup)} ({row.headline_prompts})",
        "over the best": words.with_interval(ratio.value, ratio.low, ratio.high) if ratio else "–",
        "gamma": words.gamma_cell(row),
        "drafted": words.number(row.drafted, 1) if row.num_draft_tokens else "–",
        "alpha": words.number(row.alpha),
        "tau": words.number(row.tau),
        "c": words.number(row.cost_ratio, 3),
        "t_draft": words.number(row.t_draft_ms, 3),
        "parameters": words.millions(row.drafter_parameters)
        if row.drafter_parameters
        else "no model",
        "bytes/step": _count(entry.bytes_per_step, "B"),
        "trained on": _count(entry.training_tokens, "tokens"),
        "predicted": words.times(row.predicted_speedup),
        "tokens/s": words.number(row.tokens_per_second, 1),
        "alone": words.number(row.baseline_tokens_per_second, 1),
        "front": front_marks(standing),
        "output": row.lossless,
    }


def _with_rule(entry: Entry) -> str:
    """The name, and the rule of its own that a drafter of the run had, where the name does not say
    it.
    """
    rule = words.own_rule(entry.row)
    return f"{entry.name}, {rule}" if rule and rule not in entry.name.lower() else entry.name


def _remark(entry: Entry) -> str:
    """Why it is not ranked, or that there is little to rank."""
    remark = entry.not_ranked or (IDLE if entry.idle else "")
    return f" [{remark}]" if remark else ""


def front_marks(standing: Standing) -> str:
    """P and T for the fronts that the entry lies on."""
    return "".join(cost[0].upper() for cost, on_front in standing.on_front.items() if on_front)


def _count(value: int | None, unit: str) -> str:
    """`3.3 MB`, `9.0 M`; a dash where it is not known or there is none."""
    if not value:
        return "–"
    for size, letter in ((1e9, "G" if unit == "B" else "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f} {letter}{unit if unit == 'B' else ''}"
    return f"{value}{' B' if unit == 'B' else ''}"


def heading(panel: Panel) -> str:
    """The panel's label, as a sentence begins."""
    return panel.label[0].upper() + panel.label[1:]


def best_sentence(panel: Panel) -> str:
    """Who is best under one condition, over the second, and how sure that is."""
    label = heading(panel)
    if not panel.fastest:
        return (
            f"{label}: nothing to rank "
            f"({'; '.join(dict.fromkeys(entry.not_ranked for entry in panel.entries))})."
        )
    best = panel.fastest[0]
    if best.idle:
        return (
            f"{label}: every drafter {IDLE}: the rule that ends drafts found that none pays here."
        )
    speed = best.speedup
    assert speed is not None, "of ranked entries alone"
    if speed.low is None or speed.high is None:
        verdict = "ahead, on too few prompts to be sure of it"
    elif speed.high < 1:
        verdict = "the least slow, and slower than no drafter"
    else:
        verdict = "the fastest" if speed.low > 1 else "ahead, and no clear gain over no drafter"
    who = "prompt lookup, the control," if best.row.drafter == CONTROL else drafter_label(best)
    spread = words.with_interval(speed.value, speed.low, speed.high)
    among = f", the best of {len(panel.fastest)}" if len(panel.fastest) > 1 else ""
    where = f"at gamma {words.gamma_cell(best.row)} on {prompts_label(best)}{among}"
    return f"{label}: {who} is {verdict}: {spread} {where}{_second(panel, best)}."


def _second(panel: Panel, best: Entry) -> str:
    (standing,) = (standing for standing in panel.standings if standing.entry is best)
    if standing.rival is None:
        return ""
    if standing.ratio is None:
        return f"; it shares no prompt with the second, {standing.rival.name}"
    ratio = standing.ratio
    spread = words.with_interval(ratio.value, ratio.low, ratio.high)
    found = (
        f"{spread} over the second, {standing.rival.name}, on the {standing.shared} prompts of both"
    )
    if ratio.low is None or ratio.high is None:
        return f"; {found}, too few to say more"
    return f"; {found}" if ratio.low > 1 else f"; no clear difference: {found}"


def drafter_label(entry: Entry) -> str:
    """Name with its size."""
    row = entry.row
    if not row.drafter_parameters:
        return entry.name
    return f"{entry.name} ({words.size(row)}{f', {IDLE}' if entry.idle else ''})"


def prompts_label(entry: Entry) -> str:
    """`54 prompts that do not loop`."""
    if entry.prompts == ALL:
        return f"all {entry.row.prompts} prompts"
    return f"{entry.row.headline_prompts} prompts that do not loop"


def losses(panel: Panel) -> list[str]:
    """Where each drafter loses, one sentence a row."""
    return [
        f"{entry.name}, gamma {words.gamma_cell(entry.row)}: {words.losses(entry.row)}."
        for entry in panel.entries
    ]


def terms(panel: Panel) -> list[str]:
    """On what terms the drafters of a panel meet: at equal training and equal cost, or what
    differs; empty where there is nothing to meet.
    """
    models = sorted(
        (one for one in panel.fastest if one.row.drafter_parameters),
        key=lambda one: one.row.drafter_layers,
    )
    if len(models) < 2:
        return []
    return [
        _term(
            "training",
            "saw",
            "tokens",
            " tokens",
            {one.name: one.training_tokens for one in models},
        ),
        _term(
            "cost", "reads", "B", " a draft step", {one.name: one.bytes_per_step for one in models}
        ),
    ]


def _term(what: str, done: str, unit: str, of: str, values: dict[str, int | None]) -> str:
    """One sentence: equal within 3 %, or who has how much."""
    names: dict[int, list[str]] = {}
    for name, value in zip(values, rounded(list(values.values())), strict=True):
        if value is not None:
            names.setdefault(value, []).append(name)
    unknown = [name for name, value in values.items() if value is None]
    amounts = {value: f"{_count(value, unit)}{of}" for value in sorted(names)}
    if len(amounts) == 1 and not unknown:
        return (
            f"Equal {what}: every drafter {done} {amounts.popitem()[1]}, within {EQUAL_WITHIN:.0%}."
        )
    said = [f"{amount} ({', '.join(names[value])})" for value, amount in amounts.items()]
    said += [f"not known of {', '.join(unknown)}"] if unknown else []
    return f"Not at equal {what}: {'; '.join(said)}."


def kept_apart(panels: Sequence[Panel]) -> list[str]:
    """What differs between settings, whose speeds are for that reason not compared with one
    another.
    """
    settings = list(dict.fromkeys(panel.setting for panel in panels))
    sentences = []
    for field in telling(settings, "target", "target_hash"):
        runs: dict[Any, dict[str, None]] = {}
        for panel in panels:
            runs.setdefault(vars(panel.setting)[field], {}).update(
                dict.fromkeys(entry.run for entry in panel.entries)
            )
        said = "; ".join(f"{value} ({', '.join(names)})" for value, names in runs.items())
        sentences.append(
            f"Not compared for speed with one another, as they differ in "
            f"{field.replace('_', ' ')}: {said}."
        )
    return sentences


def busy(evaluations: Sequence[Evaluation]) -> list[str]:
    """The evaluations that ran on a busy machine: to be said before any verdict."""
    found = {one.label: words.disturbance(one.rows) for one in evaluations}
    return [f"{label}: {text}" for label, text in found.items() if text]


def cautions(panels: Sequence[Panel], evaluations: Sequence[Evaluation]) -> list[str]:
    """What a reader of the speedups should know: other prompts, other ways, a changed pace, unknown
    cards, lost equality.
    """
    found = [
        sentence for panel in panels for sentence in (*_other_prompts(panel), *_other_pace(panel))
    ]
    for way in WAYS:
        values = {evaluation.label: evaluation.config.get(way) for evaluation in evaluations}
        if len({str(value) for value in values.values()}) > 1:
            found.append(
                f"The runs differ in {way}: "
                + ", ".join(f"{value} ({label})" for label, value in values.items())
                + "."
            )
    for evaluation in evaluations:
        found += evaluation.notes
    for panel in panels:
        found += _idle(panel)
        found += [
            f"NOT LOSSLESS: {one.name}: {one.row.lossless_detail}"
            for one in panel.entries
            if one.row.lossless == DIFFERS
        ]
    return found


def _idle(panel: Panel) -> list[str]:
    """The drafters whose speed is plain decoding's."""
    found = [entry.name for entry in panel.fastest if entry.idle]
    names, does = ", ".join(found), IDLE if len(found) == 1 else "draft nothing"
    text = (
        f"{heading(panel)}: {names} {does}: the rule that ends drafts found that none pays here, "
        f"so the speed is plain decoding's. Evaluate with stopping=fixed to see what drafts would "
        f"cost."
    )
    return [text] if names else []


def _other_prompts(panel: Panel) -> list[str]:
    prompts = {entry.run: frozenset(entry.counted()) for entry in panel.entries}
    if len(set(prompts.values())) == 1:
        return []
    counts = ", ".join(f"{len(ids)} ({run})" for run, ids in prompts.items())
    return [
        f"{heading(panel)}: the runs do not stand on the same prompts: {counts}. What is over the "
        f"best counts those that two share."
    ]


def _other_pace(panel: Panel) -> list[str]:
    paces = {entry.run: entry.row.baseline_tokens_per_second for entry in panel.entries}
    if max(paces.values()) <= (1 + DRIFT) * min(paces.values()):
        return []
    said = ", ".join(f"{pace:.1f} ({run})" for run, pace in paces.items())
    return [
        f"{heading(panel)}: the baseline's own tokens/s differ between runs: {said}. Only ratios "
        f"to it are compared."
    ]


def headline_note(entry: Entry) -> str:
    """What the numbers of a plot or a headline stand on."""
    if entry.prompts == ALL:
        return "All prompts count, loops included."
    return (
        f"Prompts whose text by the target does not loop (distinct-4 of at least {LOOPING_BELOW})."
    )

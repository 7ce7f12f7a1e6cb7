"""The words of the tables: definitions, and rows put into plain sentences. Terminal and report
share them.
"""

from __future__ import annotations

from decoding.costs.machine_limits import SLOW_YARDSTICK
from decoding.rounds.stats import LOOPING_BELOW
from decoding.schedules.by_name import VIRTUAL, WALL
from decoding.stopping.policies import EAGER
from eval.measure.lengths import OWN, RULES
from eval.statistics.agreement import departs, sentence
from eval.statistics.budgets import NO_LIMITS
from eval.statistics.schema import RoundBudget, Row
from jobs.drafter_use import ALONE

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # behind a drafter's size
# Decoding on a CPU never waits, so that its thread is on a processor all the time, if it gets one.
UNDISTURBED = 0.9
# Predicted and measured speedups that differ by more are said not to agree.
AGREEMENT = 0.1

DEFINITIONS: dict[str, str] = {
    "speedup": "tokens per second with the drafter over those of our own decoding without one: "
    "same prompts, machine, threads, dtype (a drafter in another one says so) and loop, "
    "interleaved. In brackets the 95 % interval of a paired bootstrap over prompts.",
    "gamma": "the most draft tokens of a round (a stopping rule may end it earlier), which the "
    "target checks in one forward pass. Where none is given, a sweep over several lengths "
    "on other prompts chooses one: the highest speedup that the formula gives for what "
    "was measured there (under an overlapped schedule the highest measured). Behind <= "
    "stands the cap of a row that chooses its lengths itself, which no sweep chose.",
    "drafted": "draft tokens of a round, on average: below gamma where rounds end early or nothing "
    "is offered, above it for trees.",
    "alpha": "acceptance rate: draft tokens that pass, of those tested. A token is tested when all "
    "before it passed.",
    "tau": "block efficiency: tokens emitted per target forward, the target's own bonus token "
    "included; 1 without a drafter, at most gamma + 1.",
    "c": "cost ratio: time of one draft step over time of one target step.",
    "V": "time of the target forward that checks a whole proposal, over that of one token. It is "
    "not 1.",
    "overhead": "share of a round spent outside the models' forward passes. Those are timed by "
    "themselves between the generations, so that the noise of the clock can bring it a "
    "little below zero; under an overlapped schedule the lanes are timed inside their "
    "rounds.",
    "predicted": "speedup that alpha, c, V and overhead give by the formula at the gamma that was "
    "used; where it agrees with the measured one, they explain the whole. Below the "
    "tables the formula also says which gamma would suit these prompts most: known "
    "only afterwards, it chose nothing.",
    "not looping": f"the speedup on prompts whose continuation does not repeat itself (distinct-4 "
    f"of at least {LOOPING_BELOW}). Loops are easy to guess, so headlines leave "
    f"them out.",
    "distinct-4": "share of different 4-token sequences in the target's text: 1 never repeats, "
    "near 0 loops.",
    "output": "equal: token by token what the target says alone. by rule: drawn from the target's "
    "distribution by a rule that is proven to keep it, so single texts differ. another "
    "model: the drafter alone. lossy: a rule that changes the distribution.",
}


def drafter_label(row: Row) -> str:
    """Name with its size: `mine (1 layer, 3.1 M)`."""
    usual = ("serial", "fixed", "cost_ratio")  # a name that was given a policy says so itself
    used = [
        word for word in (row.schedule, row.stopping, own_rule(row)) if word and word not in usual
    ]
    said = row.drafter.lower().replace(" ", "_")
    eager = ["eager"] if row.stopping in EAGER and row.device.startswith("cuda") else []
    name = ", ".join([row.drafter, *(word for word in used if word not in said), *eager])
    if row.drafter_parameters == 0:
        return (
            f"{name} ({row.drafter_layers} of the target's layers)"
            if row.drafter_layers
            else f"{name} (no model)"
        )
    return f"{name} ({size(row)})"


def size(row: Row) -> str:
    """`1 layer, 3.1 M` of a drafter's own model, and its dtype where that is not the run's."""
    layers = "1 layer" if row.drafter_layers == 1 else f"{row.drafter_layers} layers"
    dtype = (
        f", {SHORT.get(row.drafter_dtype, row.drafter_dtype)}"
        if row.drafter_dtype not in ("", row.dtype)
        else ""
    )
    return f"{layers}, {millions(row.drafter_parameters)}{dtype}"


def millions(parameters: int) -> str:
    """Parameter count in M or B."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"


def threads(row: Row) -> str:
    """`2 threads`."""
    return "1 thread" if row.threads == 1 else f"{row.threads} threads"


def prompts(row: Row) -> str:
    """`96 prompts`, or how many of how many fitted into the time."""
    if row.prompts >= row.prompts_asked:
        return f"{row.prompts} prompts"
    return (
        f"{row.prompts} of {row.prompts_asked} prompts (those that fit into {row.max_seconds:g} s)"
    )


def condition_label(row: Row) -> str:
    """`temperature 1, token verification`, with the batch where it is not 1: what the rows of one
    table share.
    """
    return _setting(row, row.shared_verify)


def own_rule(row: Row) -> str:
    """The rule by which this drafter alone is verified; empty where it is the run's."""
    return row.verify if row.verify != row.shared_verify else ""


def _setting(row: Row, verify: str) -> str:
    rule = (
        "greedy"
        if row.temperature == 0
        else f"temperature {row.temperature:g}, {verify} verification"
    )
    return rule + (f", batch {row.batch_size}" if row.batch_size > 1 else "")


def number(value: float | None, digits: int = 2) -> str:
    """A dash where there is nothing to show."""
    return "–" if value is None else f"{value:.{digits}f}"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """`1.62x [1.55, 1.70]`; without brackets where there are too few prompts for an interval."""
    return (
        times(value) if low is None or high is None else f"{times(value)} [{low:.2f}, {high:.2f}]"
    )


def cells(row: Row) -> dict[str, str]:
    """Column -> text, in order."""
    return {
        "drafter": drafter_label(row),
        "speedup [95 %]": with_interval(row.speedup, row.speedup_low, row.speedup_high),
        "not looping": f"{times(row.headline_speedup)} ({row.headline_prompts})",
        "tokens/s": number(row.tokens_per_second, 1)
        + (" virtual" if row.schedule in VIRTUAL else ""),
        "gamma": gamma_cell(row),
        "drafted": number(row.drafted, 1) if row.num_draft_tokens else "–",
        "alpha": number(row.alpha),
        "tau": number(row.tau),
        "c": number(row.cost_ratio, 3),
        "V": number(row.target_ms_per_round / row.t_target_ms[1])
        if row.schedule != ALONE
        else "–",  # nothing is verified
        "overhead": f"{100 * row.overhead:.0f} %",
        "predicted": times(row.predicted_speedup),
        "output": row.lossless,
    }


def gamma_cell(row: Row) -> str:
    """The draft length; behind `<=` a cap below which the row chose its own, nothing where nothing
    is drafted.
    """
    if not row.num_draft_tokens:
        return "–"
    return f"<= {row.num_draft_tokens}" if row.length_rule in OWN else str(row.num_draft_tokens)


def budget_cells(row: Row) -> dict[str, str]:
    """Both budgets of the row's mean round: column -> text, in order."""
    return {"drafter": drafter_label(row), **_budget(row.budget, row.schedule in VIRTUAL)}


def baseline_budget_cells(row: Row) -> dict[str, str]:
    """The same of an autoregressive step."""
    return {"drafter": "none (autoregressive)", **_budget(row.baseline_budget, False)}


def _budget(budget: RoundBudget | None, virtual: bool) -> dict[str, str]:
    if budget is None:
        return dict.fromkeys(("MB read", "of bandwidth", "MFLOP", "of arithmetic"), "not known")
    return {
        "MB read": f"{budget.megabytes:.1f}",
        "of bandwidth": _share(budget.bandwidth_share, virtual),
        "MFLOP": f"{budget.megaflop:.1f}",
        "of arithmetic": _share(budget.operations_share, virtual),
    }


def _share(share: float | None, virtual: bool) -> str:
    if share is None:
        return "virtual clock" if virtual else "not measured"
    return f"{100 * share:.1f} %" + (f" ({SLOW_YARDSTICK})" if share > 1 else "")


def limits_line(row: Row) -> str:
    """What stands over the budgets: what they are, and what they are held against."""
    what = (
        "What a mean round must read (weights, keys and values) and compute, both models "
        "together, at the least"
    )
    if row.reading_gigabytes_per_second is None or row.product_gigaflop_per_second is None:
        return f"{what}; the machine's limits were not measured ({NO_LIMITS})"
    reading, computing = row.reading_gigabytes_per_second, row.product_gigaflop_per_second
    return (
        f"{what}; shares reached of plain reading ({reading:.1f} GB/s) and of a plain product "
        f"({computing:.0f} GFLOP/s), measured before"
    )


def baseline_cells(row: Row) -> dict[str, str]:
    """The same columns for the row without a drafter; columns that it has no value for
    are absent.
    """
    return {
        "drafter": "none (autoregressive)",
        "tau": "1.00",
        "tokens/s": number(row.baseline_tokens_per_second, 1),
        "speedup [95 %]": "1.00x",
    }


ENDED = 0.6  # of its length: a mean draft that is shorter was ended by its rule, or found nothing


def best_of(count: int) -> str:
    """`Best of 6: `, before a headline that was chosen among so many rows by the very number it
    shows.
    """
    return f"Best of {count}: " if count > 1 else ""


def outcome(row: Row) -> str:
    """One sentence: does it pay, and how sure is that?"""
    spread = with_interval(row.speedup, row.speedup_low, row.speedup_high)
    if row.speedup_low is None or row.speedup_high is None:
        return f"{spread} on {row.prompts} prompt(s): too few to say more"
    if row.speedup_low > 1:
        return f"faster: {spread}"
    if row.speedup_high < 1:
        return f"slower than no drafter: {spread}"
    return f"no clear difference: {spread}"


def losses(row: Row) -> str:
    """Where the drafter loses: prompts, the worst of them, categories whose interval
    lies below 1.
    """
    if not row.slower_prompts:
        return (
            f"faster on every one of {row.prompts} prompts (least on {row.worst_prompt}: "
            f"{times(row.worst_speedup)})"
        )
    worst = f"worst {row.worst_prompt}: {times(row.worst_speedup)}"
    behind = [
        part.category
        for part in row.categories
        if part.speedup_high is not None and part.speedup_high < 1
    ]
    # A loss that rounds to 1.00x is none that the report's figures show.
    slower = bool(behind) or times(row.worst_speedup) != times(1.0)
    text = (
        f"{'slower' if slower else 'as fast as no drafter'} on {row.slower_prompts} of "
        f"{row.prompts} prompts ({worst})"
    )
    return text + (
        f", and all in all on the {'category' if len(behind) == 1 else 'categories'} "
        f"{', '.join(behind)}"
        if behind
        else ""
    )


def foretold(row: Row) -> str:
    """The draft length that was used and how it was found, then what the formula says of it and of
    the length that it would take.
    """
    used = RULES[row.length_rule].format(gamma=row.num_draft_tokens)
    if used and row.length_rule not in OWN and row.drafted < ENDED * row.num_draft_tokens:
        used += f"; a mean round drafted {row.drafted:.1f} of them"
    if not used or row.predicted_speedup is None:
        verdict = f"{row.verdict[0].upper()}{row.verdict[1:]}."
        return f"Used: {used}. {verdict}" if used else verdict
    at = f"{times(row.predicted_speedup)} at gamma={row.num_draft_tokens}; " * (
        row.best_gamma != row.num_draft_tokens
    )
    return f"Used: {used}. Predicted: {at}{row.verdict}."


def verdict_line(row: Row) -> tuple[str, str, str]:
    """What a newcomer should take away of one row: (which row, what was measured, what the parts
    predict).
    """
    measured = f"{outcome(row)}; {losses(row)}."
    predicted = foretold(row)
    if row.overlap is not None:
        why = "two workers, measured" if row.schedule in WALL else "virtual clock, by definition"
        predicted += f" The lanes hid {100 * row.overlap:.0f} % of the shorter one ({why})."
    if row.replayed_speedup is not None:
        predicted += f" {sentence(row)}"
    off = (
        row.predicted_speedup is not None
        and abs(row.predicted_speedup / row.speedup - 1) > AGREEMENT
    )
    if off and row.replayed_speedup is not None and not departs(row):
        predicted += (
            " The formula, which takes acceptance as even, is off; the replay, which "
            "knows its runs, explains what was measured."
        )
    elif off:
        predicted += (
            f" The prediction does not agree with what was measured ({times(row.speedup)}): the "
            f"parts do not explain it, or the machine's speed changed in between. Trust the "
            f"measured one."
        )
    clock = ", virtual clock" if row.schedule in VIRTUAL else ""
    return f"{row.drafter}, {_setting(row, row.verify)}{clock}", measured, predicted


def warnings(rows: list[Row]) -> list[str]:
    """What a reader must know before any number: a busy machine, an output that is not the
    target's.
    """
    broken = [
        f"NOT LOSSLESS: {row.drafter}: {row.lossless_detail}"
        for row in rows
        if row.lossless == "differs"
    ]
    return [text for text in (disturbance(rows), *broken) if text]


def disturbance(rows: list[Row]) -> str:
    """A warning where other processes took the processor while decoding; empty where nothing says
    so.
    """
    if rows[0].device != "cpu" or rows[0].backend.endswith("processes)"):
        return ""
    # Where a target or a drafter works in another process this one waits for it, as it should.
    share = min((row.cpu_share for row in rows if row.schedule not in WALL), default=1.0)
    if share >= UNDISTURBED:
        return ""
    remedy = "" if rows[0].threads == 1 else ", or with threads=1"
    return (
        f"Other processes used this machine: decoding had its processors for only "
        f"{100 * share:.0f} % of the time. Times and speedups are unreliable, the cost of many "
        f"threads most of all. Measure again on an idle machine{remedy}."
    )


def main_rows(rows: list[Row]) -> list[Row]:
    """The rows that count: those of the main part, or the sweep's where a run has no main part."""
    return [row for row in rows if row.part == "main"] or rows

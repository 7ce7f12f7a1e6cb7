"""Text of the reports: numbers, labels of drafters, the legend, warnings and marked texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import yaml

from decoding.costs.contention import UNDISTURBED, group_by_kind, waits
from decoding.schedules.by_name import VIRTUAL
from decoding.stopping.policies import CALIBRATED, EAGER
from eval.measure.lengths import CAPPED
from eval.measure.records import Record
from eval.statistics.lossless import DIFFERS, LOSSY
from eval.statistics.schema import Row

NONE = "–"
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
UNRELIABLE = "unreliable"  # in place of a predicted speedup

_LEGENDS = yaml.safe_load(files("eval.report").joinpath("templates/legend.yaml").read_text("utf-8"))
LEGEND: dict[str, str] = _LEGENDS["evaluation"]
ENGINES_LEGEND: dict[str, str] = _LEGENDS["engines"]
COMPARISON_LEGEND: dict[str, str] = LEGEND | _LEGENDS["comparison"]
REPLAY_LEGEND: dict[str, str] = _LEGENDS["replay"] | {
    word: COMPARISON_LEGEND[word]
    for word in ("gamma", "drafted", "alpha", "by depth", "distinct-4", "c", "V")
}
PLAN_LEGEND: dict[str, str] = _LEGENDS["plan"]
ENGINES_COMPARED_LEGEND: dict[str, str] = _LEGENDS["engines_compared"]


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def rates(values: Sequence[float | None] | None) -> str:
    """Return acceptance rates by depth, `0.64 0.59 0.68`."""
    return " ".join(map(number, values)) if values else NONE


def times(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}x"


def predicted(value: float | None, row: Row) -> str:
    """Return a speedup that was predicted for this row, or that it is unreliable."""
    return UNRELIABLE if value is not None and row.unreliable else times(value)


def doubts(named: Sequence[tuple[str, Row]]) -> list[str]:
    """Return a sentence for each kind of reason for which predictions are unreliable.

    named: rows, each with its name.
    """
    by_reason: dict[str, list[str]] = defaultdict(list)
    kinds = group_by_kind(row.unreliable for _, row in named if row.unreliable)
    for name, row in named:
        if row.unreliable:
            by_reason[kinds[row.unreliable]].append(f"{name} ({row.condition_label})")
    return [
        f"Unreliable prediction, as {why}: {', '.join(rows)}." for why, rows in by_reason.items()
    ]


def shared_vocabularies(named: Sequence[tuple[str, Row]]) -> list[str]:
    """Return a sentence for each drafter whose vocabulary is not the target's.

    named: rows, each with its name.
    """
    shares = {
        name: (row.shared_target_mass, row.shared_drafter_mass)
        for name, row in named
        if row.shared_target_mass is not None
    }
    return [
        f"{name} has another tokenizer: on the target's text, the tokens that both vocabularies "
        f"share have {target:.1%} of the target's probability and {drafter:.1%} of the drafter's."
        for name, (target, drafter) in shares.items()
    ]


def calibrated_elsewhere(named: Sequence[tuple[str, Row]]) -> list[str]:
    """Return a sentence for each drafter whose confidences are of another temperature than a row.

    named: rows, each with its name.
    """
    at: dict[tuple[str, float], list[str]] = defaultdict(list)
    for name, row in named:
        if row.calibrated_at is not None and row.calibrated_at != row.temperature:
            at[name, row.calibrated_at].append(f"{row.temperature:g}")
    return [
        f"The confidences that end the drafts of {name} were calibrated at temperature "
        f"{calibrated:g}, and also serve at {', '.join(dict.fromkeys(others))}, where a draft may "
        f"end too early or too late. Train the head with held_out.temperature as it will serve."
        for (name, calibrated), others in at.items()
    ]


def stopped_by_round(named: Sequence[tuple[str, Row]]) -> list[str]:
    """Return a sentence for each drafter whose calibrated stopping rule can read no confidence.

    named: rows, each with its name.
    """
    found = [
        name
        for name, row in named
        if row.stopping == CALIBRATED and (row.batch_size > 1 or row.device.startswith("cuda"))
    ]
    return [
        f"stopping={CALIBRATED} of {name} chooses draft lengths before each round, as cost_ratio, "
        f"where a batch has several rows or the target is on a GPU: it then reads no confidence "
        f"and samples no acceptance rate."
        for name in dict.fromkeys(found)
    ]


def percent(value: float | None, digits: int = 0) -> str:
    return NONE if value is None else f"{100 * value:.{digits}f} %"


def with_interval(value: float | None, low: float | None, high: float | None) -> str:
    """Return `1.62x [1.55, 1.70]`, without brackets if there is no interval."""
    bounded = low is not None and high is not None
    return times(value) + (f" [{low:.2f}, {high:.2f}]" if bounded else "")


def amount(value: int | None, unit: str = "") -> str:
    """Return `3.3 MB`, `9.0 M` or, as training does, `0.8 M`; a dash for None and 0."""
    giga = "G" if unit == "B" else "B"
    for least, size, letter in ((1e9, 1e9, giga), (1e5, 1e6, "M"), (1e3, 1e3, "k")):
        if value and value >= least:
            return f"{value / size:.1f} {letter}{unit}"
    return f"{value} {unit}".strip() if value else NONE


def count_label(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def model_size(row: Row) -> str:
    """Return `1 layer, 3.1 M`, with the draft vocabulary, and the dtype if it is not the run's."""
    size = f"{count_label(row.drafter_layers, 'layer')}, {amount(row.drafter_parameters)}"
    if row.draft_vocab_size:
        size += f", {row.draft_vocab_size:,} ids"
    same = row.drafter_dtype in ("", row.dtype)
    return size if same else f"{size}, {SHORT_DTYPES.get(row.drafter_dtype, row.drafter_dtype)}"


def drafter_name(row: Row) -> str:
    """Return the drafter's name, with notes if its clock is virtual, and if its rule is lossy."""
    notes = ["virtual clock"] * (row.schedule in VIRTUAL) + [LOSSY] * (row.lossless == LOSSY)
    return f"{row.drafter} ({', '.join(notes)})" if notes else row.drafter


def drafter_rule(row: Row) -> str:
    """Return the drafter's verification rule if it differs from the run's, else ""."""
    return row.verify if row.verify != row.shared_verify else ""


def drafter_label(row: Row) -> str:
    """Return the drafter's name with schedule, stopping rule and size: `mine (1 layer, 3.1 M)`."""
    named = row.drafter.lower().replace(" ", "_")
    usual = ("", "serial", "fixed", "cost_ratio")
    lossy = LOSSY if row.lossless == LOSSY else ""
    ways = (row.schedule, row.stopping, drafter_rule(row), lossy)
    parts = [part for part in ways if part not in usual]
    eager = ["eager"] if row.stopping in EAGER and row.device.startswith("cuda") else []
    name = ", ".join([row.drafter, *(part for part in parts if part not in named), *eager])
    if row.drafter_parameters:
        return f"{name} ({model_size(row)})"
    layers = f"{row.drafter_layers} of the target's layers" if row.drafter_layers else "no model"
    return f"{name} ({layers})"


def gamma_label(row: Row) -> str:
    """Return the draft length, `<= 16` for an upper bound, a dash if nothing is drafted."""
    if not row.num_draft_tokens:
        return NONE
    ends_early = row.length_rule in CAPPED or row.stopping not in ("", "fixed")
    return f"{'<= ' * ends_early}{row.num_draft_tokens}"


def prompts_label(row: Row) -> str:
    """Return `96 prompts`, or `40 of 96 prompts` with the limit if max_seconds ended the run."""
    if row.prompts >= row.prompts_asked:
        return count_label(row.prompts, "prompt")
    why = f"those that fit into {row.max_seconds:g} s"
    if row.overrun_seconds:
        took = f"{row.overrun_seconds:.0f} s, limit {row.max_seconds:g} s"
        why = f"the minimum; measuring took {took}"
    return f"{row.prompts} of {row.prompts_asked} prompts ({why})"


def warnings(rows: Sequence[Row]) -> list[str]:
    """Return the warnings that precede all numbers: busy or shared devices, differing outputs."""
    differing = [row for row in rows if row.lossless in (DIFFERS, LOSSY)]
    broken = [f"NOT LOSSLESS: {drafter_name(row)}: {row.lossless_detail}" for row in differing]
    return [text for text in (sharing(rows), disturbance(rows), *broken) if text]


def sharing(rows: Sequence[Row]) -> str:
    """Return a warning if several processes of the run shared a device, else an empty string."""
    row = max(rows, key=lambda one: one.shards_per_device)
    if row.shards_per_device == 1:
        return ""
    device = "each GPU" if row.device.startswith("cuda") else "the processor"
    return (
        f"{row.shards_per_device} processes (shards={row.shards}) shared {device}: acceptance and "
        f"answers are right, but times and speedups are those of a busy machine. Measure speeds "
        f"with shards=1."
    )


def disturbance(rows: Sequence[Row]) -> str:
    """Return a warning if other processes used the CPU during decoding, else an empty string."""
    judged = [row for row in rows if not waits(row.device, row.backend, row.schedule)]
    share = min((row.cpu_share for row in judged), default=1.0)
    if share >= UNDISTURBED:
        return ""
    remedy = "" if rows[0].threads == 1 else ", or with threads=1"
    return (
        f"Other processes used this machine: decoding had its processors for only "
        f"{percent(share)} of the time. Times and speedups are unreliable, above all with many "
        f"threads. Measure again on an idle machine{remedy}."
    )


@dataclass(frozen=True)
class TracedText:
    """A generation as pairs of a token's text and its mark (see Generation.trace)."""

    drafter: str
    prompt_id: str
    rounds: int
    pieces: list[tuple[str, str]]

    @property
    def drafted(self) -> int:
        return sum(mark == "1" for _, mark in self.pieces)


def traced_texts(
    records: Sequence[Record],
    drafters: Sequence[str],
    text_of: Callable[[Sequence[int]], str],
    prompts: int,
) -> list[TracedText]:
    """Return each drafter's texts for the first `prompts` prompts of the first main condition."""
    main = [record for record in records if record.part == "main" and record.drafter in drafters]
    main = [r for r in main if r.condition == main[0].condition and (r.sample, r.turn) == (0, 0)]
    ids = list(dict.fromkeys(record.prompt_id for record in main))[:prompts]
    shown = sorted((r for r in main if r.prompt_id in ids), key=lambda r: ids.index(r.prompt_id))
    return [TracedText(r.drafter, r.prompt_id, r.rounds, _pieces(r, text_of)) for r in shown]


def _pieces(record: Record, text_of: Callable[[Sequence[int]], str]) -> list[tuple[str, str]]:
    shown, pieces = "", []
    for end, mark in enumerate(record.trace, start=1):
        text = text_of(record.tokens[:end])
        if end < len(record.tokens) and text.endswith("\ufffd"):  # a character of several tokens
            text = shown
        pieces.append((text[len(shown) :], mark))
        shown = text
    return pieces

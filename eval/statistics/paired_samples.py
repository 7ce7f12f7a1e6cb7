"""Records -> paired samples, and the counts and costs that predictions are made from.

Legend: D depths of a chain, P units (a unit is a prompt, or the prompts decoded together).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from decoding.rounds.stats import distinct_n
from decoding.schedules.by_name import SCHEDULES
from eval.measure.records import Record
from eval.statistics import metrics, prediction
from eval.statistics.replay import Turn, can_replay, mean_lanes
from eval.statistics.schema import DrafterFacts, PartTimes
from jobs.drafter_use import ALONE


@dataclass
class PairedSample:
    """Drafter's and baseline's sides of one unit, summed over the turns of its prompts."""

    ids: list[str] = field(default_factory=list)
    turns: int = 0  # decode calls
    categories: list[str] = field(default_factory=list)
    distinct_4: list[float] = field(default_factory=list)  # of the baseline's text
    tokens: int = 0  # emitted; the prefill emits none
    rounds: int = 0  # of single rows, for tau
    batch_rounds: int = 0  # target forwards, for times
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    base_tokens: int = 0
    base_batch_rounds: int = 0
    base_seconds: float = 0.0
    base_prefill_seconds: float = 0.0
    cpu_seconds: float = 0.0  # both sides
    drafted: int = 0  # of single rows
    draft_steps: int = 0
    draft_beams: int = 0  # that these started from
    verified: int = 0
    lanes_seconds: float = 0.0  # of overlapped schedules: the longer lane of every round
    draft_seconds: float = 0.0  # the drafter's lane
    target_seconds: float = 0.0  # the target's
    shorter_seconds: float = 0.0  # the shorter lane of every round
    traces: list[str] = field(default_factory=list)  # accept/reject, a character a token
    tested: list[list[int]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return metrics.rate_ratio(
            [self.tokens], [self.seconds], [self.base_tokens], [self.base_seconds]
        )


def pair_samples(records: Iterable[Record], baseline: Iterable[Record]) -> list[PairedSample]:
    """Pair a drafter's records with the baseline's of the same units.

    Raises KeyError if a side lacks a unit.
    """
    sides = [_by_batch(records), _by_batch(baseline)]
    if sides[0].keys() != sides[1].keys():
        raise KeyError(
            f"drafter and baseline differ in their prompts: "
            f"{sorted(sides[0].keys() ^ sides[1].keys())}"
        )
    units: dict[int, PairedSample] = defaultdict(PairedSample)
    for key, rows in sides[0].items():
        unit, base = units[key[0]], sides[1][key]
        unit.turns += 1
        unit.tokens += sum(len(row.tokens) for row in rows)
        unit.rounds += sum(row.rounds for row in rows)
        unit.batch_rounds += max(row.rounds for row in rows)
        unit.seconds += max(row.decode_seconds for row in rows)
        unit.prefill_seconds += rows[0].prefill_seconds
        unit.drafted += sum(row.drafted for row in rows)
        unit.draft_steps += max(row.draft_steps for row in rows)
        unit.draft_beams += max(row.draft_beams or row.draft_steps for row in rows)
        unit.verified += max(row.verified for row in rows)
        unit.lanes_seconds += max(row.lanes_seconds for row in rows)
        unit.draft_seconds += max(row.draft_seconds for row in rows)
        unit.target_seconds += max(row.target_seconds for row in rows)
        unit.shorter_seconds += max(row.shorter_seconds for row in rows)
        unit.traces += [row.trace for row in rows]
        unit.tested += [row.tested_by_depth for row in rows]
        unit.accepted += [row.accepted_by_depth for row in rows]
        unit.base_tokens += sum(len(row.tokens) for row in base)
        unit.base_batch_rounds += max(row.rounds for row in base)
        unit.base_seconds += max(row.decode_seconds for row in base)
        unit.base_prefill_seconds += base[0].prefill_seconds
        unit.cpu_seconds += rows[0].cpu_seconds + base[0].cpu_seconds
        unit.distinct_4 += [distinct_n(row.tokens) for row in base]
        first = [row for row in rows if (row.sample, row.turn) == (0, 0)]
        unit.ids += [row.prompt_id for row in first]
        unit.categories += [row.category for row in first]
    return [unit for _, unit in sorted(units.items())]


def _by_batch(records: Iterable[Record]) -> dict[tuple[int, int, int], list[Record]]:
    """Group records decoded together, by (unit, sample, turn)."""
    batches: dict[tuple[int, int, int], list[Record]] = defaultdict(list)
    for record in records:
        batches[record.unit, record.sample, record.turn].append(record)
    return batches


def tested_counts(units: Sequence[PairedSample]) -> tuple[list[int], list[int]]:
    """Return (tested_D, accepted_D) summed over units."""
    tested = metrics.add_by_depth([count_D for unit in units for count_D in unit.tested])
    accepted = metrics.add_by_depth([count_D for unit in units for count_D in unit.accepted])
    return tested, accepted


@dataclass(frozen=True)
class Pool:
    """Acceptance and costs of a drafter under one condition, over all its draft lengths."""

    pass_rates: list[float | None]  # P(depth k is offered and passes | the depths before it passed)
    costs: prediction.Costs


ByGamma = dict[int, list[PairedSample]]  # draft length -> the units run at it


def pool_counts(
    judged: ByGamma,
    timed: ByGamma,
    facts: DrafterFacts,
    parts: PartTimes,
    parts_then: PartTimes,
    limit: int,
) -> Pool:
    """Return what predicts the speedup of `judged`.

    Acceptance, parts and plain rounds are those of `judged`, the overhead is that of the rounds
    `timed`. parts_then: those timed between these runs, as a machine's speed varies. limit: the
    most tokens of a text.

    For a drafter that always proposes gamma tokens pass_k is alpha_k. One that proposes fewer, or
    none, also misses the rounds without an offer: pass_k = accepted_k / accepted_(k-1), with the
    rounds as accepted_0.
    """
    units = [unit for group in judged.values() for unit in group]
    tested, accepted = tested_counts(units)
    reached, beams = _reached(judged), mean_beams(units)
    parts, parts_then = parts.at(beams), parts_then.at(beams)
    passes, nodes = metrics.usable_alpha(tested, accepted), _by_length(parts, judged, timed)
    overlapped = facts.schedule in SCHEDULES
    # The last round of a generation may have no room for a full proposal; any other short one is
    # the drafter's choice.
    short = sum(reached) - sum(tested) > sum(len(unit.tested) for unit in units)
    if short:
        passes = [
            have / before if before else None
            for have, before in zip(accepted, reached, strict=False)
        ]
    elif all(count <= gamma for gamma, (count, _) in nodes.items()):  # no tree
        nodes = {gamma: (float(gamma), steps) for gamma, (_, steps) in nodes.items()}
    if overlapped:  # a window begins anywhere in a chunk, so depth means nothing
        passes, nodes = [metrics.alpha(tested, accepted)], {}
    if not passes or passes[0] is None:  # not one token was offered, so none passes
        passes = [0.0]
    costs = prediction.Costs(
        **_ratios(parts),
        one_pass=facts.one_pass,
        nodes={gamma: count for gamma, (count, _) in nodes.items()},
        steps={gamma: count * steps for gamma, (count, steps) in nodes.items()},
        overlapped=overlapped,
        deepest=max(*judged, *timed),
        own_lengths=facts.own_cap is not None,
    )
    overhead = _overhead(timed, facts, parts_then, replace(costs, **_ratios(parts_then)), limit)
    return Pool(
        passes,
        replace(costs, overhead=overhead, baseline_overhead=_baseline_overhead(judged, parts)),
    )


def _ratios(parts: PartTimes) -> dict[str, Any]:
    return {
        "cost_ratio": parts.t_draft_ms / parts.t_target_ms[1],
        "V": metrics.cost_table(parts.t_target_ms),
    }


def _by_length(parts: PartTimes, *groups: ByGamma) -> dict[int, tuple[float, float]]:
    """Return for each draft length the nodes verified in a mean round, and draft steps per node.

    The first group's figures are used where several have a length.
    """
    found: dict[int, tuple[float, float]] = {}
    for gamma, units in (pair for group in reversed(groups) for pair in group.items()):
        verified = sum(unit.verified for unit in units)
        # Short drafts have narrower steps in the mean: their first one starts from the tip alone.
        share = (
            parts.at(mean_beams(units)).t_draft_ms / parts.t_draft_ms
            if parts.t_draft_by_beams_ms
            else 1.0
        )
        steps = share * sum(unit.draft_steps for unit in units)
        found[gamma] = (
            verified / sum(unit.batch_rounds for unit in units),
            steps / verified if verified else 0.0,
        )
    return found


def _overhead(
    timed: ByGamma, facts: DrafterFacts, parts: PartTimes, costs: prediction.Costs, limit: int
) -> float:
    """Return o: mean time of rounds beyond their parts, over t_target(1).

    The parts of an overlapped round are its lanes as timed alone, combined by its trace.
    """
    t_1 = parts.t_target_ms[1]
    extra_ms = []
    for gamma, group in timed.items():
        busy = busy_ms(group, facts, parts)
        if replayable(facts, group):
            traces = [trace for unit in group for trace in unit.traces]
            busy = t_1 * mean_lanes(traces, gamma, limit, facts.schedule, costs)
        extra_ms.append(mean_round_ms(group) - busy)
    return float(np.mean(extra_ms)) / t_1


def _baseline_overhead(judged: ByGamma, parts: PartTimes) -> float:
    """Return o_1: that of a plain round, from the baseline of the judged runs."""
    units = [unit for group in judged.values() for unit in group]
    base_ms = (
        1000
        * sum(unit.base_seconds for unit in units)
        / sum(unit.base_batch_rounds for unit in units)
    )
    return base_ms / parts.t_target_ms[1] - 1.0


def replayable(facts: DrafterFacts, units: Sequence[PairedSample]) -> bool:
    """Return whether traces determine an overlapped schedule: one row, and no other input."""
    return can_replay(facts.schedule) and all(len(unit.traces) == unit.turns for unit in units)


def lane_costs(
    units: Sequence[PairedSample], taken: Sequence[Turn], V: Mapping[int, float]
) -> prediction.Costs:
    """Return what the lanes of an overlapped run took, in forwards over one token.

    These are a drafted token, a forward of each width, and the rest.
    """
    shape = prediction.Costs(0.0, V)
    forwards = [shape.V_at(turn.width) for turn in taken if turn.width]
    t_1 = sum(unit.target_seconds for unit in units) / sum(forwards)
    rest = sum(unit.seconds - unit.lanes_seconds for unit in units) / len(forwards)
    base = sum(unit.base_seconds for unit in units) / sum(unit.base_batch_rounds for unit in units)
    draft = sum(unit.draft_seconds for unit in units) / max(1, sum(turn.drafted for turn in taken))
    return prediction.Costs(draft / t_1, V, overhead=rest / t_1, baseline_overhead=base / t_1 - 1.0)


def _reached(units_by_gamma: ByGamma) -> list[int]:
    """Return for each depth the rounds in which it could be offered.

    That is: gamma allows it, and all depths before it were accepted.
    """
    reached_D = [0] * max(units_by_gamma)
    for gamma, units in units_by_gamma.items():
        accepted = tested_counts(units)[1]
        passed = [sum(unit.rounds for unit in units), *accepted, *([0] * gamma)][:gamma]
        reached_D = [sum(pair) for pair in itertools.zip_longest(reached_D, passed, fillvalue=0)]
    return reached_D


def mean_round_ms(units: Sequence[PairedSample]) -> float:
    """Return the wall time of a round: the batch's time over its target forwards."""
    return 1000 * sum(unit.seconds for unit in units) / sum(unit.batch_rounds for unit in units)


def mean_draft_ms(units: Sequence[PairedSample], facts: DrafterFacts, parts: PartTimes) -> float:
    """Return the drafting time of a mean round, from the timed step."""
    if facts.schedule == ALONE or facts.one_pass:
        return parts.t_draft_ms
    return parts.at(mean_beams(units)).t_draft_ms * _per_round(
        units, [unit.draft_steps for unit in units]
    )


def mean_beams(units: Sequence[PairedSample]) -> float:
    """Return the mean number of beams that a draft step started from."""
    steps = sum(unit.draft_steps for unit in units)
    return sum(unit.draft_beams for unit in units) / steps if steps else 1.0


def mean_target_ms(units: Sequence[PairedSample], facts: DrafterFacts, parts: PartTimes) -> float:
    """Return t_target at the mean width, interpolated between timed widths."""
    if facts.schedule == ALONE:
        return 0.0
    widths = sorted(parts.t_target_ms)
    width = 1 + _per_round(units, [unit.verified for unit in units])
    return float(np.interp(width, widths, [parts.t_target_ms[n] for n in widths]))


def busy_ms(units: Sequence[PairedSample], facts: DrafterFacts, parts: PartTimes) -> float:
    """Return the time of the models in a mean round.

    Drafting and verifying as timed, or the longer lanes of an overlapped schedule.
    """
    if facts.schedule in SCHEDULES:
        return (
            1000
            * sum(unit.lanes_seconds for unit in units)
            / sum(unit.batch_rounds for unit in units)
        )
    return mean_draft_ms(units, facts, parts) + mean_target_ms(units, facts, parts)


def _per_round(units: Sequence[PairedSample], counts: Sequence[int]) -> float:
    return sum(counts) / sum(unit.batch_rounds for unit in units)

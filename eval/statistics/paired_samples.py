"""Pairs of a drafter's and the baseline's records, and the acceptance and costs of many pairs.

Legend: D depths of a chain.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np

from decoding.costs import prediction
from decoding.schedules.by_name import SCHEDULES
from eval.measure.records import Record
from eval.statistics import metrics
from eval.statistics.pearl_trace import Turn, has_trace_turns, mean_lanes
from eval.statistics.schema import DrafterFacts, PartTimes
from jobs.drafter_use import ALONE

PARTS = ("propose", "forward", "verify", "rest")  # of a round


@dataclass
class PairedSample:
    """Counts and times of one unit, with the drafter and with the baseline.

    A unit is a prompt, or the prompts of a batch. Its turns and samples are summed.
    """

    ids: list[str] = field(default_factory=list)
    turns: int = 0  # decode calls
    categories: list[str] = field(default_factory=list)
    distinct_4: list[float] = field(default_factory=list)  # of the baseline's texts
    tokens: int = 0  # emitted; the prefill emits none
    rounds: int = 0  # of single rows, for tau
    batch_rounds: int = 0  # target forwards, for times
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    base_tokens: int = 0
    base_batch_rounds: int = 0
    base_seconds: float = 0.0
    base_prefill_seconds: float = 0.0
    cpu_seconds: float = 0.0  # of both sides
    drafted: int = 0  # of single rows
    draft_steps: int = 0
    draft_beams: int = 0  # from which the draft steps started
    verified: int = 0
    lanes_seconds: float = 0.0  # overlapped schedules: the longer lane of each round
    draft_seconds: float = 0.0  # the drafter's lane
    target_seconds: float = 0.0  # the target's lane
    shorter_seconds: float = 0.0  # the shorter lane of each round
    forward_seconds: float = 0.0  # part of `seconds`: the target's forwards
    verify_seconds: float = 0.0  # part of `seconds`: verification
    base_forward_seconds: float = 0.0
    base_verify_seconds: float = 0.0
    untimed: int = 0  # decode calls whose parts were not measured
    traces: list[str] = field(default_factory=list)  # see Generation.trace
    tested: list[list[int]] = field(default_factory=list)
    accepted: list[list[int]] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Tokens/s of the drafter over the baseline's."""
        return self.tokens / self.seconds * self.base_seconds / self.base_tokens

    @property
    def round_ms(self) -> float:
        """Wall milliseconds of a round: the batch's time over its target forwards."""
        return 1000 * self.seconds / self.batch_rounds

    @property
    def base_round_ms(self) -> float:
        """Wall milliseconds of a round of the baseline."""
        return 1000 * self.base_seconds / self.base_batch_rounds

    @property
    def parts_ms(self) -> dict[str, float]:
        """Wall milliseconds of a mean round by part; empty if they were not measured."""
        spent = (self.draft_seconds, self.forward_seconds, self.verify_seconds)
        return {} if self.untimed else _parts_ms(spent, self.seconds, self.batch_rounds)

    @property
    def base_parts_ms(self) -> dict[str, float]:
        """Wall milliseconds of a mean round of the baseline by part; empty if not measured."""
        spent = (0.0, self.base_forward_seconds, self.base_verify_seconds)
        return {} if self.untimed else _parts_ms(spent, self.base_seconds, self.base_batch_rounds)

    @property
    def beams(self) -> float:
        """Mean number of beams from which a draft step started."""
        return self.draft_beams / self.draft_steps if self.draft_steps else 1.0

    @property
    def cpu_share(self) -> float:
        """Share of the time of both sides in which decoding had its processors."""
        drafted = self.seconds + self.prefill_seconds
        return self.cpu_seconds / (drafted + self.base_seconds + self.base_prefill_seconds)

    @property
    def tested_counts(self) -> tuple[list[int], list[int]]:
        """Sums (tested_D, accepted_D) of the draft tokens tested and accepted at each depth."""
        return metrics.add_by_depth(self.tested), metrics.add_by_depth(self.accepted)


def _parts_ms(spent: Sequence[float], seconds: float, rounds: int) -> dict[str, float]:
    """Return the mean milliseconds of PARTS. spent: seconds of all but the last, the rest."""
    everything = (*spent, seconds - sum(spent))
    return {name: 1000 * part / rounds for name, part in zip(PARTS, everything, strict=True)}


def total(samples: Iterable[PairedSample]) -> PairedSample:
    """Return the sum of samples: all numbers are added, all lists are joined."""
    everyone, found = list(samples), PairedSample()
    if len(everyone) == 1:
        return everyone[0]
    for name, start in vars(found).items():
        values = map(attrgetter(name), everyone)
        joins = isinstance(start, list)
        vars(found)[name] = list(itertools.chain.from_iterable(values)) if joins else sum(values)
    return found


def speed_columns(units: Sequence[PairedSample]) -> list[list[float]]:
    """Return (tokens_P, seconds_P, base_tokens_P, base_seconds_P) for the paired bootstrap."""
    names = ("tokens", "seconds", "base_tokens", "base_seconds")
    return [[vars(unit)[name] for unit in units] for name in names]


def unit_speeds(records: Iterable[Record]) -> dict[int, tuple[int, float]]:
    """Return the tokens and seconds of each unit; a batch takes as long as its longest row.

    They are those of `PairedSample`, without the rest of it.
    """
    found: dict[int, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for (unit, _, _), rows in _by_batch(records).items():
        tokens, seconds = found[unit]
        tokens += sum(len(row.tokens) for row in rows)
        found[unit] = tokens, seconds + _most(rows, "decode_seconds")
    return found


def pair_samples(records: Iterable[Record], baseline: Iterable[Record]) -> list[PairedSample]:
    """Pair a drafter's records with the baseline's of the same units.

    Raises KeyError if a side lacks a unit.
    """
    drafted, plain = _by_batch(records), _by_batch(baseline)
    if lacking := drafted.keys() ^ plain.keys():
        raise KeyError(f"drafter and baseline differ in their prompts: {sorted(lacking)}")
    batches: dict[int, list[PairedSample]] = defaultdict(list)
    for key, rows in drafted.items():
        batches[key[0]].append(_pair_batch(rows, plain[key]))
    return [total(batches[unit]) for unit in sorted(batches)]


def _by_batch(records: Iterable[Record]) -> dict[tuple[int, int, int], list[Record]]:
    """Group the records that were decoded together, by (unit, sample, turn)."""
    batches: dict[tuple[int, int, int], list[Record]] = defaultdict(list)
    for record in records:
        batches[record.unit, record.sample, record.turn].append(record)
    return batches


def _pair_batch(rows: Sequence[Record], base: Sequence[Record]) -> PairedSample:
    """Pair the rows of one decode call. A batch takes as long as its longest row."""
    first = [row for row in rows if (row.sample, row.turn) == (0, 0)]
    return PairedSample(
        ids=[row.prompt_id for row in first],
        turns=1,
        categories=[row.category for row in first],
        distinct_4=[row.distinct_4 for row in base],
        tokens=sum(len(row.tokens) for row in rows),
        rounds=sum(row.rounds for row in rows),
        batch_rounds=_most(rows, "rounds"),
        seconds=_most(rows, "decode_seconds"),
        prefill_seconds=rows[0].prefill_seconds,
        base_tokens=sum(len(row.tokens) for row in base),
        base_batch_rounds=_most(base, "rounds"),
        base_seconds=_most(base, "decode_seconds"),
        base_prefill_seconds=base[0].prefill_seconds,
        cpu_seconds=rows[0].cpu_seconds + base[0].cpu_seconds,
        drafted=sum(row.drafted for row in rows),
        draft_beams=max(row.draft_beams or row.draft_steps for row in rows),
        traces=[row.trace for row in rows],
        tested=[row.tested_by_depth for row in rows],
        accepted=[row.accepted_by_depth for row in rows],
        **{name: _most(rows, name) for name in _LONGEST},
        base_forward_seconds=_most(base, "forward_seconds"),
        base_verify_seconds=_most(base, "verify_seconds"),
        untimed=min(row.forward_seconds for row in (*rows, *base)) <= 0,
    )


# fields of a batch's longest row
_LONGEST = (
    *("draft_steps", "verified", "lanes_seconds", "draft_seconds", "target_seconds"),
    *("shorter_seconds", "forward_seconds", "verify_seconds"),
)


def _most(rows: Sequence[Record], name: str) -> Any:
    """Return the largest value of a field; pages of 10,000 prompts have a million of one row."""
    return getattr(rows[0], name) if len(rows) == 1 else max(map(attrgetter(name), rows))


def draft_ms(sample: PairedSample, facts: DrafterFacts, parts: PartTimes) -> float:
    """Return the milliseconds of drafting in a mean round, computed from the timed draft step."""
    if facts.schedule == ALONE or facts.one_pass:
        return parts.t_draft_ms
    return parts.at(sample.beams).t_draft_ms * (sample.draft_steps / sample.batch_rounds)


def target_ms(sample: PairedSample, facts: DrafterFacts, parts: PartTimes) -> float:
    """Return t_target in ms at the mean width, interpolated between timed widths; 0 if alone."""
    if facts.schedule == ALONE:
        return 0.0
    widths = sorted(parts.t_target_ms)
    width = 1 + sample.verified / sample.batch_rounds
    return float(np.interp(width, widths, [parts.t_target_ms[n] for n in widths]))


def busy_ms(sample: PairedSample, facts: DrafterFacts, parts: PartTimes) -> float:
    """Return the milliseconds that the models work in a mean round.

    This is the timed drafting and verification, or the longer lane of an overlapped schedule.
    """
    if facts.schedule in SCHEDULES:
        return 1000 * sample.lanes_seconds / sample.batch_rounds
    return draft_ms(sample, facts, parts) + target_ms(sample, facts, parts)


# --------------------------------------------------------------------------------------- prediction
@dataclass(frozen=True)
class Pool:
    """Acceptance and costs of a drafter under one condition, over all its draft lengths."""

    # P(depth k is offered and accepted | the depths before it were accepted)
    pass_rates: list[float | None]
    costs: prediction.Costs
    # least share of its time in which a measurement behind the costs had its processors
    cpu_share: float


ByGamma = Mapping[int, PairedSample]  # draft length -> the sum of the units that ran at it


def pool_counts(
    judged: ByGamma,
    timed: ByGamma,
    facts: DrafterFacts,
    parts: PartTimes,
    parts_then: PartTimes,
    limit: int,
) -> Pool:
    """Return the acceptance and costs from which the speedup of `judged` is predicted.

    The overhead comes from the rounds of `timed`, all else from the rounds of `judged`. parts,
    parts_then: part times measured between the rounds of `judged` and of `timed`, as the speed of a
    machine varies. limit: maximum number of tokens of a generation.

    For a drafter that always proposes gamma tokens, pass_k is alpha_k. A drafter that proposes
    fewer also misses the rounds without an offer: pass_k = accepted_k / accepted_(k-1), where
    accepted_0 is the number of rounds.
    """
    everything = total(judged.values())
    tested, accepted = everything.tested_counts
    reached = _reached(judged)
    parts, parts_then = parts.at(everything.beams), parts_then.at(everything.beams)
    passes, nodes = metrics.usable_alpha(tested, accepted), _by_length(parts, judged, timed)
    overlapped = facts.schedule in SCHEDULES
    # The last round of a generation may have no room for a full proposal; any other short one is
    # the drafter's choice.
    if sum(reached) - sum(tested) > len(everything.tested):
        passes = [
            have / before if before else None
            for have, before in zip(accepted, reached, strict=False)
        ]
    elif all(count <= gamma for gamma, (count, _) in nodes.items()):  # no tree
        nodes = {gamma: (float(gamma), steps) for gamma, (_, steps) in nodes.items()}
    if overlapped:  # a window begins anywhere in a chunk, so depth means nothing
        passes, nodes = [metrics.alpha(tested, accepted)], {}
    if not passes or passes[0] is None:  # no token was offered, so none is accepted
        passes = [0.0]
    costs = prediction.Costs(
        **_ratios(parts),
        one_pass=facts.one_pass,
        nodes={gamma: count for gamma, (count, _) in nodes.items()},
        steps={gamma: count * steps for gamma, (count, steps) in nodes.items()},
        overlapped=overlapped,
        deepest=max(*judged, *timed),
        policy_lengths=facts.length_cap is not None,
    )
    overhead = _overhead(timed, facts, parts_then, replace(costs, **_ratios(parts_then)), limit)
    base_overhead = everything.base_round_ms / parts.t_target_ms[1] - 1.0
    costs = replace(costs, overhead=overhead, baseline_overhead=base_overhead)
    shares = (parts.cpu_share, parts_then.cpu_share, everything.cpu_share)
    return Pool(passes, costs, min(*shares, total(timed.values()).cpu_share))


def _ratios(parts: PartTimes) -> dict[str, Any]:
    return {
        "cost_ratio": parts.t_draft_ms / parts.t_target_ms[1],
        "V": metrics.cost_table(parts.t_target_ms),
    }


def _by_length(parts: PartTimes, judged: ByGamma, timed: ByGamma) -> dict[int, tuple[float, float]]:
    """Return for each draft length the nodes verified in a mean round, and draft steps per node.

    A length in both groups takes its figures from `judged`.
    """
    found: dict[int, tuple[float, float]] = {}
    for gamma, sample in {**timed, **judged}.items():
        # Draft steps of short drafts are narrower on average: the first one has a single beam.
        by_beams = parts.t_draft_by_beams_ms
        share = parts.at(sample.beams).t_draft_ms / parts.t_draft_ms if by_beams else 1.0
        steps = share * sample.draft_steps
        per_node = steps / sample.verified if sample.verified else 0.0
        found[gamma] = (sample.verified / sample.batch_rounds, per_node)
    return found


def _overhead(
    timed: ByGamma, facts: DrafterFacts, parts: PartTimes, costs: prediction.Costs, limit: int
) -> float:
    """Return o: the mean time of rounds beyond their parts, over t_target(1).

    The parts of an overlapped round are its lanes as timed alone, combined by its trace.
    """
    t_1 = parts.t_target_ms[1]
    extra_ms = []
    for gamma, sample in timed.items():
        busy = busy_ms(sample, facts, parts)
        if predictable_from_traces(facts, sample):
            busy = t_1 * mean_lanes(sample.traces, gamma, limit, facts.schedule, costs)
        extra_ms.append(sample.round_ms - busy)
    return float(np.mean(extra_ms)) / t_1


def predictable_from_traces(facts: DrafterFacts, sample: PairedSample) -> bool:
    """Return whether the traces alone determine the rounds: one row per batch, and not PEARL+."""
    return has_trace_turns(facts.schedule) and len(sample.traces) == sample.turns


def lane_costs(
    sample: PairedSample, taken: Sequence[Turn], V: Mapping[int, float]
) -> prediction.Costs:
    """Return the costs of an overlapped run's lanes, in units of a target forward over one token.

    taken: the turns that follow from the run's traces. The costs are the run's means for a drafted
    token, for a forward of each width, and for the rest of a round.
    """
    shape = prediction.Costs(0.0, V)
    forwards = [shape.V_at(turn.width) for turn in taken if turn.width]
    t_1 = sample.target_seconds / sum(forwards)
    rest = (sample.seconds - sample.lanes_seconds) / len(forwards)
    base = sample.base_seconds / sample.base_batch_rounds
    draft = sample.draft_seconds / max(1, sum(turn.drafted for turn in taken))
    return prediction.Costs(draft / t_1, V, overhead=rest / t_1, baseline_overhead=base / t_1 - 1.0)


def _reached(by_gamma: ByGamma) -> list[int]:
    """Return for each depth the rounds in which a token could be offered there.

    In these rounds gamma allows the depth, and the tokens at all depths before it were accepted.
    """
    reached_D = [0] * max(by_gamma)
    for gamma, sample in by_gamma.items():
        passed = [sample.rounds, *sample.tested_counts[1], *([0] * gamma)][:gamma]
        reached_D = [sum(pair) for pair in itertools.zip_longest(reached_D, passed, fillvalue=0)]
    return reached_D

"""Clocks of PEARL's schedules: decoding takes exactly the time that its trace predicts.

The two lanes take known times, on the virtual and the wall clock. All times are multiples of 1/8,
so nothing is rounded.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from decoding.costs.prediction import Costs
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.remote import RemoteChain
from decoding.interfaces import Observation, Proposal, Stopping, Target
from decoding.loop import decode
from decoding.rounds import batch
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.sampling.token_chooser import TokenChooser
from decoding.schedules import pearl, pearl_wall
from eval.statistics.pearl_trace import lanes, speedup_from_trace, turns
from tests.decoding.test_laws import models
from tests.support.tiers import tiered
from tests.support.tiny_targets import random_prompts

GAMMA, LIMIT = 4, 40
DRAFT, REST = 0.375, 0.125  # seconds per drafted token, and per round for the rest
V = {n: 1 + 0.125 * (n - 1) for n in range(1, GAMMA + 2)}  # seconds of a forward over n tokens
COSTS = Costs(DRAFT, V, overhead=REST)
SCHEDULES = [
    f"pearl_{clock}{without}"
    for clock in ("virtual", "wall")
    for without in ("", "_wo_pre", "_wo_post")
]


class Clock:
    """A clock that advances only when the test advances it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Worker(RemoteChain):
    """A worker's drafter that runs in this process and takes its time on the test's clock.

    It drafts while the target runs or, without `overlaps`, afterwards.
    """

    def __init__(self, model: Target, clock: Clock, overlaps: bool) -> None:
        self._chain, self._clock, self._overlaps = ChainDrafter(model=model), clock, overlaps
        self.name, self.target_cores = "worker", []
        self.num_layers = self.num_parameters = 1

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Any, capacity: int
    ) -> None:
        self._chain.open(prompts_B, None, capacity)

    def begin(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: TokenChooser,
        least: int | None = None,
    ) -> None:
        self._drafted = self._chain.propose(sequences_B, budgets_B, stopping_B, chooser)
        self._began = self._clock.now

    def finish(self) -> Proposal:
        self.worker_seconds = self._drafted.steps * DRAFT
        began = self._began if self._overlaps else self._clock.now
        self._clock.now = max(self._clock.now, began + self.worker_seconds)
        return self._drafted

    def observe(self, observation: Observation) -> None: ...

    def rollback(self, lengths_B: Sequence[int]) -> None:
        self._chain.rollback(lengths_B)

    def select(self, rows: Sequence[int]) -> None:
        self._chain.select(rows)


def decoded(
    schedule: str, monkeypatch: pytest.MonkeyPatch, overlaps: bool = True
) -> list[Generation]:
    """Decode six prompts, with a clock that only the models and the verification rule advance."""
    clock = Clock()
    target, _, draft_model = models()
    with monkeypatch.context() as context:
        for module in (batch, pearl, pearl_wall):
            context.setattr(module, "perf_counter", clock)

        def act(function: Any, seconds: Any) -> Any:
            def acting(*given: Any) -> Any:
                result = function(*given)
                clock.now += seconds(given, result)
                return result

            return acting

        context.setattr(
            target, "forward", act(target.forward, lambda given, _: V[given[0].shape[1]])
        )
        context.setitem(batch.RULES, "greedy", act(batch.RULES["greedy"], lambda *_: REST))
        drafter: Any = Worker(draft_model, clock, overlaps)
        if "wall" not in schedule:
            drafter = ChainDrafter(model=draft_model)
            context.setattr(
                drafter, "propose", act(drafter.propose, lambda _, chunk: chunk.steps * DRAFT)
            )
        settings = Settings(
            max_new_tokens=LIMIT, num_draft_tokens=GAMMA, stop_token_ids=(3, 17), schedule=schedule
        )
        return [decode(target, drafter, [prompt], settings)[0] for prompt in random_prompts(6)]


@pytest.fixture(scope="module")
def traces() -> list[str]:
    """Return the acceptance trace of each text, which is the same under all schedules."""
    found = [generation.trace for generation in decoded("pearl_virtual", pytest.MonkeyPatch())]
    assert any("0" in trace for trace in found) and any("1111" in trace for trace in found)
    return found


@pytest.mark.parametrize(
    "schedule", tiered(SCHEDULES, ["pearl_virtual", "pearl_wall_wo_pre", "pearl_wall_wo_post"])
)
def test_the_trace_predicts_the_schedules_clock(
    schedule: str, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for trace, done in zip(traces, decoded(schedule, monkeypatch), strict=True):
        taken = list(turns(trace, GAMMA, LIMIT, schedule.replace("wall", "virtual")))
        assert done.lanes_seconds == sum(lanes(turn, COSTS) for turn in taken)
        assert done.decode_seconds == done.lanes_seconds + REST * done.rounds
        assert speedup_from_trace(taken, COSTS) == len(done.tokens) / done.decode_seconds
        assert done.target_seconds == sum(V[turn.width] for turn in taken if turn.width)
        assert done.draft_seconds == sum(turn.drafted * DRAFT for turn in taken)


def test_lanes_that_wait_differ_from_the_prediction(
    traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a worker that drafts only after the target is slower than its trace predicts."""
    for trace, done in zip(traces, decoded("pearl_wall", monkeypatch, overlaps=False), strict=True):
        taken = list(turns(trace, GAMMA, LIMIT, "pearl_wall"))
        assert speedup_from_trace(taken, COSTS) > 1.05 * len(done.tokens) / done.decode_seconds

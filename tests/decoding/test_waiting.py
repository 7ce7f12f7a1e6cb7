"""The number of times that a round waits for the device.

On a CPU the host is made to run ahead, and every way to read a tensor is counted; on a GPU, CUDA's
sync debug mode reports waits. Decisions of the device versions are tested in test_running_ahead.py.

Shapes: B rows.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.self_speculation import SelfSpeculation
from decoding.drafters.trees.graph import GraphDrafter
from decoding.drafters.trees.ranked import RankedTree
from decoding.interfaces import Drafter, Proposal, Target
from decoding.loop import decode, prefill_batch
from decoding.rounds.settings import Settings
from decoding.sampling.logits_processors import DraftProcessors
from decoding.schedules.by_name import VIRTUAL
from tests.support.host_waits import (
    NAMED,
    PENALISED,
    PENALTY,
    REAL,
    WAYS,
    Waits,
    models,
    settings_of,
)
from tests.support.tiers import tiered
from tests.support.tiny_targets import VOCABULARY, random_prompts

from .rows import DrafterRow, Kit
from .test_laws import is_quick


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    "way",
    WAYS,
    ids=lambda way: " ".join(str(v) for v in way.values() if isinstance(v, (str, float))),
)
@pytest.mark.parametrize("batch", tiered([1, 3], [3]))
@pytest.mark.parametrize("drafts", [True, False])
def test_a_round_waits_once(
    monkeypatch: pytest.MonkeyPatch, way: dict[str, Any], batch: int, drafts: bool
) -> None:
    target, draft_model = models()
    assert target.backend == "native graph"
    settings = Settings(max_new_tokens=24, num_draft_tokens=3, **{"temperature": 1.0, **way})
    with torch.inference_mode():
        running = prefill_batch(
            target,
            ChainDrafter(model=draft_model) if drafts else None,
            random_prompts(batch),
            settings,
        )
        rounds, waits = 0, Waits()
        with waits.counting(monkeypatch):
            while running.rows:
                running.round()
                rounds += 1
    assert waits.stray == []
    assert waits.meant == rounds


def waits_of(name: str, rounds: int, drafting: int, draft_steps: int) -> int:
    """Return the number of waits that the law allows: one per round.

    Ouroboros looks phrases up on the host, so each forward of its draft model waits too. A block's
    tree is chosen on the host, and so is the length of a draft that a confidence ends. A draft in
    another vocabulary is translated on the host, once in each round that drafts.
    """
    if name.startswith("other_vocabulary"):
        return rounds + drafting
    more = ("ouroboros", "block_tree", "dspark_confident", "dspark_by_cost")
    return rounds + (draft_steps if name.startswith(more) else 0)


@lru_cache
def plain(rule: str, penalty: float = 1.0) -> list[list[int]]:
    """Return the target's autoregressive text on a host that does not run ahead."""
    settings = settings_of(rule, repetition_penalty=penalty)
    return [row.tokens for row in decode(models()[0], None, random_prompts(3), settings)]


@pytest.mark.parametrize(
    ("row", "rule", "penalty"),
    tiered(
        [(row, rule, 1.0) for row in REAL for rule in row.rules]
        + [(NAMED[name], rule, PENALTY) for name, rule in PENALISED],
        lambda row, rule, penalty: is_quick(row, rule) or penalty == PENALTY,
    ),
    ids=lambda value: value.name if isinstance(value, DrafterRow) else str(value),
)
def test_every_row_waits_once_a_round(
    monkeypatch: pytest.MonkeyPatch, row: DrafterRow, rule: str, penalty: float
) -> None:
    """Check each row's waits, and that its greedy and coupled text is the target's."""
    expected = plain(rule, penalty) if rule in ("greedy", "coupled") else None
    monkeypatch.setattr(devices, "runs_ahead", lambda device: True)
    target, draft_model = models()
    drafter = row.make(Kit(target, target, draft_model, ()))
    with torch.inference_mode():
        running = prefill_batch(
            target, drafter, random_prompts(3), settings_of(rule, repetition_penalty=penalty)
        )
        done = [one.generation for one in running.rows]
        steps, waits = [0], Waits()  # draft steps so far, after each round
        with waits.counting(monkeypatch):
            while running.rows:
                running.round()
                steps.append(max(one.draft_steps for one in done))
    rounds, drafting = len(steps) - 1, len(set(steps)) - 1
    assert waits.stray == []
    assert waits.meant == waits_of(row.name, rounds, drafting, steps[-1])
    assert expected is None or [one.tokens for one in done] == expected


def test_control_extra_waits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the eager graph's reads and indexing by lists are counted."""
    target, draft_model = models()
    drafter, waits = GraphDrafter(model=draft_model), Waits()
    with torch.inference_mode():
        running = prefill_batch(target, drafter, random_prompts(2), settings_of("greedy"))
        monkeypatch.setattr(devices, "runs_ahead", lambda device: True)
        with waits.counting(monkeypatch):
            running.round()
    assert set(waits.stray) == {"tolist"} and waits.meant == 1
    numbers_BN = torch.zeros(2, 3)
    with waits.counting(monkeypatch):
        numbers_BN[:, [0, 2]] += numbers_BN[numbers_BN > 0].sum()
    assert waits.stray[-3:] == ["__getitem__", "__getitem__", "__setitem__"]


@pytest.mark.usefixtures("ahead")
def test_control_a_penalty_on_host_tokens_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that reading every drafted token on the host is counted."""
    original = DraftProcessors.add

    def read(self: DraftProcessors, tokens_B: Tensor) -> None:
        original(self, torch.tensor(tokens_B.tolist()))

    monkeypatch.setattr(DraftProcessors, "add", read)
    target, draft_model = models()
    waits, settings = Waits(), settings_of("greedy", repetition_penalty=PENALTY)
    with torch.inference_mode():
        running = prefill_batch(
            target, ChainDrafter(model=draft_model), random_prompts(2), settings
        )
        with waits.counting(monkeypatch):
            running.round()
    assert waits.stray == ["tolist", "torch.tensor"] * 2


def other_half(text: Sequence[int]) -> range:
    """Return the tokens whose parity differs from the last one's."""
    return range((text[-1] + 1) % 2, VOCABULARY, 2)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("rule", ["greedy", "token"])
@pytest.mark.parametrize("tree", [False, True])
def test_allowed_tokens_wait_for_the_draft(
    monkeypatch: pytest.MonkeyPatch, tree: bool, rule: str
) -> None:
    """Check the further waits of `allowed`: one per tree, or one per drafted token of a chain."""
    target, draft_model = models()
    drafter = RankedTree(model=draft_model, frontier=3) if tree else ChainDrafter(model=draft_model)
    waits, rounds, drafts = Waits(), 0, 0
    with torch.inference_mode():
        running = prefill_batch(
            target, drafter, random_prompts(1), settings_of(rule, allowed=other_half)
        )
        (done,) = [row.generation for row in running.rows]
        with waits.counting(monkeypatch):
            while running.rows:
                steps = done.draft_steps
                running.round()
                rounds, drafts = rounds + 1, drafts + (done.draft_steps > steps)
    assert waits.stray == [] and drafts > 1
    assert waits.meant == rounds + (drafts if tree else done.draft_steps)


class Lanes(ChainDrafter):
    """Chain drafter that counts its proposals."""

    asked = 0

    def propose(self, *given: Any) -> Proposal:
        self.asked += 1
        return super().propose(*given)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    ("rule", "penalty"), [("greedy", PENALTY), ("token", 1.0), ("coupled", 1.0)]
)
@pytest.mark.parametrize("schedule", VIRTUAL)
def test_an_overlapped_round_waits_once_and_for_its_clock(
    monkeypatch: pytest.MonkeyPatch, schedule: str, rule: str, penalty: float
) -> None:
    """Check one wait per round for chunk and outcome, and one per lane for its virtual clock."""
    expected = plain(rule, penalty)[0] if rule != "token" else None
    target, draft_model = models()
    drafter, waits = Lanes(model=draft_model), Waits()
    settings = settings_of(rule, schedule=schedule, repetition_penalty=penalty)
    with torch.inference_mode():
        running = prefill_batch(target, drafter, random_prompts(3)[:1], settings)
        (done,) = [row.generation for row in running.rows]
        rounds = 0
        with waits.counting(monkeypatch):
            while running.rows:
                running.round()
                rounds += 1
    assert waits.stray == []
    assert waits.meant == rounds
    assert waits.timed == drafter.asked + done.rounds, "the drafter's lanes and the target's"
    assert expected is None or done.tokens == expected


@pytest.mark.usefixtures("ahead")
def test_a_partial_view_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that batches replay a view's steps; a larger cache or a new view records again."""
    recorded: list[object] = []
    monkeypatch.setattr(
        devices, "capture", lambda body, device, memory: recorded.append(body) or body
    )
    target, _ = models()
    kept = SelfSpeculation(attention=(1,), mlp=(0,))
    settings, counts = settings_of("greedy"), []
    for drafter, rows in (
        (kept, 1),
        (kept, 1),
        (kept, 3),
        (kept, 3),
        (SelfSpeculation(attention=(1,), mlp=(0,)), 3),
    ):
        texts = [
            done.tokens for done in decode(target, drafter, random_prompts(3)[:rows], settings)
        ]
        assert texts == plain("greedy")[:rows]
        counts.append(len(recorded))
    assert counts[0] == counts[1] < counts[2] == counts[3] < counts[4]


def rounds_without_other_waits(
    target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], settings: Settings
) -> None:
    """Decode in CUDA's sync debug mode, which raises at an unexpected wait."""
    decode(target, drafter, prompts, settings)  # records every shape
    with torch.inference_mode():
        running = prefill_batch(target, drafter, prompts, settings)
        with devices.no_waiting(target.device):
            while running.rows:
                running.round()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.get("verify", "greedy")))
@pytest.mark.parametrize("drafts", [True, False])
def test_sync_debug_mode_finds_no_other_wait(way: dict[str, Any], drafts: bool) -> None:
    target, draft_model = models("cuda")
    drafter: Drafter | None = ChainDrafter(model=draft_model) if drafts else None
    settings = Settings(max_new_tokens=24, num_draft_tokens=3, **{"temperature": 1.0, **way})
    prompts = random_prompts(2)
    rounds_without_other_waits(target, drafter, prompts, settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize(
    ("row", "rule", "penalty"),
    [(row, rule, 1.0) for row in REAL for rule in row.rules]
    + [(NAMED[name], rule, PENALTY) for name, rule in PENALISED],
    ids=lambda value: value.name if isinstance(value, DrafterRow) else str(value),
)
def test_sync_debug_mode_finds_no_other_wait_in_any_row(
    row: DrafterRow, rule: str, penalty: float
) -> None:
    target, draft_model = models("cuda")
    drafter = row.make(Kit(target, target, draft_model, ()))
    prompts, settings = random_prompts(2), settings_of(rule, repetition_penalty=penalty)
    rounds_without_other_waits(target, drafter, prompts, settings)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("rule", ["greedy", "token", "coupled"])
@pytest.mark.parametrize("schedule", VIRTUAL)
def test_sync_debug_mode_finds_no_other_wait_under_an_overlapped_schedule(
    schedule: str, rule: str
) -> None:
    """Check the schedule in sync debug mode, which admits the clock's explicit waits."""
    target, draft_model = models("cuda")
    drafter, prompts, settings = (
        ChainDrafter(model=draft_model),
        random_prompts(1),
        settings_of(rule, schedule=schedule),
    )
    rounds_without_other_waits(target, drafter, prompts, settings)

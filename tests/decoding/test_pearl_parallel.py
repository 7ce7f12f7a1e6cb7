"""The parallel chain (PARD) under PEARL's schedules: what it drafts from, its costs, its worker.

It reads the text alone, so it drafts on while the target verifies. Laws 1, 2 and 5 are in
test_pearl.py and test_pearl_edges.py, law 3 in test_law_of_overlap.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.parallel import ParallelChain
from decoding.drafters.remote import RemoteChain, RemoteParallelChain
from decoding.errors import UserError
from decoding.interfaces import Drafter, Proposal, RoundCosts
from decoding.loop import decode, prefill_batch
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from decoding.schedules.by_name import WALL
from decoding.schedules.pearl_plus import PearlPlus, PearlPlusWall
from jobs.drafter_use import DrafterUse
from jobs.drafters import build, uses
from tests.support.tiny_targets import VOCABULARY, hf_model, native_of, random_prompts

from .row_kinds.models import parallel_of
from .test_laws import models, with_rule

OPTIONS: dict[str, Any] = {"tokens": 4, "mask_token": VOCABULARY - 1, "dtype": "float64"}
EXPENSIVE = RoundCosts(0.4, (1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.12, 1.14))


@pytest.mark.parametrize("schedule", ["pearl_virtual", "pearl_plus_virtual"])
def test_a_chunk_is_that_of_a_new_drafter_after_the_same_text(schedule: str) -> None:
    """Check tokens and q after assumed tokens, which the target has not read yet."""
    target, _, draft_model = models()
    assert isinstance(draft_model, NativeTarget)
    drafter, ahead = parallel_of(draft_model), 0
    propose = drafter.propose

    def watched(texts_B: Sequence[Sequence[int]], *given: Any) -> Proposal:
        nonlocal ahead
        chunk = propose(texts_B, *given)
        fresh = parallel_of(native_of(hf_model("llama", layers=2), noise=0.03))
        fresh.open(texts_B, None, 80)
        expected = fresh.propose(texts_B, *given)
        assert chunk.tokens_BN.tolist() == expected.tokens_BN.tolist()
        torch.testing.assert_close(chunk.q_BNV, expected.q_BNV)
        ahead += len(texts_B[0]) > target.lengths_B[0] + 1
        return chunk

    drafter.propose = watched  # type: ignore[method-assign]
    settings = with_rule(
        "token", max_new_tokens=30, num_draft_tokens=3, schedule=schedule, costs=EXPENSIVE
    )
    (done,) = decode(target, drafter, [[4, 5]], settings)
    assert ahead > 3 and len(done.tokens) == 30


def chosen_lengths(drafter: Drafter) -> set[int]:
    """Return the draft lengths that PEARL+ chooses for a drafter whose tokens are all accepted."""
    settings = Settings(
        60, num_draft_tokens=7, schedule="pearl_plus_virtual", costs=EXPENSIVE, stopping="fixed"
    )
    batch = prefill_batch(models()[0], drafter, random_prompts(1), settings)
    assert isinstance(batch, PearlPlus)
    while batch.rows:
        batch.round()
    return {choice.gamma for choice in batch.chosen}


def test_pearl_plus_charges_a_chunk_of_any_length_once() -> None:
    """Check that longer chunks pay for one forward a chunk, and not for one a token."""
    _, twin, _ = models()
    assert min(chosen_lengths(parallel_of(twin))) > max(chosen_lengths(ChainDrafter(model=twin)))


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[RemoteParallelChain]:
    drafter = RemoteParallelChain(folder, draft_cores=0, **OPTIONS)
    yield drafter
    drafter.close()


def counts(done: Sequence[Any]) -> list[Any]:
    return [(g.tokens, g.rounds, g.drafted, g.tested_by_depth, g.finish) for g in done]


@pytest.mark.long
@pytest.mark.parametrize("rule", ["greedy", "token", "coupled"])
@pytest.mark.parametrize("schedule", ["serial", *WALL])
def test_a_worker_gives_the_tokens_of_the_virtual_clock(
    schedule: str,
    rule: str,
    worker: RemoteParallelChain,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the overlap and the rest, which PEARL+ otherwise measures
    monkeypatch.setattr(PearlPlusWall, "_measured_overlap", lambda self: 1.0)
    monkeypatch.setattr(PearlPlusWall, "_rest_ms", PearlPlus._rest_ms)
    target, local = models()[0], ParallelChain(folder, **OPTIONS)
    settings = with_rule(
        rule, max_new_tokens=40, stop_token_ids=(3,), num_draft_tokens=6, costs=EXPENSIVE
    )
    for number, prompt in enumerate([[7], *random_prompts(5)]):
        virtual, wall = (
            decode(
                target,
                drafter,
                [prompt],
                replace(settings, schedule=name),
                request_ids=[number],
            )
            for drafter, name in ((local, schedule.replace("wall", "virtual")), (worker, schedule))
        )
        assert counts(wall) == counts(virtual)
        if rule == "greedy":
            (plain,) = decode(target, None, [prompt], settings, request_ids=[number])
            assert wall[0].tokens == plain.tokens


@pytest.mark.long
def test_a_worker_has_the_length_and_the_unit_of_its_model(worker: RemoteParallelChain) -> None:
    assert worker.width(9) == 4 and worker.width(2) == 2
    assert worker.capabilities == ParallelChain.capabilities
    assert RemoteChain.capabilities == ChainDrafter.capabilities


@pytest.mark.long
def test_an_evaluation_starts_the_worker_that_its_schedule_needs(tiny_target: Path) -> None:
    entry = {"_target_": "decoding.drafters.parallel.ParallelChain", "folder": str(tiny_target)}
    mappings = {"mine": {**entry, **OPTIONS, "draft_cores": 0, "schedule": "pearl_wall"}}
    made = build(mappings, uses(mappings, DrafterUse()), tiny_target)["mine"]
    assert isinstance(made, RemoteParallelChain) and made.width(9) == 4
    made.close()


def test_the_wall_clock_names_the_worker_of_the_drafter() -> None:
    _, twin, _ = models()
    with pytest.raises(UserError, match=r"Use decoding.drafters.remote.RemoteParallelChain\(fold"):
        decode(models()[0], parallel_of(twin), [[4]], Settings(8, schedule="pearl_wall"))

"""A chain drafter in a worker process: its drafts, costs and errors.

Overlapped schedules are in test_pearl_wall.py.
"""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.costs.measure import measure_costs
from decoding.costs.timing import time_parts
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.remote import RemoteChain, separate_cores
from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.stopping.base import Fixed
from tests.support.tiny_targets import random_prompts

from .test_laws import models, with_rule


@pytest.mark.parametrize("rule", ["greedy", "token", "block", "coupled"])
def test_a_worker_drafts_the_same_under_the_serial_schedule(
    rule: str, remote: RemoteChain, folder: Path
) -> None:
    target, _, _ = models()
    settings = with_rule(rule, max_new_tokens=30)
    here = decode(target, ChainDrafter(folder, dtype="float64"), random_prompts(4), settings)
    there = decode(target, remote, random_prompts(4), settings)
    assert [(g.tokens, g.accepted_by_depth) for g in there] == [
        (g.tokens, g.accepted_by_depth) for g in here
    ]


@pytest.mark.parametrize(
    "stopping", ["assisted", "entropy", "thompson", "cost_ratio", "thompson_calibrated"]
)
def test_policies_decide_in_the_worker_and_return_with_their_state(
    stopping: str, remote: RemoteChain, folder: Path
) -> None:
    """Check that a worker's drafts are as long and as often accepted as a single process's."""
    target, _, _ = models()
    settings = Settings(
        max_new_tokens=40,
        num_draft_tokens=8,
        stopping=stopping,
        costs=RoundCosts(0.3, (1.0, 1.1, 1.2, 1.3)),
    )
    here = decode(target, ChainDrafter(folder, dtype="float64"), random_prompts(4), settings)
    there = decode(target, remote, random_prompts(4), settings)
    assert [(g.tokens, g.drafted, g.accepted_by_depth) for g in there] == [
        (g.tokens, g.drafted, g.accepted_by_depth) for g in here
    ]
    fixed = decode(target, remote, random_prompts(4), replace(settings, stopping="fixed"))
    assert [g.drafted for g in there] != [g.drafted for g in fixed]


def test_the_worker_applies_the_repetition_penalty(remote: RemoteChain, folder: Path) -> None:
    """Check that a worker's drafts are accepted as often as a single process's."""
    target, _, _ = models()
    settings = Settings(max_new_tokens=40, num_draft_tokens=4, repetition_penalty=1.4)
    here = decode(target, ChainDrafter(folder, dtype="float64"), random_prompts(6), settings)
    there = decode(target, remote, random_prompts(6), settings)
    assert [(g.tokens, g.accepted_by_depth) for g in there] == [
        (g.tokens, g.accepted_by_depth) for g in here
    ]
    without = decode(target, remote, random_prompts(6), replace(settings, repetition_penalty=1.0))
    assert [g.tokens for g in without] != [g.tokens for g in there]


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processor cores")
def test_lanes_have_separate_cores_while_they_decode(folder: Path) -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    drafter = RemoteChain(folder, dtype="float64")
    worker_cores = os.sched_getaffinity(drafter._process.pid)
    with separate_cores(drafter):
        assert os.sched_getaffinity(0) == cores - worker_cores
        assert len(worker_cores) == 1
    target, _, _ = models()
    decode(target, drafter, [[4]], Settings(max_new_tokens=4, schedule="pearl_wall"))
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, threads)
    drafter.close()


@pytest.mark.long
def test_errors_of_the_worker_reach_the_caller(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist, expected a model folder"):
        RemoteChain(tmp_path / "nothing", draft_cores=0)
    with pytest.raises(UserError, match="leaves no core to the target"):
        RemoteChain(folder, draft_cores=10_000)
    drafter = RemoteChain(folder, dtype="float64", draft_cores=0)
    target, _, _ = models()
    drafter._process.send_signal(signal.SIGKILL)
    for pause in (0.0, 1.0):  # whether the pipe is known to be broken or not
        time.sleep(pause)
        with pytest.raises(UserError, match="the drafter's worker ended with status -9"):
            decode(target, drafter, [[4]], Settings())


def test_a_chain_ends_at_the_message(remote: RemoteChain) -> None:
    """Check that an early message ends a chain at once, and that a late one has no effect.

    Without a message the chain ends at its budget.
    """
    chooser = TokenChooser(Warper(), "greedy", 0, models()[0].vocab_size, torch.device("cpu"))
    remote.open([[4, 5, 6]], None, 64)
    for least, early, expected in ((2, True, 2), (5, True, 5), (2, False, 8)):
        chooser.begin([0], [0], [3], 8)
        remote.begin([[4, 5, 6]], [8], [Fixed()], chooser, least=least)
        if early:
            remote.enough()
        else:
            time.sleep(0.5)
        drafted = remote.finish().counts_B[0]
        if not early:
            remote.enough()
        assert least <= drafted <= 8
        assert drafted == expected or early, "without a message a chain has its full budget"
        remote.rollback([2])


def delay_messages(remote: RemoteChain, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Delay every message to the worker by `seconds`."""
    send = remote._send

    def late(message: Any) -> None:
        time.sleep(seconds)
        send(message)

    monkeypatch.setattr(remote, "_send", late)


def test_a_workers_draft_step_excludes_messages(
    remote: RemoteChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that slow messages lengthen the rest of a round, and not the worker's draft steps."""
    target, _, _ = models()
    settings = Settings(schedule="pearl_plus_wall", num_draft_tokens=4)
    plain = measure_costs(target, remote, [4, 5, 6], settings, tokens=12)
    delay_messages(remote, monkeypatch, 0.05)
    began = time.perf_counter()
    remote.time_step()
    assert time.perf_counter() - began > 0.05, "control: here a step's time includes its message"
    slow = measure_costs(target, remote, [4, 5, 6], settings, tokens=12)
    assert plain.t_draft_ms > 0 and slow.t_draft_ms < 15
    assert time_parts(target, remote, [4, 5, 6], repeats=2, warmup=0).t_draft_ms < 15
    assert slow.overhead_ms > plain.overhead_ms + 15

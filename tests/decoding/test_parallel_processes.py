"""A target in several real processes: its logits, the laws, and failures of a rank.

Shapes and families are tested in test_parallel.py.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from decoding import load
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.remote import RemoteChain, separate_cores
from decoding.drafters.self_speculation import SelfSpeculation
from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.distributed.parallel import ParallelTarget
from decoding.models.load import load_target
from decoding.rounds.settings import Settings
from tests.support.tiny_targets import hf_model, random_prompts

from .test_laws import models, with_rule
from .test_parallel import close, exercise
from .test_targets import ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the target of the law tests, and return its folder."""
    path = tmp_path_factory.mktemp("target")
    hf_model("llama", layers=2).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def targets(folder: Path) -> Iterator[Callable[[str], ParallelTarget]]:
    """Yield a function that starts a target of a kind over two processes once and returns it."""
    made: dict[str, ParallelTarget] = {}

    def target(kind: str) -> ParallelTarget:
        if kind not in made:
            made[kind] = start(folder, kind)
        return made[kind]

    yield target
    for one in made.values():
        one.close()


def start(folder: Path, kind: str = "tp") -> ParallelTarget:
    target = load_target(folder, dtype="float64", parallel=kind, processes=2)
    assert isinstance(target, ParallelTarget)
    return target


by_kind = pytest.mark.parametrize("kind", ["tp", pytest.param("layers", marks=pytest.mark.long)])


@by_kind
def test_two_processes_give_the_logits_of_one(
    kind: str, targets: Callable[[str], ParallelTarget]
) -> None:
    whole, target = models()[0], targets(kind)
    close(exercise(target), exercise(whole))
    for name in (
        "vocab_size",
        "hidden_size",
        "num_layers",
        "num_parameters",
        "max_length",
        "dtype",
        "device",
    ):
        assert getattr(target, name) == getattr(whole, name), name
    assert target.backend == f"native ({kind} over 2 processes)"


@by_kind
def test_laws_1_and_2_on_a_parallel_target(
    kind: str, targets: Callable[[str], ParallelTarget]
) -> None:
    whole, _, draft_model = models()
    for rule in ("greedy", "coupled"):
        settings = with_rule(rule, max_new_tokens=32, stop_token_ids=(3,))
        plain = decode(whole, None, random_prompts(12), settings)
        for drafter in (None, ChainDrafter(model=draft_model)):
            found = decode(targets(kind), drafter, random_prompts(12), settings)
            assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert sum(g.accepted for g in found) > 0


@pytest.mark.long
def test_pearl_drafts_in_a_worker_beside_the_ranks(
    targets: Callable[[str], ParallelTarget], folder: Path
) -> None:
    target, settings = targets("tp"), with_rule("greedy", max_new_tokens=24, schedule="pearl_wall")
    drafter = RemoteChain(folder, dtype="float64", draft_cores=0)
    found = decode(target, drafter, random_prompts(3), settings)
    drafter.close()
    plain = decode(models()[0], None, random_prompts(3), replace(settings, schedule="serial"))
    assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert sum(g.accepted for g in found) > 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processor cores")
def test_ranks_share_the_cores_besides_the_drafters(
    targets: Callable[[str], ParallelTarget],
) -> None:
    target, before = targets("tp"), os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    (process,) = target.ranks.processes
    with separate_cores(SimpleNamespace(target_cores=cores), target):  # type: ignore[arg-type]
        target.open(1, 4)  # waits for the rank, and therefore for the binding
        assert os.sched_getaffinity(0) == {cores[0]}
        assert os.sched_getaffinity(process.pid) == {cores[1]}
    target.open(1, 4)
    assert os.sched_getaffinity(0) == os.sched_getaffinity(process.pid) == before
    too_few = separate_cores(SimpleNamespace(target_cores=cores[:1]), target)  # type: ignore[arg-type]
    with (
        pytest.raises(
            UserError, match="2 processes, but the drafter's worker leaves them 1 .*draft_cores=0"
        ),
        too_few,
    ):
        pass
    assert os.sched_getaffinity(0) == before


def test_drafters_of_the_targets_layers_are_refused(
    targets: Callable[[str], ParallelTarget],
) -> None:
    with pytest.raises(
        UserError,
        match=r"native \(tp over 2 processes\) backend does not support.*target.parallel=none",
    ):
        decode(targets("tp"), SelfSpeculation(attention=[1]), [[1, 2]], Settings())


def test_a_forward_beyond_the_cache_is_refused_before_any_rank_begins(
    targets: Callable[[str], ParallelTarget],
) -> None:
    target = targets("tp")
    target.open(1, 4)
    with pytest.raises(ValueError, match="5 slots are needed, but the cache was opened for 4"):
        target.forward(ids(1, 5))
    assert target.forward(ids(1, 4))[0].shape == (1, 4, target.vocab_size)


@pytest.mark.parametrize("link", ["sockets", pytest.param("gloo", marks=pytest.mark.long)])
def test_a_killed_rank_is_named_in_the_error(link: str, folder: Path) -> None:
    target = ParallelTarget(folder, kind="tp", processes=2, dtype=torch.float64, link=link)
    target.open(1, 8)
    target.forward(ids(1, 2))
    (process,) = target.ranks.processes
    process.send_signal(signal.SIGKILL)
    began = time.monotonic()
    for _ in range(2):  # the second time without a new attempt
        with pytest.raises(UserError, match="rank 1 of the 2 processes of .* was ended by SIGKILL"):
            target.forward(ids(1, 2))
    assert time.monotonic() - began < 5


@pytest.mark.long
def test_an_interrupted_forward_ends_all_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that an interrupt ends all ranks, which could otherwise send its sums to the next."""
    target = start(folder)
    target.open(1, 8)

    def interrupted(*_: object) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(target._target, "forward", interrupted)
    before = os.sched_getaffinity(0)
    drafter = SimpleNamespace(target_cores=sorted(before)[:2] if len(before) > 1 else [])
    bound = separate_cores(drafter, target)  # type: ignore[arg-type]
    # not replaced by the error of a rank that has ended
    with pytest.raises(KeyboardInterrupt), bound:
        target.forward(ids(1, 2))
    assert os.sched_getaffinity(0) == before
    assert all(process.poll() is not None for process in target.ranks.processes)
    with pytest.raises(UserError, match="Load the target again"):
        target.forward(ids(1, 2))


@pytest.mark.long
def test_no_rank_outlives_its_parent(folder: Path) -> None:
    """Check that the ranks end when their parent exits normally and when it is killed."""
    script = (
        "import sys; from decoding.models.load import load_target\n"
        f"target = load_target({str(folder)!r}, parallel='tp', processes=2)\n"
        "print(target.ranks.processes[0].pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    parents = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    ]
    for kill, parent in zip((False, True), parents):
        assert parent.stdout is not None and parent.stdin is not None
        rank = int(parent.stdout.readline())
        assert alive(rank)
        if kill:
            parent.kill()
        parent.stdin.close()
        assert parent.wait(timeout=60) == (-signal.SIGKILL if kill else 0)
        deadline = time.monotonic() + 30
        while alive(rank) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(rank)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
def test_load_makes_a_parallel_target(tiny_target: Path) -> None:
    engine = load(tiny_target, "prompt_lookup", parallel="layers", processes=2)
    assert isinstance(engine.target, ParallelTarget)
    whole = load(tiny_target)
    settings = Settings(max_new_tokens=8)
    prompts: Sequence[Sequence[int]] = [[5, 6, 7, 5, 6]]
    assert [g.tokens for g in decode(engine.target, engine.drafter, prompts, settings)] == [
        g.tokens for g in decode(whole.target, None, prompts, settings)
    ]
    engine.target.close()

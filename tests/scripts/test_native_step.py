"""The figures of scripts/bench/native_step.py, and the execution that bandwidth.py times."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.errors import UserError
from decoding.models import load
from decoding.models.native import fused
from decoding.models.native.model import NativeTarget
from decoding.sampling.token_chooser import TokenChooser
from scripts.bench import common, native_step
from scripts.bench.random_models import TOY_TARGET, random_target
from tests.support import tiny_folders as tiny

FORWARD_MS = 5.0
FUSES = fused.refuse(torch.float32, torch.device("cpu")) is None


def figures_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    """Run the script on a tiny target and a drafter of the same shape; return its figures."""
    for name in ("target", "drafter"):
        if not (folder / name).exists():
            tiny.save(folder / name)
    given = [f"target={folder / 'target'}", "dtypes=[float32]", "past=[8]", "threads=1", *options]
    short = ["rounds=1", "calls=1", "new_tokens=8"]
    monkeypatch.setattr(sys, "argv", ["native_step.py", *given, *short])
    monkeypatch.setattr(common, "RESULTS", folder / "scripts" / "bench" / "results")
    (folder / "scripts" / "bench").mkdir(parents=True, exist_ok=True)
    native_step.main()
    return json.loads((common.RESULTS / "native_step.json").read_text())["figures"]["float32"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_chains_and_rounds_have_the_time_of_their_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: int
) -> None:
    """Check that a slow forward is in every figure as often as it runs."""
    plain = NativeTarget.forward

    def forward(self: NativeTarget, *given: Any, **named: Any) -> Any:
        time.sleep(FORWARD_MS / 1000)
        return plain(self, *given, **named)

    monkeypatch.setattr(NativeTarget, "forward", forward)
    found = figures_of(
        tmp_path,
        monkeypatch,
        f"drafter={tmp_path / 'drafter'}",
        "executions=[eager]",
        "rows=[1,2]",
        "tokens=[1,3]",
        "gammas=[2]",
        f"temperature={temperature}",
    )
    assert set(found) == {
        *(f"forward, eager, {rows} x {tokens} after 8" for rows in (1, 2) for tokens in (1, 3)),
        *(f"{part}, eager, 2 after 8" for part in ("chain", "verify", "round", "rest")),
    }
    for name, ms in found.items():
        forwards = {"forward": 1, "chain": 2, "verify": 1, "round": 2, "rest": 0}
        assert ms >= forwards[name.split(",")[0]] * FORWARD_MS, name


def test_the_rest_of_a_round_is_outside_its_proposal_and_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward takes 5 ms and the beginning of a round 2 ms, on a clock that only they move."""
    now = 0.0

    def taking(ms: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            nonlocal now
            now += ms / 1000
            return call(*given, **named)

        return run

    for module in ("scripts.bench.native_step", "decoding.rounds.batch"):
        monkeypatch.setattr(f"{module}.perf_counter", lambda: now)
    monkeypatch.setattr(NativeTarget, "forward", taking(FORWARD_MS, NativeTarget.forward))
    monkeypatch.setattr(TokenChooser, "begin", taking(2.0, TokenChooser.begin))
    options = ("executions=[eager]", "rows=[1]", "tokens=[1]", "gammas=[2]")
    found = figures_of(tmp_path, monkeypatch, f"drafter={tmp_path / 'drafter'}", *options)
    assert found["rest, eager, 2 after 8"] == pytest.approx(2.0)
    assert found["round, eager, 2 after 8"] > 2 * FORWARD_MS, "control: a round has its forwards"


@pytest.mark.skipif(not FUSES, reason="needs a C++ compiler")
def test_both_executions_are_measured_without_a_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = figures_of(tmp_path, monkeypatch, "rows=[1]", "tokens=[1]")
    assert set(found) == {f"forward, {name}, 1 x 1 after 8" for name in ("eager", "fused")}
    assert all(ms > 0 for ms in found.values())


def test_more_tokens_than_the_context_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"need \d+ tokens, but the context of target has \d+"):
        figures_of(tmp_path, monkeypatch, "executions=[eager]", "tokens=[4096]")


@pytest.mark.skipif(not FUSES, reason="needs a C++ compiler")
def test_a_large_random_target_runs_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that bandwidth.py times the default execution, here of a toy taken for a large model.

    Control: with the usual bound the toy runs eagerly.
    """
    assert random_target(TOY_TARGET, torch.float32, "cpu", 16).backend == "native"
    monkeypatch.setattr(load, "WORTH_FUSING", 1)
    assert random_target(TOY_TARGET, torch.float32, "cpu", 16).backend == "native fused"

"""Fixtures of the decoding tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decoding import devices
from decoding.costs.contention import UndisturbedClock
from decoding.drafters.remote import RemoteChain
from tests.support.simulated_clock import SimulatedClock
from tests.support.tiny_targets import hf_model


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the code behave as on a GPU, where the host runs ahead of the device."""
    monkeypatch.setattr(devices, "runs_ahead", lambda device: True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a draft model, the target with noise in its weights, and return its folder."""
    model = hf_model("llama", layers=2)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(
            0.03 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        )
    path = tmp_path_factory.mktemp("draft")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def remote(folder: Path) -> Iterator[RemoteChain]:
    """Yield a drafter whose draft model runs in a worker process."""
    drafter = RemoteChain(folder, dtype="float64", draft_cores=0)
    yield drafter
    drafter.close()


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the shares of its processors that the next measurements find; then all find 1."""
    shares: list[float] = []
    monkeypatch.setattr(UndisturbedClock, "share", lambda self: shares.pop(0) if shares else 1.0)
    return shares


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    """Return the clock of the small target and its draft model, whose forwards advance it."""
    from .test_laws import models

    clock = SimulatedClock()
    for module in ("costs.timing", "costs.measure", "rounds.batch", "sessions.conversations"):
        monkeypatch.setattr(f"decoding.{module}.perf_counter", clock)
    target, _, draft_model = models()
    for model, ms in ((target, clock.TARGET_MS), (draft_model, clock.DRAFT_MS)):
        monkeypatch.setattr(model, "forward", clock.delayed(model.forward, ms))
    return clock

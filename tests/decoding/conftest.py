"""Fixtures of the decoding tests."""

import pytest

from decoding import cuda


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host believes that it runs ahead of the device, as on a GPU."""
    monkeypatch.setattr(cuda, "runs_ahead", lambda device: True)

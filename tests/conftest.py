"""Fixtures of the whole suite: the embedded target, shared real models and data, and small models made on the spot."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
_VARIABLE = "SHALLOW_DRAFT_DATA"


def _shared(*parts: str) -> Path:
    """A path under $SHALLOW_DRAFT_DATA; without it the test is skipped, and in CI it fails."""
    root = os.environ.get(_VARIABLE)
    path = Path(root or "/nonexistent", *parts)
    if not root or not path.exists():
        reason = f"needs real data: set {_VARIABLE} to a folder that holds {'/'.join(parts)}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real chats, texts and evaluation prompts."""
    return _shared("data")


@pytest.fixture(scope="session")
def chat24m() -> Path:
    """A small real chat target of 12 layers."""
    return _shared("models", "chat24m")


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A tiny real story target."""
    return _shared("models", "stories260k")


@pytest.fixture(scope="session")
def embedded_target() -> Path:
    """The target that ships with the project."""
    return ROOT / "assets" / "target"

"""Fixtures of the whole suite: the embedded target, shared real models and data, and small models
made on the spot.
"""

import importlib.util
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)
# What a shell starts in the background ignores Ctrl-C, and would hand that on to the jobs that
# tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
_COLLECTED = pytest.StashKey[list[str]]()
_VARIABLE = "SHALLOW_DRAFT_DATA"


def _shared(*parts: str) -> Path:
    """A path under $SHALLOW_DRAFT_DATA; without it the test is skipped, and in CI it fails."""
    root = os.environ.get(_VARIABLE)
    path = Path(root or "/nonexistent", *parts)
    if not root or not path.exists():
        _lacking(f"needs real data: set {_VARIABLE} to a folder that holds {'/'.join(parts)}")
    return path


def _lacking(reason: str) -> None:
    """Skip a test for what this machine lacks; in CI nothing may lack."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note every test, before any is deselected."""
    item.session.stash.setdefault(_COLLECTED, []).append(item.name)


@pytest.fixture(scope="session")
def collected_tests(request: pytest.FixtureRequest) -> list[str]:
    """Return the names of all tests of the suite, with those of the long tiers; a session of a part
    of it collects anew.
    """
    from tests.support.snapshots import collect_all

    given = {
        Path(request.config.invocation_params.dir, one).resolve() for one in request.config.args
    }
    return request.session.stash[_COLLECTED] if {ROOT, ROOT / "tests"} & given else collect_all()


@pytest.fixture(scope="session")
def deepspeed() -> None:
    """DeepSpeed, which on a CPU compiles its messages between ranks at first use."""
    if importlib.util.find_spec("deepspeed") is None:
        _lacking("needs DeepSpeed: pip install shallow-draft[train]")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        _lacking("needs a C++ compiler (g++, or CXX): DeepSpeed builds its CPU messages with it")


@pytest.fixture(scope="session")
def submitit() -> None:
    """Hydra's launcher for Slurm."""
    if importlib.util.find_spec("submitit") is None:
        _lacking("needs Hydra's submitit launcher: pip install shallow-draft[slurm]")


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the runs that Weights & Biases is asked for: their arguments, and what
    each `logged`.
    """
    import wandb

    runs: list[dict[str, Any]] = []

    class Run:
        def __init__(self, **asked: Any) -> None:
            runs.append(asked | {"logged": {}})
            self.logged = runs[-1]["logged"]

        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            self.logged |= values

        def finish(self) -> None:
            self.logged = {}

    monkeypatch.setattr(wandb, "init", Run)
    return runs


@pytest.fixture(scope="session")
def base_target(tmp_path_factory: pytest.TempPathFactory, llama_tokenizer: Path) -> Path:
    """A model folder with random weights: 6 layers, width 32, LLaMA's tokenizer, and so no chat
    template.
    """
    from training.config import StudentConfig
    from training.drafter_folder import write_model
    from training.models.build import build_llama

    shape = StudentConfig(
        hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=48
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 32000, "max_position_embeddings": 512, "initializer_range": 0.1}
    model = build_llama(shape, torch.float32, **sizes, bos_token_id=1, eos_token_id=2)
    folder = tmp_path_factory.mktemp("base") / "llama"
    write_model(model, llama_tokenizer, folder, torch.float32)
    return folder


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
def llama_tokenizer() -> Path:
    """LLaMA's tokenizer: tokenizer.model, and a tokenizer.json with the same ids."""
    return _shared("tokenizers", "llama")


@pytest.fixture(scope="session")
def embedded_target() -> Path:
    """The target that ships with the project."""
    return ROOT / "assets" / "target"


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory, embedded_target: Path) -> Path:
    """A model folder with random weights: 4 layers, width 32, the embedded target's tokenizer and
    chat template.
    """
    from training.config import StudentConfig
    from training.drafter_folder import write_model
    from training.models.build import build_llama

    shape = StudentConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
    )
    torch.manual_seed(0)
    model = build_llama(
        shape,
        torch.float32,
        vocab_size=2048,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("tiny_target")
    write_model(model, embedded_target, folder, torch.float32)
    return folder


@pytest.fixture(scope="session")
def padded_target(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """tiny_target with 8 of its 32 residual channels never written to, as in a zero-padded
    checkpoint.
    """
    folder = tmp_path_factory.mktemp("padded") / "model"
    shutil.copytree(tiny_target, folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("embed_tokens.weight"):
            tensor[:, -8:] = 0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[-8:] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

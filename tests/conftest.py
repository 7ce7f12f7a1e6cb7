"""Fixtures of the whole suite: real models and data, and small models made on the spot."""

import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

os.environ.setdefault("WANDB_SILENT", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)
# A shell starts background processes with SIGINT ignored, which their children inherit. Tests
# interrupt the jobs that they start, so Ctrl-C must work in them.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
_COLLECTED = pytest.StashKey[list[str]]()
_VARIABLE = "SHALLOW_DRAFT_DATA"


def _shared(*parts: str) -> Path:
    """Return a path under $SHALLOW_DRAFT_DATA; if it is missing, skip the test, or fail in CI."""
    root = os.environ.get(_VARIABLE)
    path = Path(root or "/nonexistent", *parts)
    if not root or not path.exists():
        _lacking(f"needs real data: set {_VARIABLE} to a folder that holds {'/'.join(parts)}")
    return path


def _lacking(reason: str) -> None:
    """Skip the running test with a reason, or fail it in CI, which must meet every requirement."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Record the name of every collected test, and mark it by its fixtures."""
    from tests.support.browser import MARKS

    item.session.stash.setdefault(_COLLECTED, []).append(item.name)
    for fixture, mark in MARKS.items():
        if fixture in getattr(item, "fixturenames", ()):
            item.add_marker(mark)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """End with a line on the tests of pages, if they were skipped."""
    from tests.support.browser import unseen_pages

    skipped = terminalreporter.stats.get("skipped", [])
    if line := unseen_pages([report.longrepr[2] for report in skipped]):
        terminalreporter.write_sep("=", line, yellow=True, bold=True)


@pytest.fixture(scope="session")
def collected_tests(request: pytest.FixtureRequest) -> list[str]:
    """Return the names of all tests of the suite, those of the long tiers included.

    If pytest runs only a part of the suite, the names are collected in a new process.
    """
    from tests.support.snapshots import collect_all

    given = {
        Path(request.config.invocation_params.dir, one).resolve() for one in request.config.args
    }
    return request.session.stash[_COLLECTED] if {ROOT, ROOT / "tests"} & given else collect_all()


@pytest.fixture(scope="session", autouse=True)
def _brief_measurements() -> Iterator[None]:
    from tests.support.brief_measurements import measure_briefly

    with pytest.MonkeyPatch.context() as patch:
        measure_briefly(patch.setattr)
        yield


@pytest.fixture(scope="session")
def deepspeed() -> None:
    """Require DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        _lacking("needs DeepSpeed: pip install -e '.[train]'")


@pytest.fixture(scope="session")
def submitit() -> None:
    """Require Hydra's launcher for Slurm."""
    if importlib.util.find_spec("submitit") is None:
        _lacking("needs Hydra's submitit launcher: pip install -e '.[slurm]'")


@pytest.fixture(scope="session")
def gradio() -> None:
    """Require Gradio."""
    if importlib.util.find_spec("gradio") is None:
        _lacking("needs Gradio: pip install -e '.[web]'")


@pytest.fixture(scope="session")
def chromium() -> Path:
    """Return Chromium's path; without it the test is skipped, or fails where it is required."""
    from tests.support.browser import chromium_path, missing_part, require_browser

    require_browser(missing_part(), os.environ)
    return chromium_path()


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Return the interpreter of the environment that has vLLM."""
    from tests.support.vllm_server import PYTHON

    if not PYTHON.is_file():
        _lacking("needs vLLM: ./scripts/engines/vllm.sh")
    return PYTHON


@pytest.fixture(scope="session")
def speculators_python() -> Path:
    """Return the interpreter of the environment that has speculators."""
    default = ROOT / ".venv-speculators/bin/python"
    python = Path(os.environ.get("SHALLOW_DRAFT_SPECULATORS_PYTHON", default))
    if not python.is_file():
        _lacking("needs speculators: ./scripts/engines/speculators.sh")
    return python


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace `wandb.init`, and return the list of the runs that it starts.

    A run is a dict of the call's arguments, with the logged values under `logged`.
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


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the plots of reports empty: drawing takes most of the time of a tiny evaluation."""
    from eval.report.plots import Plot

    monkeypatch.setattr(Plot, "svg", "")
    monkeypatch.setattr(Plot, "png", b"")


@pytest.fixture(scope="session")
def base_target(tmp_path_factory: pytest.TempPathFactory, llama_tokenizer: Path) -> Path:
    """Return a model folder with random weights, LLaMA's tokenizer and thus no chat template.

    The model has 6 layers and width 32.
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
    """Return the folder of real chats, texts and evaluation prompts."""
    return _shared("data")


@pytest.fixture(scope="session")
def chat24m() -> Path:
    """Return the folder of a small real chat target with 12 layers."""
    return _shared("models", "chat24m")


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """Return the folder of a tiny real target that writes stories."""
    return _shared("models", "stories260k")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, a real public chat model."""
    return _shared("models", "smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def llama_tokenizer() -> Path:
    """Return the folder of LLaMA's tokenizer: tokenizer.model, and tokenizer.json of equal ids."""
    return _shared("tokenizers", "llama")


@pytest.fixture(scope="session")
def embedded_target() -> Path:
    """Return the folder of the target that ships with the project."""
    return ROOT / "assets" / "target"


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory, embedded_target: Path) -> Path:
    """Return a model folder with random weights and the embedded target's tokenizer and template.

    The model has 4 layers and width 32.
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
    """Return a copy of tiny_target with 8 of its 32 residual channels always 0.

    Zero-padded checkpoints have such channels.
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

"""The GPU benchmark at toy size on a CPU, in a process that has the promised packages alone and
notes which lines ran.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import CodeType

import pytest
import torch

from scripts.bench.gpu_rows import uses
from tests.decoding.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "decoding/devices.py",
    "scripts/bench/gpu.py",
    "scripts/bench/gpu_exact.py",
    "scripts/bench/gpu_rows.py",
    "scripts/bench/gpu_decode.py",
    "scripts/bench/gpu_train.py",
    "scripts/bench/gpu_training.py",
    "scripts/bench/padded.py",
    "scripts/bench/gpu_recurrent.py",
    "scripts/bench/gpu_recurrent_training.py",
    "scripts/bench/random_models.py",
)
MOST_UNTESTED = 40

RUN = """
import importlib.machinery, json, os, sys
root, out = sys.argv[1:]
sys.path.insert(0, root)

class Without(importlib.machinery.PathFinder):
    # as if these were not installed: what the project needs elsewhere, and its packages that need
    # them; of training and recurrent_drafting what the benchmark imports does without
    names = "hydra omegaconf datasets wandb rich matplotlib deepspeed".split()
    names += "sentencepiece distill eval".split()
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in cls.names else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
FILES = set(json.loads(os.environ["FILES"]))
ran = {name: set() for name in FILES}

def trace(frame, event, arg):
    file = frame.f_code.co_filename
    name = file[len(root) + 1:] if file and file.startswith(root) else ""
    if name not in FILES:
        return None
    def line(frame, event, arg):
        ran[name].add(frame.f_lineno)
        return line
    return line(frame, event, arg)

sys.settrace(trace)
import torch
from decoding import devices as cuda
from scripts.bench import gpu, gpu_exact, gpu_decode, random_models

def run(part, *words):
    return gpu.main([f"part={part}", "device=cpu", "toy=true", f"out={out}", *words])

gpu.LAST_START_S = 1e9  # however slow the machine is
for part in gpu.PARTS:
    assert run(part) == 0, part
os.rename(f"{out}/gpu_exact.json", f"{out}/all_rows.json")
os.rename(f"{out}/gpu_train.json", f"{out}/both_sides.json")

real = cuda.runs_ahead
cuda.runs_ahead = lambda device: real(device) or True  # once more as the host behaves beside a GPU
waits = cuda.no_waiting
class Broken:
    __init__ = lambda self, device: None
    def __enter__(self): raise RuntimeError("called a synchronizing CUDA operation")
    def __exit__(self, *given): return False
every = gpu_exact.uses
few = ("chain", "recurrent", "pearl_virtual")
gpu_exact.uses = lambda *given: {name: every(*given)[name] for name in few}
gpu_exact.AT_SIZE = ["chain"]
assert run("exact") == 0
cuda.no_waiting = Broken
assert run("exact") == 1, "a wait is a broken promise"
cuda.no_waiting = waits
gpu.LAST_START_S = 0.0
for part in gpu.PARTS:
    assert run(part) == 0, part
settings = gpu_exact.Settings(temperature=1.0, verify="coupled", repetition_penalty=1.3)
kit = gpu_exact.embedded_kit("float32", "cpu", "eager", toy=True)
with torch.inference_mode():
    assert gpu_exact.gap(kit.target, [3, 4], settings, 0) > 0
    answers = iter([([[5, 2]], 1.0), ([[5, 3]], 1.0)])
    gpu_exact.texts = lambda *given: next(answers)
    found = gpu_exact.equality(kit.target, None, [[3]], settings, 1)
    assert found["texts_that_differ"] == 1 and not gpu_exact.holds({"greedy": found}), found
assert gpu.main(["--help"]) == 0
toy = random_models.random_target(gpu_decode.TOY.target, torch.float32, "cpu", 16)
norms = 5 * 32
assert toy.num_parameters == gpu_decode.TOY.target.parameters + norms, "and the matrices"
for words in (["speed=9"], ["part=all"], ["device=cuda"]):
    try:
        gpu.parse(words)
        raise AssertionError(words)
    except SystemExit as error:
        assert "error:" in str(error)
for name in ("auto", "cuda"):
    try:
        cuda.device_of(name)
    except ValueError as error:
        assert "finds no CUDA device" in str(error)
assert (cuda.count_gpus(), cuda.gpu_names()) == (0, [])
assert (cuda.rng_state(), cuda.multiplies_bfloat16()) == (None, False)
cuda.set_default_gpu(torch.device("cpu"))
cuda.restore_rng(torch.get_rng_state())
sys.settrace(None)
print("RAN " + json.dumps({name: sorted(lines) for name, lines in ran.items()}))
"""


def statements(path: Path) -> set[int]:
    """Lines of functions that carry code."""

    def lines(code: CodeType, inside: bool) -> set[int]:
        own = (
            {line for _, _, line in code.co_lines() if line and line > code.co_firstlineno}
            if inside
            else set()
        )
        return own.union(
            *(lines(each, True) for each in code.co_consts if isinstance(each, CodeType))
        )

    return lines(compile(path.read_text(), str(path), "exec"), False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU other lines are the untested ones")
@pytest.mark.long
def test_every_line_but_the_listed_ones_runs_on_a_cpu(tmp_path: Path) -> None:
    environment = {**os.environ, "FILES": json.dumps(FILES), "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-4000:]
    ran = json.loads(next(line for line in made.stdout.splitlines() if line.startswith("RAN "))[4:])
    missing = {
        f"{name}:{line}" for name in FILES for line in statements(ROOT / name) - set(ran[name])
    }
    record = json.loads((tmp_path / "gpu_decode.json").read_text())
    listed = set(record["untested_lines"])
    assert missing <= listed, f"neither run nor listed: {sorted(missing - listed)}"
    assert len(listed) <= MOST_UNTESTED
    assert record["figures"]["done"] is True and record["figures"]["1 layer, graph"].startswith(
        "left out"
    )
    exact = json.loads((tmp_path / "all_rows.json").read_text())["figures"]
    tried = {f"{name}, float64, graph" for name in uses(tmp_path, "cpu")}
    assert len(tried) > len(ROWS)
    assert {
        "noise",
        "equality, chain, float64, graph",
        "equality, recurrent, float64, graph",
    } | tried <= set(exact)
    for figure in tried:
        assert (
            exact[figure]["greedy"]["tokens"] > 0
            and exact[figure]["greedy"]["texts_that_differ"] == 0
        ), figure
    assert exact["chain, float64, graph"]["token"]["waits"] == "none"
    train = json.loads((tmp_path / "both_sides.json").read_text())["figures"]
    assert train["ours over trainer"] > 0 and train["ours, round 1"]["losses"][0] > 0
    recurrent = json.loads((tmp_path / "gpu_recurrent.json").read_text())["figures"]
    assert recurrent["training"]["tokens_per_second"] > 0
    assert recurrent["rounds, 3 beams of 2, graph"].startswith("left out")


def test_cards_are_called_in_one_module() -> None:
    """So its list of untested lines is the whole of what a CPU cannot try."""
    packages = ("decoding", "training", "distill", "recurrent_drafting", "heads", "eval", "scripts")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    calling = {str(path.relative_to(ROOT)) for path in files if "torch.cuda" in path.read_text()}
    assert calling == {"decoding/devices.py"}


def test_the_shapes_are_the_published_ones() -> None:
    from scripts.bench.gpu_decode import REAL

    assert round(REAL.target.parameters / 1e6) == 6738
    sizes = [round(shape.parameters / 1e6) for shape in REAL.drafters.values()]
    assert sizes == [290, 543, 796, 1334]


def test_the_recurrent_part_measures_the_published_setting() -> None:
    from scripts.bench import gpu_recurrent, gpu_recurrent_training, gpu_training
    from scripts.bench.random_models import random_head

    rounds, training = gpu_recurrent.REAL, gpu_recurrent_training.REAL
    assert rounds.target == training.target
    head = random_head(rounds.target, gpu_recurrent.BLOCKS, rounds.dtype, "meta")
    assert round(head.num_parameters / 1e5) == 4299, "429.9 M"
    assert (rounds.batch, rounds.batch_width, 1 + rounds.lengths[0]) == (8, 45, 5)
    assert training.row * training.step_rows == 128 * 2048
    made = gpu_training.chats(training)
    supervised = sum(chat.mask.sum() for chat in made) / sum(len(chat.ids) for chat in made)
    assert abs(supervised - gpu_training.SUPERVISED) < 0.02
    assert all(not chat.mask[0] and len(chat.ids) <= training.row for chat in made)


def test_a_timed_training_step_is_the_loops(tmp_path: Path) -> None:
    from jobs.config import ParallelConfig
    from recurrent_drafting.predictions import PREDICTIONS
    from scripts.bench.gpu_recurrent_training import HEADS, TOY
    from scripts.bench.gpu_training import chats, frozen_target, step
    from scripts.bench.random_models import random_head
    from training.config import LoopConfig
    from training.data.packing import PackedData
    from training.features.states import TargetStates
    from training.heads.loss_config import HeadLossConfig
    from training.heads.objective import HeadObjective
    from training.loop import fit
    from training.optimizer import MasterAdamW
    from training.optimizer_config import OptimizerConfig
    from training.parallel.strategy import Parallel

    torch.manual_seed(0)
    states, data = (
        TargetStates(frozen_target(TOY, "cpu")),
        PackedData(chats(TOY), TOY.row, TOY.step_rows, 0),
    )
    config = OptimizerConfig(warmup_steps=1)

    def trained(number: int) -> torch.Tensor:
        head = random_head(TOY.target, 2, TOY.dtype, "cpu")
        objective = HeadObjective(PREDICTIONS, head, states, HeadLossConfig(predict_n_tokens=HEADS))
        step(objective, MasterAdamW(head, config), data, data.step_rows(number), TOY)
        return torch.cat([weight.flatten() for weight in head.parameters()])

    head = random_head(TOY.target, 2, TOY.dtype, "cpu")
    loop = LoopConfig(
        max_steps=1,
        tokens_per_step=TOY.step_rows * TOY.row,
        micro_batch_tokens=TOY.forward_rows * TOY.row,
        dtype="bfloat16",
        optimizer=config,
    )
    objective = HeadObjective(PREDICTIONS, head, states, HeadLossConfig(predict_n_tokens=HEADS))
    parallel = Parallel(ParallelConfig(), "cpu")
    fit("loop", objective, head, data, loop, parallel, tmp_path, None, lambda: {"score": 0.0})
    expected = torch.cat([weight.flatten() for weight in head.parameters()])
    assert torch.equal(trained(0), expected)
    assert not torch.equal(trained(1), expected), "the rows of another step"


def test_a_part_that_is_none_is_said_to_be_unknown() -> None:
    done = subprocess.run(
        ["bash", "scripts/bench/gpu.sh", "speed"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "part 'speed' is unknown" in done.stderr


def test_without_a_card_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.bench import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        SystemExit, match="^error: device 'cuda' does not exist: PyTorch finds no CUDA device"
    ):
        gpu.parse(["part=decode"])

"""Test the GPU benchmark at toy size on a CPU.

It runs in a process that can import only the promised packages and records which lines ran.
"""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from scripts.bench.gpu_rows import drafting_modes
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
    "scripts/bench/gpu_losses.py",
    "scripts/bench/gpu_heads.py",
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
    # Hides packages that only other parts of the project need, and the project's packages that
    # import them. The modules of training and recurrent_drafting that the benchmark imports need
    # none of them.
    names = "hydra omegaconf datasets wandb rich matplotlib deepspeed".split()
    names += "sentencepiece distill eval".split()
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in cls.names else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
ran = {name: set() for name in json.loads(os.environ["FILES"])}

def tracer(lines):
    def line(frame, event, arg):
        lines.add(frame.f_lineno)
        return line
    return line

tracers = {f"{root}/{name}": tracer(lines) for name, lines in ran.items()}

def trace(frame, event, arg, tracer_of=tracers.get):
    line = tracer_of(frame.f_code.co_filename)
    return line and line(frame, event, arg)

import torch
import transformers.models.llama.modeling_llama
sys.settrace(trace)
from decoding import devices
from scripts.bench import gpu, gpu_exact, gpu_decode, random_models
from training.models.shapes import parameter_counts

def run(part, last_start=1e9):  # however slow the machine is
    words = ["device=cpu", "toy=true", f"out={out}", f"last_start={last_start}"]
    return gpu.main([f"part={part}", *words])

for part in gpu.PARTS:
    assert run(part) == 0, part
os.rename(f"{out}/gpu_exact.json", f"{out}/all_rows.json")
os.rename(f"{out}/gpu_train.json", f"{out}/both_sides.json")
os.rename(f"{out}/gpu_heads.json", f"{out}/all_heads.json")

real = devices.runs_ahead
# once more, with a host that runs ahead of its device as with a GPU
devices.runs_ahead = lambda device: real(device) or True
waits = devices.no_waiting
class Broken:
    __init__ = lambda self, device: None
    def __enter__(self): raise RuntimeError("called a synchronizing CUDA operation")
    def __exit__(self, *given): return False
every = gpu_exact.drafting_modes
few = ("chain", "recurrent", "pearl_virtual")
gpu_exact.drafting_modes = lambda *given: {name: every(*given)[name] for name in few}
gpu_exact.AT_SIZE = ["chain"]
assert run("exact") == 0
assert gpu.main(["part=heads", "device=cpu", "toy=true", f"out={out}/chosen", "only=^auto"]) == 0
assert gpu.main(["part=losses", "device=meta", "toy=true", f"out={out}/counted"]) == 0
devices.no_waiting = Broken
assert run("exact") == 1, "a wait breaks a promise"
devices.no_waiting = waits
for part in gpu.PARTS:
    assert run(part, last_start=0) == 0, part
settings = gpu_exact.Settings(temperature=1.0, verify="coupled", repetition_penalty=1.3)
kit = gpu_exact.embedded_kit("float32", "cpu", "eager", toy=True)
with torch.inference_mode():
    answers = iter([([[5, 2]], 1.0), ([[5, 3]], 1.0)])
    gpu_exact.decode_all = lambda *given: next(answers)
    found = gpu_exact.compare_texts(kit.target, None, [[3]], settings, 1)
    assert found["texts_that_differ"] == 1 and found["largest_gap_there"] > 0
    assert not gpu_exact.holds({"greedy": found}), found
assert gpu.main(["--help"]) == 0
shape = gpu_decode.TOY.target
toy = random_models.random_target(shape, torch.float32, "cpu", 16)
assert toy.num_parameters == parameter_counts(shape)["all"]
bad = ("speed=9", "part=all", "device=cuda", "last_start=x", "executions=x", "only=(")
for word in bad:
    try:
        gpu.parse([word])
        raise AssertionError(word)
    except SystemExit as error:
        assert "error:" in str(error)
for name in ("auto", "cuda"):
    try:
        devices.device_of(name)
    except ValueError as error:
        assert "finds no CUDA device" in str(error)
assert (devices.count_gpus(), devices.gpu_names()) == (0, [])
assert (devices.rng_state(), devices.multiplies_bfloat16()) == (None, False)
devices.set_default_gpu(torch.device("cpu"))
devices.restore_rng(torch.get_rng_state())
sys.settrace(None)
print("RAN " + json.dumps({name: sorted(lines) for name, lines in ran.items()}))
"""


def function_lines(path: Path) -> set[int]:
    """Return the numbers of the lines with bytecode inside a file's functions."""

    def lines(code: CodeType, inside: bool) -> set[int]:
        inner = [lines(each, True) for each in code.co_consts if isinstance(each, CodeType)]
        outer = {line for _, _, line in code.co_lines() if line and line > code.co_firstlineno}
        return (outer if inside else set()).union(*inner)

    return lines(compile(path.read_text(), str(path), "exec"), False)


def gpu_lines(path: Path) -> set[int]:
    """Return the numbers of the lines that run only if `device.type` is "cuda"."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.IfExp) and "'cuda'" in ast.unparse(node.test):
            lines.add(node.body.lineno)
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for index, statement in enumerate(block if isinstance(block, list) else []):
                guarded: list[ast.stmt] = []
                if compares_with_cuda(statement, ast.Eq):
                    guarded = statement.body
                elif compares_with_cuda(statement, ast.NotEq):  # the rest of the block
                    guarded = block[index + 1 :]
                for inner in guarded:
                    lines |= {each.lineno for each in ast.walk(inner) if isinstance(each, ast.stmt)}
    return lines


def compares_with_cuda(statement: ast.AST, comparison: type[ast.cmpop]) -> bool:
    """Return whether a statement is an `if` that compares with "cuda" by == or !=, as given."""
    test = statement.test if isinstance(statement, ast.If) else None
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], comparison)
        and "'cuda'" in ast.unparse(test)
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU other lines are the untested ones")
@pytest.mark.long
def test_every_line_runs_on_a_cpu_except_those_for_a_gpu(tmp_path: Path) -> None:
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
        f"{name}:{line}" for name in FILES for line in function_lines(ROOT / name) - set(ran[name])
    }
    untested = {f"decoding/devices.py:{line}" for line in gpu_lines(ROOT / "decoding/devices.py")}
    assert missing <= untested, f"lines that did not run: {sorted(missing - untested)}"
    assert len(untested) <= MOST_UNTESTED
    decoded = json.loads((tmp_path / "gpu_decode.json").read_text())["figures"]
    assert decoded["done"] is True and decoded["1 layer, graph"].startswith("left out")
    exact = json.loads((tmp_path / "all_rows.json").read_text())["figures"]
    tried = {f"{name}, float64, graph" for name in drafting_modes(tmp_path, "cpu")}
    assert len(tried) > len(ROWS)
    assert {
        "noise",
        "equality, chain, float64, graph",
        "equality, recurrent, float64, graph",
    } | tried <= set(exact)
    for figure in tried:
        greedy = exact[figure]["greedy"]
        assert greedy["tokens"] > 0 and greedy["texts_that_differ"] == 0, figure
    assert exact["chain, float64, graph"]["token"]["waits"] == "none"
    chosen = json.loads((tmp_path / "chosen" / "gpu_heads.json").read_text())["figures"]
    assert [*chosen] == ["autoregressive, graph", "autoregressive, eager", "done"]
    heads = json.loads((tmp_path / "all_heads.json").read_text())["figures"]
    for name in ("EAGLE-3", "P-EAGLE", "DFlash", "DSpark", "SpecDiff"):
        mine = {figure: values for figure, values in heads.items() if name in figure.split(", ")}
        (training,) = (values for figure, values in mine.items() if figure.startswith("training"))
        assert training["tokens_per_second"] > 0
        rounds = {figure.split(", ")[-1]: values for figure, values in mine.items()
                  if figure.startswith("round, ")}  # fmt: skip
        assert rounds.keys() == {"graph", "eager"}
        assert all(values["round_ms"] > 0 for values in rounds.values())
    train = json.loads((tmp_path / "both_sides.json").read_text())["figures"]
    assert train["ours over trainer"] > 0 and train["ours, round 1"]["losses"][0] > 0
    recurrent = json.loads((tmp_path / "gpu_recurrent.json").read_text())["figures"]
    assert recurrent["training"]["tokens_per_second"] > 0
    assert recurrent["rounds, 3 beams of 2, graph"].startswith("left out")


def test_one_module_calls_the_gpu() -> None:
    """Check that no module but decoding/devices.py calls the GPU.

    So all lines that a CPU cannot run are in that module.
    """
    packages = ("decoding", "training", "distill", "recurrent_drafting", "heads", "eval", "scripts")
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    calling = {str(path.relative_to(ROOT)) for path in files if "torch.cuda" in path.read_text()}
    assert calling == {"decoding/devices.py"}


def test_the_shapes_are_the_published_ones() -> None:
    from scripts.bench.gpu_decode import REAL
    from training.models.shapes import parameter_counts

    shapes = (REAL.target, *REAL.drafters.values())
    millions = [round(parameter_counts(shape)["all"] / 1e6) for shape in shapes]
    assert millions == [6738, 290, 543, 796, 1334]


@pytest.mark.parametrize("name", ["DFlash", "DSpark", "SpecDiff"])
def test_the_heads_are_those_of_the_presets(name: str, tiny_target: Path) -> None:
    """Compare forms and losses with those of training; the part has sizes of its own."""
    from heads.block.kind import KIND
    from scripts.bench import gpu_heads
    from tests.heads.test_heads_train import configured

    config = configured("heads.train", f"head={name.lower()}", f"target.path={tiny_target}")
    target = AutoConfig.from_pretrained(tiny_target)
    case = gpu_heads.block(gpu_heads.TOY.target, True, name)
    found: Any = case.head.config
    trained = KIND.shape(config, target)
    for part in ("layout", "in_block_mask", "correction", "rank", "confidence", "denoising_steps"):
        assert getattr(found, part) == getattr(trained, part), part
    assert found.reads_embedding == trained.reads_embedding == (name == "SpecDiff")
    drafter: Any = case.drafter(case.head)
    assert drafter.ends_by_confidence == trained.confidence == (name == "DSpark")
    parts = {key: weight for key, weight in config.loss.parts.items() if weight}
    sizes = {"predict_n_tokens": found.num_drafts, "drafts_per_row": gpu_heads.DRAFTS_PER_ROW}
    assert case.loss == replace(config.loss, parts=case.loss.parts, **sizes)
    assert {key: weight for key, weight in case.loss.parts.items() if weight} == parts


def test_the_recurrent_part_measures_the_published_setting() -> None:
    from scripts.bench import gpu_recurrent, gpu_recurrent_training, gpu_training
    from scripts.bench.random_models import random_head

    rounds, training = gpu_recurrent.REAL, gpu_recurrent_training.REAL
    assert rounds.target == training.target
    head = random_head(rounds.target, gpu_recurrent.BLOCKS, rounds.dtype, "meta")
    assert round(head.num_parameters / 1e5) == 4299, "429.9 M"
    assert (rounds.batch, rounds.batch_width, 1 + rounds.lengths[0]) == (8, 45, 5)
    assert training.row * training.step_rows == 128 * 2048
    chats = gpu_training.random_chats(training)
    supervised = sum(chat.mask.sum() for chat in chats) / sum(len(chat.ids) for chat in chats)
    assert abs(supervised - gpu_training.SUPERVISED) < 0.02
    assert all(not chat.mask[0] and len(chat.ids) <= training.row for chat in chats)


def test_a_timed_step_equals_a_step_of_the_training_loop(tmp_path: Path) -> None:
    from recurrent_drafting.predictions import PREDICTIONS
    from scripts.bench import common
    from scripts.bench.gpu_recurrent_training import HEADS, TOY
    from scripts.bench.gpu_training import random_chats, train_step
    from scripts.bench.random_models import random_head, random_model
    from training.data.packing import PackedData
    from training.features.states import TargetStates
    from training.heads.loss_config import HeadLossConfig
    from training.heads.objective import HeadObjective
    from training.objectives import freeze
    from training.optimizer import MasterAdamW
    from training.optimizer_config import OptimizerConfig

    states = TargetStates(freeze(random_model(TOY.target, TOY.dtype, "cpu")))
    data = PackedData(random_chats(TOY), TOY.row, TOY.step_rows, 0)
    config = OptimizerConfig(warmup_steps=1)

    def objective() -> HeadObjective:
        head = random_head(TOY.target, 2, TOY.dtype, "cpu")
        loss = HeadLossConfig("cross_entropy", predict_n_tokens=HEADS)
        return HeadObjective(PREDICTIONS, head, states, loss)

    def weights(trained: HeadObjective) -> torch.Tensor:
        return torch.cat([weight.flatten() for weight in trained.head.parameters()])

    def timed(number: int) -> torch.Tensor:
        made = objective()
        train_step(made, MasterAdamW(made.head, config), data, data.step_rows(number), TOY)
        return weights(made)

    tokens, part = TOY.step_rows * TOY.row, TOY.forward_rows * TOY.row
    loop = common.loop_config(1, tokens, "bfloat16", config, micro_batch_tokens=part)
    by_loop = objective()
    common.train_steps("loop", by_loop, by_loop.head, data, loop, "cpu")
    assert torch.equal(timed(0), weights(by_loop))
    assert not torch.equal(timed(1), weights(by_loop)), "the rows of another step"


def test_an_unknown_part_is_refused() -> None:
    done = subprocess.run(
        ["bash", "scripts/bench/gpu.sh", "speed"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "part 'speed' is unknown" in done.stderr


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("executions=graph,fast", "executions has 'fast', expected some of graph, eager, compiled"),
        ("only=(", r"only is '\(', expected a regular expression"),
        ("last_start=soon", "last_start is 'soon', expected a number of seconds"),
    ],
)
def test_a_bad_option_is_named(word: str, error: str) -> None:
    from scripts.bench import gpu

    with pytest.raises(SystemExit, match=f"^error: {error}"):
        gpu.parse(["device=cpu", word])
    assert gpu.parse(["device=cpu", "executions=eager", "last_start=9"]).last_start == 9.0


def test_only_the_losses_are_counted_without_computing() -> None:
    from scripts.bench import gpu

    assert gpu.parse(["part=losses", "device=meta"]).device == "meta"
    with pytest.raises(SystemExit, match="^error: device is 'meta', expected auto, cpu"):
        gpu.parse(["part=heads", "device=meta"])


def test_a_missing_gpu_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts.bench import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        SystemExit, match="^error: device 'cuda' does not exist: PyTorch finds no CUDA device"
    ):
        gpu.parse(["part=decode"])

"""Test `distill.train` end to end on a random target: its folder, resume, workers and errors."""

import json
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import distill.pretrain
from decoding.errors import UserError
from distill.config import TrainConfig
from distill.train import run
from jobs.run_folder import RunFolder
from tests.support.configurations import configuration
from tests.support.forks import Fork, run_forked
from tests.support.tiers import tiered
from training import checkpoint


def configured(target: Path, folder: Path, *overrides: str) -> TrainConfig:
    return configuration(*command(target, folder, *overrides))


def command(target: Path, folder: Path, *overrides: str) -> list[str]:
    return [
        "distill.train",
        "+experiment=smoke",
        f"target.path={target}",
        f"output_dir={folder}",
        *overrides,
    ]


@pytest.fixture(scope="module")
def finished(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(configured(tiny_target, folder))
    return folder


def test_the_drafter_folder_is_complete_and_loads(finished: Path, tiny_target: Path):
    drafter = finished / "drafter"
    model = AutoModelForCausalLM.from_pretrained(drafter)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.num_hidden_layers == 1
    assert (
        AutoTokenizer.from_pretrained(drafter).get_vocab()
        == AutoTokenizer.from_pretrained(tiny_target).get_vocab()
    )
    card = json.loads((drafter / "drafter_card.json").read_text())
    assert card["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert 0 < card["acceptance"]["acceptance"] < 1
    assert "--speculative-config" in (drafter / "README.md").read_text()
    read_by = drafter.stat().st_mode & 0o666  # the permissions of the folder
    assert all(file.stat().st_mode & 0o777 == read_by for file in drafter.iterdir()), (
        "other users may read it"
    )
    assert model.generation_config.assistant_confidence_threshold == 0.0


def test_the_run_folder_records_the_run(finished: Path):
    manifest = json.loads((finished / "manifest.json").read_text())
    assert manifest["finished"] is True
    assert manifest["metrics"]["tokens"] > 0
    assert manifest["metrics"]["texts"].keys() == {"data", "target"}
    assert all(len(digest) == 64 for digest in manifest["inputs"].values())
    records = [json.loads(line) for line in (finished / "metrics.jsonl").open()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4, 5, 6]
    assert any("held_out_acceptance" in record for record in records)


def test_a_finished_run_is_skipped(
    finished: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
):
    before = (finished / "drafter" / "model.safetensors").stat().st_mtime_ns
    run(configured(tiny_target, finished))
    assert "finished before" in capsys.readouterr().out
    assert (finished / "drafter" / "model.safetensors").stat().st_mtime_ns == before


def test_a_missing_drafter_of_a_finished_run_is_written_again(tiny_target: Path, tmp_path: Path):
    run(configured(tiny_target, tmp_path, "loop.max_steps=1"))
    before = load_file(tmp_path / "drafter" / "model.safetensors")
    shutil.rmtree(tmp_path / "drafter")
    run(configured(tiny_target, tmp_path, "loop.max_steps=1"))
    after = load_file(tmp_path / "drafter" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_target_without_a_tokenizer_is_named(tiny_target: Path, tmp_path: Path):
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(UserError, match="its tokenizer cannot be loaded"):
        run(configured(target, tmp_path / "run"))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("target", "computes non-finite logits .found nan.*Copy the model's weights again"),
        ("student", "the loss is nan .* at step 1, .*Check the folder that they come from"),
    ],
)
def test_weights_with_nan_are_named_before_a_step(
    broken: str, words: str, finished: Path, tiny_target: Path, tmp_path: Path
):
    source = tiny_target if broken == "target" else finished / "drafter"
    folder = shutil.copytree(source, tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    target = folder if broken == "target" else tiny_target
    student = ["student.init=folder", f"student.path={folder}"] if broken == "student" else []
    with pytest.raises(UserError, match=words):
        run(configured(target, tmp_path / "run", *student))
    assert not (tmp_path / "run" / "drafter").exists()


def test_the_recorded_command_repeats_the_run(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = RunFolder(configured(tiny_target, tmp_path))
    monkeypatch.setattr(sys, "argv", ["/somewhere/distill/train.py", "+experiment=smoke", "seed=3"])
    assert folder.command() == "python -m distill.train +experiment=smoke seed=3"
    monkeypatch.setattr(
        sys, "argv", ["/somewhere/distill/train.py", "--config-file", "/tmp/gone.yaml"]
    )
    assert folder.command() == f"python -m distill.train --config-file {tmp_path / 'config.yaml'}"


def test_a_finished_run_whose_input_changed_is_refused(tiny_target: Path, tmp_path: Path):
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    run(configured(target, tmp_path / "run", "loop.max_steps=1"))
    config = target / "generation_config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    with pytest.raises(UserError, match=r"target has changed since .*manifest.json"):
        run(configured(target, tmp_path / "run", "loop.max_steps=1"))


def test_distillation_raises_held_out_acceptance(tiny_target: Path, tmp_path: Path):
    run(
        configured(
            tiny_target,
            tmp_path,
            "loop.max_steps=30",
            "loop.eval_every=5",
            "student.init=random",
            "loop.optimizer.lr=5e-3",
        )
    )
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    acceptance = [
        record["held_out_acceptance"] for record in records if "held_out_acceptance" in record
    ]
    assert acceptance[-1] > acceptance[0]


def test_a_dry_run_writes_an_untrained_folder_that_loads(
    finished: Path, tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run(configured(tiny_target, tmp_path, "dry_run=true", "on_policy.share=0.25"))
    output = capsys.readouterr().out
    assert "MFLOP a token" in output
    assert "the student writes 25% of the rows (on_policy.share), and this cost" in output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "drafter")
    assert all(not parameter.any() for parameter in model.parameters())
    trained = {
        name: tensor.shape
        for name, tensor in load_file(finished / "drafter" / "model.safetensors").items()
    }
    assert {
        n: t.shape for n, t in load_file(tmp_path / "drafter" / "model.safetensors").items()
    } == trained
    assert not (tmp_path / "checkpoints").exists()
    assert json.loads((tmp_path / "manifest.json").read_text())["finished"] is False


def test_a_dry_run_of_pretraining_prints_the_cost_and_reads_no_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = ["+experiment=quickstart_target", "data.texts=[/nowhere]", "loop.max_steps=100"]
    given += [f"output_dir={tmp_path}", "dry_run=true"]
    distill.pretrain.run(configuration("distill.pretrain", *given))
    output = capsys.readouterr().out
    assert "M parameters" in output
    assert "TFLOP" in output
    assert "teacher" not in output
    assert not (tmp_path / "model").exists()


def test_the_zeros_of_a_dry_run_take_no_disk_space(tiny_target: Path, tmp_path: Path):
    run(
        configured(
            tiny_target,
            tmp_path,
            "dry_run=true",
            "student.init=random",
            "student.intermediate_size=100000",
        )
    )
    stored = (tmp_path / "drafter" / "model.safetensors").stat()
    assert stored.st_size > 10**7
    assert stored.st_blocks * 512 < stored.st_size / 10


def test_a_killed_run_resumes_to_the_same_drafter(
    finished: Path, tiny_target: Path, tmp_path: Path
):
    """Check that a run killed by SIGKILL and started again gives an uninterrupted run's weights."""
    process = Fork(*command(tiny_target, tmp_path, "threads=1"))
    checkpoints = tmp_path / "checkpoints"
    deadline = time.monotonic() + 120
    while (
        not list(checkpoints.glob("step_*"))
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL, "the run ended before the kill"
    assert not (tmp_path / "drafter").exists()
    run(configured(tiny_target, tmp_path))
    ours, straight = (
        load_file(folder / "drafter" / "model.safetensors") for folder in (tmp_path, finished)
    )
    assert all(torch.equal(ours[name], straight[name]) for name in straight)


@pytest.mark.long
def test_two_workers_make_the_same_drafter(finished: Path, tiny_target: Path, tmp_path: Path):
    given = command(tiny_target, tmp_path, "parallel=ddp", "parallel.processes=2")
    done = run_forked(*given)
    assert done.returncode == 0, done.stderr
    ours, straight = (
        load_file(folder / "drafter" / "model.safetensors") for folder in (tmp_path, finished)
    )
    for name in straight:
        torch.testing.assert_close(ours[name], straight[name], rtol=1e-4, atol=1e-5)
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open() if '"loss"' in line]
        for folder in (tmp_path, finished)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def until_it_trains(process: Fork, folder: Path, lines: int) -> None:
    """Wait until the run has written more than `lines` metrics or has ended.

    Returns after two minutes in any case.
    """
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.is_file() and metrics.read_text().count("\n") > lines:
            return
        time.sleep(0.01)


@pytest.mark.long
def test_a_dead_worker_ends_the_job_with_its_name(tiny_target: Path, tmp_path: Path):
    """Check that after a rank is killed, the job ends, names the rank and writes no drafter."""
    given = command(
        tiny_target,
        tmp_path,
        "parallel=ddp",
        "parallel.processes=2",
        "loop.max_steps=4000",
        "loop.eval_every=0",
    )
    process = Fork(*given)
    until_it_trains(process, tmp_path, lines=1)
    children = psutil.Process(process.pid).children()
    second = [child for child in children if child.environ().get("RANK") == "1"]
    assert len(second) == 1, f"{len(children)} children"
    second[0].kill()
    _, words = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "rank 1 of 2 was ended by SIGKILL" in words
    assert "the other ranks were stopped" in words
    assert "Run the same command to continue" in words
    assert not (tmp_path / "drafter").exists()


@pytest.mark.long
def test_ctrl_c_reaches_the_workers_once_and_the_job_resumes(tiny_target: Path, tmp_path: Path):
    given = command(
        tiny_target,
        tmp_path,
        "parallel=ddp",
        "parallel.processes=2",
        "loop.max_steps=200",
        "loop.eval_every=0",
        "threads=1",
    )
    process = Fork(*given)
    until_it_trains(process, tmp_path, lines=3)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130, words
    assert "Run the same command to continue" in words
    stopped = checkpoint.latest(tmp_path / "checkpoints", report=print)
    assert stopped is not None
    assert 3 < stopped.state["step"] < 200
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["target.path=/no/such/model"], "target.path=/no/such/model does not exist"),
        (["loss.name=mse"], "expected one of forward_kl, reverse_kl, .*, cross_entropy, mixture"),
        (["data.chats=[]"], "the train split is empty"),
        (
            ["data.max_length=9", "held_out.max_new_tokens=4"],
            "the train split is empty|no prompt of .* fits",
        ),
        (["parallel.kind=zero9", "parallel.processes=1"], "expected one of single, ddp"),
        (["parallel=ddp"], "without a GPU needs parallel.processes=N"),
        (
            ["parallel.processes=2"],
            "parallel.kind is single in a job of 2 ranks: use parallel=ddp",
        ),
        (
            ["data.max_length=100000"],
            "data.max_length is 100000, but the context of .* tokens. Lower data.max_length",
        ),
        (["target.device=cuda:7"], "device 'cuda:7' does not exist: PyTorch finds no CUDA device"),
        (["loop.tokens_per_step=100"], "less than one row of data.max_length"),
        (["data.chats=[embedded:nothing]"], "'embedded:nothing' is unknown"),
    ],
)
def test_invalid_values_are_refused(
    tiny_target: Path, tmp_path: Path, overrides: list[str], words: str
):
    with pytest.raises(UserError, match=words):
        run(configured(tiny_target, tmp_path, *overrides))


@pytest.mark.long
def test_a_sweep_makes_a_folder_for_each_member(tiny_target: Path, tmp_path: Path):
    """Check that valid members have folders, and that one that is refused stops no other."""
    given = command(
        tiny_target, tmp_path / "sweep", "-m", "student.num_hidden_layers=0,1,2", "dry_run=true"
    )
    done = run_forked(*given)
    assert done.returncode == 1
    assert (
        "1 of the sweep's members failed: 'student.num_hidden_layers=0' with status 2"
        in done.stderr
    )
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir()) == [
        f"student.num_hidden_layers={layers}" for layers in (1, 2)
    ]
    for layers in (1, 2):
        folder = tmp_path / "sweep" / f"student.num_hidden_layers={layers}" / "drafter"
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == layers


@pytest.mark.parametrize("dry", tiered([True, False], [False]))
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("loop.optimizer.lr=-1", "loop.optimizer.lr is -1.0, expected more than 0"),
        ("loop.log_every=0", "loop.log_every is 0, expected 1 or more"),
        ("loss.temperature=0", "loss.temperature is 0.0, expected more than 0"),
        ("held_out.max_prompts=0", "held_out.max_prompts is 0, expected 1 or more"),
        ("data.max_bad=-1", "data.max_bad is -1.0, expected a share from 0 to 1"),
        (
            "loss.name=forwards_kl",
            "loss.name is forwards_kl, expected one of .*; the nearest is forward_kl",
        ),
        ("target.backend=fast", "target.backend 'fast' is unknown, expected one of native, hf"),
        ("target.parallel=tp", "target.parallel is tp .*expected none and 0"),
        ("target.processes=2", "target.processes=2, expected none and 0"),
    ],
)
def test_values_are_checked_before_models_are_loaded(
    tiny_target: Path, tmp_path: Path, override: str, words: str, dry: bool
):
    with pytest.raises(UserError, match=words):
        run(configured(tiny_target, tmp_path, override, f"dry_run={str(dry).lower()}"))
    assert not any(tmp_path.iterdir())


def test_a_dry_run_does_not_claim_its_folder(tiny_target: Path, tmp_path: Path):
    for layers in (1, 2):
        run(
            configured(tiny_target, tmp_path, "dry_run=true", f"student.num_hidden_layers={layers}")
        )
        assert (
            json.loads((tmp_path / "drafter" / "config.json").read_text())["num_hidden_layers"]
            == layers
        )
    run(configured(tiny_target, tmp_path, "loop.max_steps=2"))
    trained = load_file(tmp_path / "drafter" / "model.safetensors")
    assert all(tensor.any() for tensor in trained.values())
    with pytest.raises(UserError, match="belongs to another configuration"):
        run(configured(tiny_target, tmp_path, "dry_run=true", "student.num_hidden_layers=2"))

"""Test the cache of the teacher's distributions: its estimates, its loss, its files and the job."""

import json
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from decoding.errors import UserError
from decoding.models.draft_vocabulary import restrict_head
from distill.train import run
from tests.distill.test_train import command, configured
from tests.support.forks import Fork, run_ranks
from training.cached_distillation import CachedDistillation
from training.config import StudentConfig
from training.data.packing import PackedData, Sample, collate
from training.features.teacher_cache import CachedTeacher, TeacherCache, teacher_cache
from training.features.teacher_config import TeacherConfig
from training.losses.config import LossConfig
from training.losses.eager import top_forward_kl
from training.losses.family import Reference, reference_rows
from training.losses.sparse import draw_tokens, estimate, likeliest, top_forward_kl_rows
from training.losses.teacher import TeacherRows
from training.models.build import build_llama
from training.objectives import Distillation, freeze

ALONE = SimpleNamespace(rank=0, world_size=1, is_main=True, wait=lambda: None)


def distributions(rows: int, vocabulary: int, mass: float = 1.0) -> TeacherRows:
    """Return random distributions whose probabilities sum to `mass`."""
    logits = torch.randn(rows, vocabulary, dtype=torch.float64) * 2
    p_CV = mass * torch.softmax(logits, dim=-1)
    return TeacherRows(p_CV, p_CV.sum(-1), torch.xlogy(p_CV, p_CV).sum(-1))


@pytest.mark.parametrize("mass", [1.0, 0.7])
@pytest.mark.parametrize("unbiased", [True, False])
def test_the_gradient_of_draws_is_unbiased(mass: float, unbiased: bool):
    """Compare the mean of many estimates by its standard error; uniform draws are the control."""
    torch.manual_seed(0)
    exact, repeats, draws = distributions(1, 9, mass), 20_000, 4
    many = TeacherRows(*(part.expand(repeats, *part.shape[1:]) for part in exact))
    uniforms = torch.rand(repeats, draws, dtype=torch.float64)
    ids = (uniforms * 9).long() if not unbiased else draw_tokens(many.p_CV, uniforms)
    found = estimate(ids, many.mass_C, many.negentropy_C, 9)
    rows, logits = reference_rows(LossConfig()), torch.randn(1, 9, dtype=torch.float64)
    right = rows(logits, Reference(teacher=exact))
    losses, gradients, _ = rows(logits.expand(repeats, 9).clone(), Reference(teacher=found))
    errors = []
    for values, wanted in ((losses[:, None], right[0][:, None]), (gradients, right[1])):
        error = values.std(0) / repeats**0.5
        errors += ((values.mean(0) - wanted[0]).abs() / error.clamp_min(1e-9)).tolist()
    assert (max(errors) < 5) == unbiased


@pytest.mark.parametrize("mass", [1.0, 0.7])
def test_the_loss_of_the_likeliest_tokens_equals_its_eager_twin(mass: float):
    """Check value and gradient in float64, and that all tokens give forward KL."""
    torch.manual_seed(1)
    teacher = distributions(6, 11, mass)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    top = likeliest(teacher, 3)
    losses, gradient, _ = top_forward_kl_rows(logits.detach(), top)
    twin = top_forward_kl(teacher.p_CV, torch.softmax(logits, -1), top.ids_CK)
    torch.testing.assert_close(losses, twin.detach(), rtol=1e-10, atol=1e-10)
    (wanted,) = torch.autograd.grad(twin.sum(), logits)
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)
    whole, slope, alpha = top_forward_kl_rows(logits.detach(), likeliest(teacher, 11))
    full = reference_rows(LossConfig())(logits.detach(), Reference(teacher=teacher))
    torch.testing.assert_close((whole, slope, alpha), full, rtol=1e-10, atol=1e-10)
    assert (losses < whole).all(), "a bucket hides a part of the divergence"


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    shape = StudentConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=24
    )
    return build_llama(shape, torch.float64, vocab_size=40)


@pytest.fixture
def data() -> PackedData:
    random = np.random.default_rng(3)
    samples = []
    for length in random.integers(5, 30, 24):
        mask = np.ones(length, dtype=bool)
        mask[: length // 3] = False
        samples.append(Sample(random.integers(0, 40, length).astype(np.int32), mask))
    return PackedData(samples, 32, 4, seed=0)


def cached(
    folder: Path,
    data: PackedData,
    teacher: Any,
    *,
    name: str = "hash",
    cache: str = "top_k",
    top_k: int = 40,
    temperature: float = 1.0,
    ids: torch.Tensor | None = None,
    parallel: Any = ALONE,
    seed: int = 0,
) -> TeacherCache:
    """Write the cache of a teacher if it is not there, and return it."""
    config = TeacherConfig(cache=cache, folder=str(folder), draws=8, top_k=top_k)
    cached = CachedTeacher(teacher, name, temperature, ids, seed)
    return teacher_cache(config, cached, data, parallel)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.features.teacher_cache.SHARD_BYTES", 4000)


@pytest.mark.parametrize(("temperature", "ids"), [(1.0, None), (2.0, [1, 4, 5, 9, 30])])
def test_a_cache_of_all_tokens_gives_the_loss_of_the_teacher(
    data: PackedData, tmp_path: Path, small_shards: None, temperature: float, ids: list[int] | None
):
    """Compare losses and gradients of batches in any order of rows; 3 tokens are the control."""
    student, teacher = tiny(0), freeze(tiny(1))
    shortlist = None if ids is None else torch.tensor(ids)
    if shortlist is not None:
        restrict_head(student, shortlist)
    loss = LossConfig(temperature=temperature)
    given = {"temperature": temperature, "ids": shortlist}
    online = Distillation(student, teacher, loss)
    few = cached(tmp_path, data, teacher, top_k=3, **given)
    whole = cached(tmp_path, data, teacher, **given)
    batch = collate(data.samples, data.step_rows(1), data.capacity)

    def gradients(objective: Any) -> list[torch.Tensor]:
        total, _ = objective(batch)
        return [total, *torch.autograd.grad(total, list(student.parameters()))]

    wanted = gradients(online)
    found = gradients(CachedDistillation(student, loss, whole))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)  # probabilities are float32
    coarse = gradients(CachedDistillation(student, loss, few))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(coarse, wanted, rtol=1e-4, atol=1e-5)


def shards(folder: Path) -> dict[str, int]:
    """Return the time of each shard's files."""
    return {file.parent.name: file.stat().st_mtime_ns for file in folder.glob("*/*/ids")}


def test_an_interrupted_cache_goes_on_and_an_altered_one_is_refused(
    data: PackedData, tmp_path: Path, small_shards: None, capsys: pytest.CaptureFixture[str]
):
    teacher = freeze(tiny(1))
    cached(tmp_path, data, teacher, cache="sampled")
    before = shards(tmp_path)
    assert len(before) == 2
    told = r"supervised tokens of 24 bytes, .* \(0 of 2 shards are there, .* free\)"
    assert re.search(told, capsys.readouterr().out)
    (cut,) = tmp_path.glob("*/shard_00001/ids")
    content = cut.read_bytes()
    cut.write_bytes(content[:-2])  # half-written
    capsys.readouterr()
    cached(tmp_path, data, teacher, cache="sampled")
    shown = capsys.readouterr()
    assert "shard_00001 is incomplete and is written again" in shown.err
    assert "(1 of 2 shards are there" in shown.out
    after = shards(tmp_path)
    assert {name for name in before if after[name] != before[name]} == {"shard_00001"}
    assert cut.read_bytes() == content
    cut.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(UserError, match=r"ids was altered .* Delete .*shard_00001"):
        cached(tmp_path, data, teacher, cache="sampled")


def test_draws_depend_on_the_seed_and_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check that equal rows in forwards of their own have other draws, and so have seeds."""
    monkeypatch.setattr("training.features.teacher_cache.FORWARD_TOKENS", 32)
    ids = np.random.default_rng(0).integers(0, 40, 32).astype(np.int32)
    data = PackedData([Sample(ids, np.arange(32) > 0)] * 4, 32, 4, seed=0)
    teacher, drawn = freeze(tiny(1)), []
    for seed in (0, 1):
        cached(tmp_path / str(seed), data, teacher, cache="sampled", seed=seed)
        (file,) = (tmp_path / str(seed)).glob("*/*/ids")
        drawn += [part.tobytes() for part in np.split(np.fromfile(file, "<u2"), 4)]
    assert len(set(drawn)) == 8
    cached(tmp_path / "again", data, teacher, cache="sampled")
    (file,) = (tmp_path / "again").glob("*/*/ids")
    assert [part.tobytes() for part in np.split(np.fromfile(file, "<u2"), 4)] == drawn[:4]


def test_a_large_cache_has_few_shards(
    data: PackedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Check that the number of open files is bounded, whatever the size of the cache."""
    monkeypatch.setattr("training.features.teacher_cache.SHARD_BYTES", 1)
    monkeypatch.setattr("training.features.teacher_cache.MOST_SHARDS", 3)
    cached(tmp_path, data, freeze(tiny(1)))
    assert len(data.rows) > 3 >= len(shards(tmp_path))


def test_ranks_write_shards_in_turn(data: PackedData, tmp_path: Path, small_shards: None):
    """Check that two ranks write what one writes, and that a rank alone writes its shards only."""
    teacher, barrier = freeze(tiny(1)), threading.Barrier(2, timeout=60)

    def of_rank(rank: int, folder: Path, wait: Callable[[], Any]) -> None:
        parallel = SimpleNamespace(rank=rank, world_size=2, is_main=rank == 0, wait=wait)
        cached(folder, data, teacher, cache="sampled", parallel=parallel)

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(lambda rank: of_rank(rank, tmp_path / "two", barrier.wait), range(2)))
    cached(tmp_path / "one", data, teacher, cache="sampled")
    contents = [
        {file.parent.name: file.read_bytes() for file in (tmp_path / name).glob("*/*/ids")}
        for name in ("one", "two")
    ]
    assert contents[0] == contents[1] and len(contents[0]) == 2
    with pytest.raises(UserError, match="shard_00000 disappeared"):
        of_rank(1, tmp_path / "half", lambda: None)
    assert list(shards(tmp_path / "half")) == ["shard_00001"]


def test_every_teacher_and_setting_has_a_cache_of_its_own(data: PackedData, tmp_path: Path):
    teacher = freeze(tiny(1))
    others = [{}, {"name": "other"}, {"temperature": 0.5}, {"cache": "sampled"}, {"top_k": 3}]
    others.append({"ids": torch.tensor([1, 2, 3])})
    for count, settings in enumerate(others, start=1):
        cached(tmp_path, data, teacher, **settings)
        assert len(list(tmp_path.iterdir())) == count
    data.samples[0].mask[-1] ^= True
    cached(tmp_path, data, teacher)
    assert len(list(tmp_path.iterdir())) == len(others) + 1


def test_a_teacher_with_nan_and_a_full_disk_leave_no_shard(data: PackedData, tmp_path: Path):
    """Check that a limit on the size of files, which fails as a full disk does, leaves nothing."""
    broken = tiny(1)
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    with pytest.raises(UserError, match=r"NaN or infinity in rows 1 to .* check the weights"):
        cached(tmp_path, data, freeze(broken))
    usual, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, usual[1]))
    try:
        with pytest.raises(UserError, match=r"could not write .*nothing was kept.*teacher.folder"):
            cached(tmp_path, data, freeze(tiny(1)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        signal.signal(signal.SIGXFSZ, handler)
    assert not shards(tmp_path)


@pytest.mark.parametrize("kind", ["sampled", "top_k"])
def test_a_job_trains_from_the_cache(kind: str, tiny_target: Path, tmp_path: Path):
    """Check that losses stay those of the teacher: exactly for all tokens, on average for draws."""
    given = [f"teacher.cache={kind}", "teacher.top_k=2048", "teacher.draws=256"]
    losses = {}
    for name, overrides in (("online", []), ("cached", given)):
        folder = tmp_path / name
        run(configured(tiny_target, folder, *overrides, f"teacher.folder={tmp_path / 'teacher'}"))
        records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        losses[name] = [record["loss"] for record in records if "loss" in record]
    near = 1e-4 if kind == "top_k" else 0.05
    assert losses["cached"] == pytest.approx(losses["online"], rel=near)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "drafter" / "model.safetensors")


@pytest.mark.long
def test_a_killed_job_goes_on_from_its_cache_to_the_same_drafter(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = ["teacher.cache=sampled", "threads=1"]

    def folders(name: str) -> list[str]:
        return [f"teacher.folder={tmp_path / name / 'teacher'}"]

    run(configured(tiny_target, tmp_path / "straight", *given, *folders("straight")))
    folder = tmp_path / "killed"
    process = Fork(*command(tiny_target, folder, *given, *folders("killed")))
    deadline = time.monotonic() + 120
    while not list(folder.glob("checkpoints/step_*")) and time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before the kill"
        time.sleep(0.005)
    process.kill()
    process.wait()
    capsys.readouterr()
    run(configured(tiny_target, folder, *given, *folders("killed")))
    assert "(1 of 1 shards are there" in capsys.readouterr().out
    ours, straight = weights(folder), weights(tmp_path / "straight")
    assert all(torch.equal(ours[name], straight[name]) for name in straight)


@pytest.mark.long
def test_ranks_share_a_cache_and_train_the_drafter_of_one_process(
    tiny_target: Path, tmp_path: Path
):
    names, caches = ("alone", "ranks"), []
    for name in names:
        given = [f"teacher.folder={tmp_path / name / 'teacher'}", "teacher.cache=sampled"]
        job = [*given, "threads=1", "target.device=cpu"]
        if name == "alone":
            run(configured(tiny_target, tmp_path / name, *job))
        else:
            run_ranks(*command(tiny_target, tmp_path / name, *job, "parallel=ddp"))
        (cache,) = (tmp_path / name / "teacher").iterdir()
        caches.append({path.name: path.read_bytes() for path in cache.glob("shard_*/*")})
    assert caches[0] == caches[1] and caches[0]
    ours, alone = (weights(tmp_path / name) for name in names)
    for name, tensor in alone.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss=reverse_kl"], "teacher.cache is sampled, expected none with this loss"),
        (["teacher.cache=all"], "teacher.cache is all, expected one of none, sampled, top_k"),
        (["on_policy.share=0.5"], "expected none with on_policy.share"),
        (["parallel=fsdp"], "expected none where ranks share the target's weights"),
        (["loss.cache_mb=9"], "loss.cache_mb is 9, expected 0 with teacher.cache=sampled"),
        (["teacher.draws=0"], "teacher.draws is 0, expected 1 or more"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    overrides: list[str], words: str, tiny_target: Path, tmp_path: Path
):
    with pytest.raises(UserError, match=words):
        run(configured(tiny_target, tmp_path, "teacher.cache=sampled", *overrides))

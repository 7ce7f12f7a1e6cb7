"""Test the mixture of domains in mode l0: measured losses, moved shares, resume and handover."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import distill.prune.masks
import distill.train
from decoding.errors import UserError
from decoding.models.text.tokenizer import load_tokenizer
from distill.acceptance import HeldOutAcceptance
from distill.config import TrainConfig
from distill.prune.job import check, run
from jobs.job import CONF
from tests.support.configurations import configuration
from tests.support.pruned_folders import BRIEF, NARROW, configured, same, weights
from training.data.from_config import held_out_samples
from training.data.mixture import update_shares
from training.models.build import load_causal_lm

from .test_prune_ranks import prune

NAMES = ("licence", "list")
SHARES = (0.25, 0.75)
MOVING = (
    *BRIEF,
    *NARROW,
    "student.intermediate_size=32",
    "data=domains",
    "data.mixing=loss",
    "data.uniform_share=0",
    "data.floor_share=0",
    "data.held_out_tokens=400",
    "loop.eval_every=2",
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write NAME.txt, and other text of the same kind to NAME_held_out.txt; return their folder."""
    root = tmp_path_factory.mktemp("texts")
    licence = (CONF.parent / "assets" / "LICENSE-PYTHON.txt").read_text()
    lists = [", ".join(str(i * k) for i in range(1200)) for k in (3, 7)]
    for name, parts in zip(NAMES, ((licence[:9000], licence[9000:12000]), lists), strict=True):
        for ending, text in zip(("", "_held_out"), parts, strict=True):
            (root / f"{name}{ending}.txt").write_text(text)
    return root


def domains(texts: Path, *references: float) -> list[str]:
    """Return the overrides that define the two domains with these reference losses."""
    return [
        f"+data.domains.{name}={{texts: [{texts}/{name}.txt], held_out_texts: "
        f"[{texts}/{name}_held_out.txt], share: {share}, reference: {reference}}}"
        for name, share, reference in zip(NAMES, SHARES, references, strict=True)
    ]


def records(folder: Path, key: str, work: str = "work/1") -> list[float]:
    lines = (folder / work / "metrics.jsonl").read_text().splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


@pytest.fixture(scope="module")
def moved(
    tiny_target: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """Learn masks with shares that follow the losses; return the run and its overrides.

    Only the licence is above its reference: random weights have losses of some log 2048 = 7.6.
    """
    folder = tmp_path_factory.mktemp("moved") / "run"
    given = [*MOVING, *domains(texts, 6.5, 99.0)]
    run(configured(tiny_target, folder, *given))
    return folder, given


def test_shares_move_to_the_domain_with_excess_loss(moved: tuple[Path, list[str]]):
    """Check the shares after every evaluation against the published update."""
    folder, _ = moved
    losses, shares = (records(folder, f"{key}/licence") for key in ("held_out_loss", "share"))
    assert len(losses) == len(shares) == 3
    share = SHARES[0]
    for loss, found in zip(losses, shares, strict=True):
        grown = share * math.exp(loss - 6.5)
        share = grown / (grown + 1 - share)
        assert found == pytest.approx(share, rel=1e-9)
    assert SHARES[0] < shares[0] < shares[1] < shares[2]
    card = json.loads((folder / "student" / "drafter_card.json").read_text())
    assert card["data"]["shares"]["licence"] == shares[-1]
    assert records(folder, "shares/licence", ".") == [shares[-1]], "in the record of the stages"


def test_the_losses_are_those_of_the_masked_model(moved: tuple[Path, list[str]], tiny_target: Path):
    """Check the last loss of a domain against the cut student's; the target's is the control."""
    folder, given = moved
    config = configured(tiny_target, folder, *given)
    held_out = held_out_samples(load_tokenizer(tiny_target), config.data, show=False)
    student, target = (
        load_causal_lm(path, torch.float32) for path in (folder / "student", tiny_target)
    )
    for name in NAMES:
        of_student, of_target = (
            HeldOutAcceptance(model, target, held_out[name], config.data.max_length, 1.0).totals()
            for model in (student, target)
        )
        found = records(folder, f"held_out_loss/{name}")[-1]
        assert found == pytest.approx(of_student.loss / of_student.tokens, rel=1e-5)
        assert found != pytest.approx(of_target.loss / of_target.tokens, rel=1e-3)


@pytest.fixture(scope="module")
def at_references(moved: tuple[Path, list[str]], tiny_target: Path, texts: Path) -> Path:
    """Repeat the run with the losses of its first evaluation as references; return its folder."""
    before, _ = moved
    references = [records(before, f"held_out_loss/{name}")[0] for name in NAMES]
    given = [*MOVING, *domains(texts, *references), "data.clip_gaps=false"]
    run(configured(tiny_target, before.parent / "at_references", *given))
    return before.parent / "at_references"


def test_losses_at_their_references_leave_the_shares_constant(at_references: Path):
    shares = records(at_references, "share/licence")
    assert shares[0] == SHARES[0]
    assert shares[1] != SHARES[0], "control: later losses differ from the references"


def test_a_resumed_run_equals_a_straight_one(
    moved: tuple[Path, list[str]],
    at_references: Path,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Check a run that stops after the shares have moved, and resumes from its checkpoint."""
    straight, given = moved
    folder, sample = tmp_path / "run", distill.prune.masks.Masks.sample

    def until_step_5(self: distill.prune.masks.Masks, step: int, *place: int):
        if step == 5:
            raise KeyboardInterrupt
        return sample(self, step, *place)

    monkeypatch.setattr(distill.prune.masks.Masks, "sample", until_step_5)
    with pytest.raises(KeyboardInterrupt):
        run(configured(tiny_target, folder, *given))
    monkeypatch.undo()
    run(configured(tiny_target, folder, *given))
    assert same(weights(folder), weights(straight))
    for key in ("loss", "held_out_loss/list", "share/licence", "rows/licence"):
        assert records(folder, key) == records(straight, key), key
    assert not same(weights(at_references), weights(straight)), "control: the shares matter"


@pytest.mark.long
def test_every_stage_starts_from_the_shares_of_the_one_before(
    tiny_target: Path, texts: Path, tmp_path: Path
):
    """Check masks, distillation and masks again; a rerun of the last stage gives the same."""
    folder, rate = tmp_path / "run", 0.1
    given = [*MOVING, *domains(texts, 6.5, 99.0), "depths=[3]", f"data.mixing_rate={rate}"]
    given += ["loop.eval_every=0", "data.clip_gaps=false"]
    run(configured(tiny_target, folder, *given))
    shares = dict(zip(NAMES, SHARES, strict=True))
    for work in ("work/1", "work/1/between", "work/2"):
        gaps = {
            name: records(folder, f"held_out_loss/{name}", work)[0] - reference
            for name, reference in zip(NAMES, (6.5, 99.0), strict=True)
        }
        shares = update_shares(shares, gaps, rate, 0.0, 0.0)
        found = {name: records(folder, f"share/{name}", work)[0] for name in NAMES}
        assert found == pytest.approx(shares, rel=1e-9), work
    before = weights(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"finished": False}))
    shutil.rmtree(folder / "student")
    shutil.rmtree(folder / "work" / "2")
    run(configured(tiny_target, folder, *given))
    assert same(weights(folder), before)
    assert records(folder, "share/list", "work/2")[0] == found["list"]


@pytest.mark.exhaustive  # of the kinds of ranks, every `--all` tests FSDP's masks
def test_two_ranks_move_equal_shares(
    moved: tuple[Path, list[str]], tiny_target: Path, tmp_path: Path
):
    alone, given = moved
    prune(tiny_target, tmp_path / "run", *given, "parallel=ddp", "parallel.processes=2")
    for key in ("share/licence", "held_out_loss/licence", "loss"):
        assert records(tmp_path / "run", key) == pytest.approx(records(alone, key), rel=1e-4), key
    assert records(tmp_path / "run", "rows/list") == records(alone, "rows/list")


def training(target: Path, folder: Path, *overrides: str) -> TrainConfig:
    brief = "data=domains data.max_length=128 loop.max_steps=1 loop.eval_every=1".split()
    given = ["+experiment=smoke", f"target.path={target}", f"output_dir={folder}", *brief]
    return configuration("distill.train", *given, *overrides)


@pytest.mark.long
def test_distillation_starts_from_the_final_shares_of_pruning(
    moved: tuple[Path, list[str]], tiny_target: Path, texts: Path, tmp_path: Path
):
    pruned, _ = moved
    given = [*domains(texts, 6.5, 99.0), "data.mixing=fixed"]
    config = training(tiny_target, tmp_path, *given, f"data.shares_from={pruned}/student")
    assert config.data.domains["licence"].share == SHARES[0], "control"
    distill.train.run(config)
    shares = records(tmp_path, "share/licence", ".")
    assert shares == pytest.approx(records(pruned, "share/licence")[-1:])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert str(pruned / "student" / "drafter_card.json") in manifest["inputs"]


def test_modes_that_train_no_masks_refuse_moving_shares(
    tiny_target: Path, texts: Path, tmp_path: Path
):
    config = configured(tiny_target, tmp_path / "run", *MOVING, *domains(texts, 6.5, 99.0))
    check(config)
    for more in ({"mode": "importance"}, {"mode": "random"}, {"masks": "masks.safetensors"}):
        with pytest.raises(
            UserError, match=r"data.mixing is loss, expected fixed, because only .* \(mode=l0"
        ):
            check(dataclasses.replace(config, **more))
    config.data.domains["list"].held_out_texts = []
    with pytest.raises(UserError, match="data.domains.list has no held-out text"):
        check(config)

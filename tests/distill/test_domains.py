"""Test mixtures in the jobs: figures per domain, shares, exhausted domains and invalid ones."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import distill.pretrain
import distill.train
from decoding.errors import UserError
from distill.acceptance import HeldOutAcceptance, score_mixture
from distill.config import PretrainConfig, TrainConfig
from jobs.job import CONF
from tests.support.configurations import configuration
from tests.support.forks import run_ranks
from training.config import StudentConfig
from training.data.from_config import sample_evenly
from training.data.packing import Sample
from training.models.build import build_llama

ROOT = CONF.parent
DOMAINS = {
    "functions": "{chats: ['embedded:chats'], held_out_chats: ['embedded:held_out_chats'], share: "
    "3%s}",
    "words": "{texts: [train/words.txt], held_out_texts: [held_out/words.txt], share: 1%s}",
}
TOY = [
    "+experiment=smoke",
    "data=domains",
    "data.max_samples=40",
    "data.max_length=256",
    "data.held_out_tokens=600",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write train/words.txt and held_out/words.txt, two parts of a licence; return their folder."""
    root = tmp_path_factory.mktemp("texts")
    words = (ROOT / "assets" / "LICENSE-PYTHON.txt").read_text()
    for split, text in (("train", words[:9000]), ("held_out", words[9000:12000])):
        (root / split).mkdir()
        (root / split / "words.txt").write_text(text)
    return root


def domains(texts: Path, functions: str = "", words: str = "") -> list[str]:
    more = {"functions": functions, "words": words}
    return [
        f"data.root={texts}",
        *(f"+data.domains.{name}={DOMAINS[name] % more[name]}" for name in DOMAINS),
    ]


def training(target: Path, folder: Path, *overrides: str) -> TrainConfig:
    given = [*TOY, f"target.path={target}", f"output_dir={folder}", *overrides]
    return configuration("distill.train", *given)


def pretraining(folder: Path, *overrides: str) -> PretrainConfig:
    shape = (
        "model.num_hidden_layers=1 model.hidden_size=32 model.num_attention_heads=4 "
        "model.intermediate_size=48"
    )
    loop = (
        "loop.max_steps=4 loop.tokens_per_step=1024 loop.micro_batch_tokens=512 loop.eval_every=2"
    )
    given = [*TOY[1:], *shape.split(), *loop.split(), f"output_dir={folder}", *overrides]
    return configuration("distill.pretrain", *given)


def records(folder: Path, key: str) -> list[float]:
    return [
        found[key] for found in map(json.loads, (folder / "metrics.jsonl").open()) if key in found
    ]


def test_distillation_measures_each_domain_and_adapts_the_shares(
    tiny_target: Path, texts: Path, tmp_path: Path
):
    folder = distill.train.run(training(tiny_target, tmp_path, *domains(texts)))
    alpha = {name: records(tmp_path, f"held_out_acceptance/{name}") for name in DOMAINS}
    assert len(alpha["words"]) == 2, "evaluations after steps 3 and 6"
    assert records(tmp_path, "held_out_worst_domain_acceptance") == [
        min(pair) for pair in zip(*alpha.values())
    ]
    shares = records(tmp_path, "share/words")
    worst = "words" if alpha["words"][0] < alpha["functions"][0] else "functions"
    assert (shares[0] > 0.25) == (worst == "words"), (
        "the domain with the lowest acceptance gains share"
    )
    assert shares[0] + records(tmp_path, "share/functions")[0] == pytest.approx(1)
    rows = [records(tmp_path, f"rows/{name}")[-1] for name in DOMAINS]
    assert sum(rows) == 6 * 4, "every row of every step belongs to one domain"
    card = json.loads((folder / "drafter_card.json").read_text())
    assert card["data"]["sources"] == ["embedded:chats", str(texts / "train" / "words.txt")]
    assert card["acceptance"]["acceptance/words"] in alpha["words"]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert str(texts / "held_out" / "words.txt") in manifest["inputs"]


def test_pretraining_from_domains_follows_the_reference_losses(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # an untrained model has a loss of log 2048 = 7.6
    references = {"functions": ", reference: 7.0", "words": ", reference: 2.0"}
    distill.pretrain.run(pretraining(tmp_path, *domains(texts, **references), "data.mixing=loss"))
    losses = {name: records(tmp_path, f"held_out_loss/{name}") for name in DOMAINS}
    grown = 0.25 * np.exp(losses["words"][0] - 2.0)
    stayed = 0.75 * np.exp(max(0.0, losses["functions"][0] - 7.0))
    after = (1 - 1e-4) * grown / (grown + stayed) + 1e-4 / 2
    # 0.99, because the other domain keeps its floor
    assert records(tmp_path, "share/words")[0] == pytest.approx(min(after, 0.99), rel=1e-6)
    assert (
        min(min(losses.values()))
        <= records(tmp_path, "held_out_loss")[0]
        <= max(max(losses.values()))
    )
    assert "mixture (loss): functions 75.0% of" in capsys.readouterr().out


def test_a_domain_that_runs_out_ends_the_job_with_its_artefact(
    tiny_target: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    more = [
        "loop.max_steps=500",
        "loop.tokens_per_step=512",
        "data.mixing=fixed",
        "data.when_exhausted=stop",
    ]
    folder = distill.train.run(training(tiny_target, tmp_path, *domains(texts), *more))
    assert "of 500: domain '" in capsys.readouterr().err
    assert (folder / "model.safetensors").is_file()
    assert json.loads((tmp_path / "manifest.json").read_text())["finished"] is True


def test_fixed_shares_need_no_held_out_text_and_unmeasured_domains_are_noted(
    tiny_target: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = domains(texts, words=", held_out_texts: []")
    distill.train.run(
        training(tiny_target, tmp_path, *given, "data.mixing=fixed", "loop.max_steps=2")
    )
    assert "domain words has no held-out text and is not measured" in capsys.readouterr().out
    assert records(tmp_path, "held_out_acceptance/functions")
    assert not records(tmp_path, "held_out_acceptance/words")
    assert records(tmp_path, "share/words") == [0.25]


@pytest.mark.parametrize(
    ("functions", "words", "override", "expected"),
    [
        ("", ", texts: [train/none.txt]", "seed=0", "none.txt does not exist"),
        ("", ", texts: []", "seed=0", "data.domains.words is empty"),
        ("", ", share: -1", "seed=0", "shares of data.domains"),
        ("", "", "data.mixing=loss", "data.domains.functions.reference is 0"),
        (
            "",
            ", held_out_texts: []",
            "data.mixing=acceptance",
            "data.domains.words has no held-out text",
        ),
        ("", "", "data.chats=['embedded:chats']", "data.domains cannot be combined with"),
    ],
)
def test_invalid_domains_are_refused(
    tiny_target: Path,
    texts: Path,
    tmp_path: Path,
    functions: str,
    words: str,
    override: str,
    expected: str,
):
    with pytest.raises(UserError, match=expected):
        distill.train.run(
            training(tiny_target, tmp_path, *domains(texts, functions, words), override)
        )


def test_pretraining_refuses_mixing_by_acceptance(texts: Path, tmp_path: Path):
    with pytest.raises(
        UserError,
        match="data.mixing is acceptance, whose figures .* Expected fixed or loss",
    ):
        distill.pretrain.run(pretraining(tmp_path, *domains(texts), "data.mixing=acceptance"))


def test_domain_figures_are_acceptance_and_loss_on_its_text():
    """Check that a domain's figures equal those computed from complete logits.

    The reference reads one document at a time, without packing.
    """
    shape = StudentConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(
            build_llama(
                shape,
                torch.float32,
                vocab_size=61,
                max_position_embeddings=64,
                initializer_range=0.2,
            )
        )
    student, teacher = models
    random = np.random.default_rng(0)
    found: dict[str, list[Sample]] = {}
    expected: dict[str, float] = {}
    for name, count in (("a", 5), ("b", 3)):
        found[name] = []
        overlap = loss = tokens = 0.0
        for _ in range(count):
            ids = random.integers(0, 61, int(random.integers(6, 30))).astype(np.int32)
            mask = random.random(len(ids)) < 0.7
            mask[0], mask[-1] = False, True
            found[name].append(Sample(ids, mask))
            row = torch.from_numpy(ids).long()[None]
            bias = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
            q, p = (
                torch.log_softmax(model(row, attention_bias=bias).logits[0, :-1].detach(), -1)
                for model in models
            )
            keep = torch.from_numpy(mask[1:])
            overlap += float(torch.minimum(p.exp(), q.exp()).sum(-1)[keep].sum())
            loss -= float(q.gather(1, row[0, 1:, None])[keep].sum())
            tokens += float(keep.sum())
        expected |= {f"acceptance/{name}": overlap / tokens, f"loss/{name}": loss / tokens}
    scored = {
        name: HeldOutAcceptance(student, teacher, samples, 64, 1.0)
        for name, samples in found.items()
    }
    figures = score_mixture(scored["a"], scored)
    for key, value in expected.items():
        assert figures[key] == pytest.approx(value, rel=1e-5)
    assert figures["worst_domain_acceptance"] == min(
        figures["acceptance/a"], figures["acceptance/b"]
    )
    assert figures["score"] == figures["acceptance"] == figures["acceptance/a"]


def test_held_out_text_is_sampled_evenly():
    ten = [
        Sample(np.full(10, number, dtype=np.int32), np.ones(10, dtype=bool))
        for number in range(100)
    ]
    assert len(sample_evenly(ten, 0)) == len(sample_evenly(ten, 10**6)) == 100
    assert [int(sample.ids[0]) for sample in sample_evenly(ten, 200)] == list(range(0, 100, 5))


@pytest.mark.long
def test_two_ranks_read_equal_rows_and_adapt_equal_shares(
    tiny_target: Path, texts: Path, tmp_path: Path
):
    distill.train.run(training(tiny_target, tmp_path / "one", *domains(texts)))
    given = [*TOY, f"target.path={tiny_target}", f"output_dir={tmp_path / 'two'}", *domains(texts)]
    run_ranks("distill.train", *given, "parallel=ddp", "parallel.processes=2")
    for key in ("loss", "share/words", "rows/words", "held_out_acceptance/words"):
        one, two = (records(tmp_path / name, key) for name in ("one", "two"))
        assert len(one) > 1
        assert one == pytest.approx(two, rel=1e-4), key

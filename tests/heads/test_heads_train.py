"""`heads.train`: equality with the recurrent head's job, and the kind that a command selects."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import heads.train
import recurrent_drafting.train
from decoding.drafters.registry import TRAINED
from decoding.errors import UserError
from heads.registry import KINDS, kind_of
from heads.train import find_kind_name, schema_of
from jobs.help import field_docs
from jobs.job import CONF
from tests.support.configurations import configuration
from tests.support.forks import run_forked
from training.heads.config import HeadJobConfig

SMALL = [
    "data.max_samples=40",
    "data.max_length=256",
    "held_out.max_prompts=4",
    "held_out.max_new_tokens=16",
    "loop.max_steps=4",
    "loop.tokens_per_step=1024",
    "loop.micro_batch_tokens=512",
    "loop.eval_every=2",
    "target.device=cpu",
    "threads=1",
]


def configured(job: str, *overrides: str) -> Any:
    return configuration(job, *SMALL, *overrides)


@pytest.mark.parametrize("name", KINDS)
def test_every_preset_has_a_kind_a_schema_and_documented_options(name: str):
    kind = kind_of(name)
    assert issubclass(kind.config, HeadJobConfig)
    config = configured("heads.train", f"head={name}", "target.path=x")
    assert config.kind == kind.name and config.job == "heads.train"
    docs = field_docs(schema_of(kind.name))
    assert all(docs.values()), [key for key, words in docs.items() if not words]


def test_heads_learn_the_targets_distribution_unless_a_recipe_says_otherwise():
    """Check the default loss of both jobs, and that published recipes keep their own."""
    for name in KINDS:
        loss = configured("heads.train", f"head={name}", "target.path=x").loss
        assert loss.name == ("mixture" if name == "dspark" else "forward_kl"), name
    job = "recurrent_drafting.train"
    assert configured(job, "target.path=x").loss.name == "forward_kl"
    assert configured(job, "+experiment=redrafter_vicuna_7b").loss.name == "cross_entropy"


def test_every_file_of_a_head_is_a_preset_and_every_kind_has_one():
    assert {file.stem for file in (CONF / "head").glob("*.yaml")} == set(KINDS)
    assert {kind_of(name).name for name in KINDS} == set(TRAINED)


def test_the_recurrent_head_equals_that_of_its_job(tiny_target: Path, tmp_path: Path):
    given = [f"target.path={tiny_target}", "head.zero_blocks=true", "head.draft_vocab_size=300"]
    own, also, other = (tmp_path / name for name in ("own", "also", "other"))
    recurrent_drafting.train.run(
        configured("recurrent_drafting.train", *given, f"output_dir={own}")
    )
    for folder, more in ((also, "seed=0"), (other, "seed=1")):
        heads.train.run(configured("heads.train", *given, more, f"output_dir={folder}"))
    weights, same, different = (
        load_file(folder / "drafter" / "model.safetensors") for folder in (own, also, other)
    )
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not torch.equal(weights["rnn_w.weight"], different["rnn_w.weight"]), "the control"
    for name in ("config.json", "README.md"):
        assert (own / "drafter" / name).read_bytes() == (also / "drafter" / name).read_bytes()
    manifest = json.loads((also / "manifest.json").read_text())
    assert manifest["finished"] and manifest["job"] == "heads.train"


def test_the_texts_are_reported_before_the_first_step(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Check that a head's training shows how near its data is to the target's own text."""
    given = ["head=medusa", f"target.path={tiny_target}", f"output_dir={tmp_path}"]
    heads.train.run(configured("heads.train", *given, "loop.max_steps=1"))
    figures = json.loads((tmp_path / "manifest.json").read_text())["metrics"]["texts"]
    assert figures.keys() == {"data", "target"}
    words = " ".join(capsys.readouterr().out.split())
    for name, title in (("data", "training data"), ("target", "the target's answers, greedy")):
        shown = figures[name]
        assert f" {title} {shown['argmax']:.0%} {shown['log_prob']:.2f} nats" in words
    assert figures["target"]["argmax"] == 1 > figures["data"]["argmax"]
    assert "KL to the student" not in words


def test_the_kind_comes_from_the_command_line_an_experiment_or_a_saved_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(heads.train, "CONF", tmp_path)
    for name in ("experiment", "head"):
        (tmp_path / name).mkdir()
    for preset, kind in (("other", "eagle3"), ("recurrent", "recurrent")):
        (tmp_path / "head" / f"{preset}.yaml").write_text(f"kind: {kind}\n")
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "defaults: [{override /loss: forward_kl}, {override /head: other}]\njob: heads.train\n"
    )
    (tmp_path / "saved.yaml").write_text("job: heads.train\nkind: eagle3\n")
    assert find_kind_name(["loop.max_steps=1"]) == "recurrent"
    assert find_kind_name(["head=other", "seed=1"]) == "eagle3"
    assert find_kind_name(["+experiment=mine"]) == "eagle3"
    assert find_kind_name(["+experiment=mine", "head=recurrent"]) == "recurrent"
    assert find_kind_name(["--config-file", str(tmp_path / "saved.yaml")]) == "eagle3"
    assert find_kind_name(["head=none_such"]) == "recurrent"
    assert find_kind_name(["+experiment=none_such"]) == "recurrent"


def test_a_kind_that_differs_from_the_configuration_is_refused(tmp_path: Path):
    config = configured("heads.train", "target.path=x", "kind=none_such")
    with pytest.raises(UserError, match="kind=none_such is unknown, expected one of recurrent"):
        heads.train.run(config)
    for name in {*TRAINED} - {"recurrent"}:
        config = configured("heads.train", "target.path=x", f"kind={name}")
        with pytest.raises(UserError, match=f"kind={name} is set only by a file of conf/head"):
            heads.train.run(config)


def ran(*arguments: str) -> str:
    done = run_forked("heads.train", *arguments)
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_the_command_names_kinds_and_keys():
    words = ran("head=none_such")
    known = ", ".join(sorted(KINDS))
    assert f"there is no conf/head/none_such.yaml. Set head= to one of {known}" in words
    words = ran("head=recurrent", "head.rnm=false")
    assert "unknown configuration key 'head.rnm'; the nearest valid key is 'head.rnn'" in words


@pytest.mark.long
def test_a_dry_run_resumes_from_its_saved_configuration(tiny_target: Path, tmp_path: Path):
    folder = tmp_path / "run"
    given = [*SMALL, f"target.path={tiny_target}", "dry_run=true", f"output_dir={folder}"]
    assert "untrained head folder" in ran("head=recurrent", *given)
    assert "untrained head folder" in ran("--config-file", str(folder / "config.yaml"))

"""Test dry runs of every kind of head, without the target's folder, and their estimates."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import heads.train
from decoding.errors import UserError
from heads.registry import KINDS, kind_of
from heads.sdsat.kind import KIND as SDSAT
from heads.sdsat.model import SdsatConfig
from tests.heads.test_heads_train import configured
from tests.support.tiers import tiered
from tests.support.tiny_targets import hf_model
from training.heads.measure import measure
from training.models.shapes import parameter_counts

V = 300
SIZES = {
    "model_type": "llama",
    "vocab_size": V,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WITH_MASKS = {
    "p_eagle",
    "parallelspec",
    "dflash",
    "dflash2",
    "domino",
    "dspark",
    "jetspec",
    "specdiff",
}
WITH_VOCABULARY = [name for name in KINDS if name not in ("sdsat", "eagle1")]


def dry_run(folder: Path, *given: str, width: int = 64) -> Path:
    overrides = ["target.path=/nowhere/model", "dry_run=true", f"output_dir={folder}", *given]
    config = configured("heads.train", *overrides)
    config.target.config = {**SIZES, "hidden_size": width, "intermediate_size": 2 * width}
    heads.train.run(config)
    return folder / "drafter"


@pytest.mark.parametrize("name", KINDS)
def test_a_dry_run_needs_no_folder_of_the_target(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dry_run(tmp_path, f"head={name}", "loss=forward_kl")
    head: Any = kind_of(name).load(folder)
    note = f"note: without the target's tokenizer, the mask token of this dry run is {V - 1}"
    assert (note in capsys.readouterr().out) == (name in WITH_MASKS)
    if name in WITH_MASKS:
        assert head.config.mask_token_id == V - 1


def test_a_dry_run_takes_the_mask_token_that_is_set(tmp_path: Path) -> None:
    folder = dry_run(tmp_path / "set", "head=dflash", "head.mask_token_id=7")
    assert kind_of("dflash").read_shape(folder).mask_token_id == 7
    with pytest.raises(UserError, match="head.mask_token_id is 300, expected an id from 0 to 299"):
        dry_run(tmp_path / "outside", "head=dflash", f"head.mask_token_id={V}")


@pytest.mark.parametrize("name", tiered(WITH_VOCABULARY, ["medusa", "eagle3", "dspark"]))
def test_a_vocabulary_no_larger_than_the_draft_vocabulary_is_drafted_in_full(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "so the head drafts from all of them"
    for size, drafts_all in ((V - 1, False), (V, True)):
        run = tmp_path / str(size)
        dry_run(run, f"head={name}", "loss=forward_kl", f"head.draft_vocab_size={size}")
        card = json.loads((run / "drafter" / "drafter_card.json").read_text())
        assert card["shape"]["draft_vocab_size"] == 0, "a dry run counts no tokens"
        printed = capsys.readouterr().out
        assert (note in printed) == drafts_all
        assert ("the draft vocabulary is chosen from the data" in printed) != drafts_all


def test_an_unknown_choice_of_the_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="head.draft_vocabulary is likely, expected one of mass, counts"
    ):
        dry_run(tmp_path, "head=eagle3", "head.draft_vocabulary=likely")


def test_such_a_head_is_trained_on_all_tokens(tiny_target: Path, tmp_path: Path) -> None:
    given = ["head=eagle3", f"target.path={tiny_target}", f"output_dir={tmp_path}"]
    folder = heads.train.run(
        configured("heads.train", *given, "head.draft_vocab_size=8192", "loop.max_steps=1")
    )
    shape = kind_of("eagle3").read_shape(folder)
    assert shape.draft_vocab_size == 0 and shape.num_drafted == shape.vocab_size


@pytest.mark.parametrize("name", ["sdsat", "dflash"])
def test_estimates_count_the_drafts_that_train(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that memory and operations are those of loss.drafts_per_row drafts in a row."""
    sizes = ["loop.micro_batch_tokens=262144", "loop.tokens_per_step=262144", "data.max_length=256"]
    found = {}
    for drafts in (0, 32, 16):
        run = tmp_path / str(drafts)
        dry_run(run, f"head={name}", f"loss.drafts_per_row={drafts}", *sizes, width=1024)
        printed = capsys.readouterr().out
        limited = f"at each of {drafts} of the 256 in a row (loss.drafts_per_row)"
        assert (limited in printed) == bool(drafts)
        pattern = r"cost: (\S+) MFLOP per token: target (\S+),(?s:.*)activations (\S+),"
        [figures] = re.findall(pattern, printed)
        total, target, kept = (float(figure.replace(",", "")) for figure in figures)
        found[drafts] = total - target, kept
    trained = 0.6 * 256
    for figure in (0, 1):
        # figures are printed in whole units
        assert found[0][figure] / found[32][figure] == pytest.approx(trained / 32, rel=0.1)
        assert found[32][figure] / found[16][figure] == pytest.approx(2, rel=0.1)


def test_frozen_weights_are_not_counted_as_kept() -> None:
    """Check that a draft keeps less than the frozen layers that it runs through."""
    model = hf_model("llama", layers=6, dtype=torch.float32, intermediate_size=2000)
    shape = SdsatConfig.of_target(model.config.to_dict(), 2, 0)
    kept = measure(SDSAT, shape, 3, torch.float32, model.config).kept
    assert kept < parameter_counts(model.config)["all"]

"""Test dry runs of every kind of head, without the target's folder, and their estimates."""

from pathlib import Path
from typing import Any

import pytest

import heads.train
from decoding.errors import UserError
from heads.registry import KINDS, kind_of
from tests.heads.test_heads_train import configured

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
WITH_MASKS = {"p_eagle", "dflash", "dflash2", "domino", "dspark", "jetspec", "specdiff"}


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

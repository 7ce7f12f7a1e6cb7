"""Real runs of vLLM beside our own loop, and controls of folders that it reads wrongly."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from decoding.errors import UserError
from decoding.models.folder import read_json
from eval.config import BenchmarkConfig, EvalConfig
from eval.engines.agreement import AGREES, DIFFERS, NOT_COMPARED
from eval.run import run
from eval.statistics.schema import read_all_rows
from jobs.config import TargetConfig
from jobs.drafters import CONTROL
from jobs.paths import resolve
from serving.engines.registry import ENGINES, ROOT
from tests.support.engine_evaluations import engine_config, swap_folder
from tests.support.engine_folders import write_broken, write_drafter
from tests.support.trained_heads import train_head

VLLM = os.environ.get("SHALLOW_DRAFT_VLLM_PYTHON", str(ROOT / ENGINES["vllm"].python))
# Noise with which the first token of a draft is accepted in half of the rounds or more.
NOISE = 0.1
EMBEDDED_HIDDEN = 192  # hidden size of the embedded target


@pytest.fixture(scope="module")
def vllm_home(tmp_path_factory):
    """Return a folder with drafters of the embedded target, whose head size vLLM supports."""
    if not Path(VLLM).is_file():
        assert os.environ.get("CI") != "true", f"{VLLM} is missing"
        pytest.skip(f"vLLM is not installed: {ENGINES['vllm'].install}")
    home = tmp_path_factory.mktemp("vllm")
    write_drafter(resolve("embedded:target"), home / "noisy", NOISE)
    write_broken(home / "noisy", home / "broken")
    return home


def vllm_config(home: Path, name: str, **changes: object) -> EvalConfig:
    values = {
        "engine": ["vllm"],
        "engine_python": {"vllm": VLLM},
        "target": TargetConfig(
            path="embedded:target", dtype="float32", device="cpu", execution="eager"
        ),
        "benchmark": BenchmarkConfig(path="embedded:prompts"),
        "max_prompts": 6,
        "prompt_lookup_control": False,
        **changes,
    }
    return engine_config(home, name, **values)


@pytest.mark.engines
def test_vllm_gives_the_targets_text_and_accepts_as_often_as_ours(vllm_home):
    folder = run(vllm_config(vllm_home, "healthy"))
    _, rows = read_all_rows(folder / "results.jsonl")
    assert [row.method for row in rows] == ["autoregressive", "draft_model"]
    assert {row.lossless for row in rows} <= {"equal", "ties"}
    assert rows[1].agreement == AGREES, rows[1].agreement_detail
    assert 0.1 < rows[1].alpha < 1


def turn_medusa(state: dict[str, Any]) -> dict[str, Any]:
    """Return Medusa's heads in another order."""
    return {
        re.sub(r"\.(\d)\.", lambda found: f".{3 - int(found[1])}.", name, count=1): tensor
        for name, tensor in state.items()
    }


def turn_taps(state: dict[str, Any]) -> dict[str, Any]:
    """Return a head that reads the layers of its target, or its two inputs, in another order."""
    return state | {"fc.weight": state["fc.weight"].roll(EMBEDDED_HIDDEN, 1)}


def turn_channels(state: dict[str, Any]) -> dict[str, Any]:
    """Return a head whose layers read the channels of attention and MLP in another order.

    Blocks that have trained for so few steps hardly read the target's layers, in any order.
    """
    return {
        name: tensor.roll(1, 1) if re.search(r"\.(o|down)_proj\.", name) else tensor
        for name, tensor in state.items()
    }


@pytest.mark.engines
@pytest.mark.parametrize(
    ("head", "options", "method", "length", "damage"),
    [
        ("medusa", [], "medusa", 4, turn_medusa),
        ("eagle1", [], "eagle", 3, turn_taps),
        ("eagle3", [], "eagle3", 3, turn_taps),
        ("eagle3", ["head.draft_vocab_size=512"], "eagle3", 3, turn_taps),
        ("p_eagle", [], "p_eagle", 7, turn_channels),
        ("dflash", [], "dflash", 7, turn_channels),
        ("dflash", ["head.draft_vocab_size=512"], "dflash", 7, turn_channels),
        ("jetspec", [], "dflash", 7, turn_channels),
    ],
    ids=["medusa", "eagle1", "eagle3", "eagle3-512", "p_eagle", "dflash", "dflash-512", "jetspec"],
)
def test_vllm_accepts_the_tokens_of_trained_heads_as_often_as_ours(
    vllm_home, tmp_path, head, options, method, length, damage
):
    """Compare vLLM's chain of a head's best tokens with the same chain in our loop.

    The control is the same head with its parts in another order, in vLLM alone.
    """
    # heads of fewer steps accept too little for the control to accept significantly less
    folder = train_head(tmp_path / "run", head, "loop.max_steps=150", *options)
    given = {"drafters": [str(folder)], "output_dir": str(tmp_path / "eval")}
    cfg = vllm_config(vllm_home, "heads", **given)
    _, rows = read_all_rows(run(cfg) / "results.jsonl")
    assert [(row.method, row.num_draft_tokens) for row in rows] == [
        ("autoregressive", 0),
        (method, length),
    ]
    assert {row.lossless for row in rows} <= {"equal", "ties"}
    assert rows[1].agreement == AGREES, rows[1].agreement_detail
    assert 0.02 < rows[1].alpha < 1
    turned = tmp_path / "turned"
    shutil.copytree(folder, turned)
    state = load_file(turned / "model.safetensors")
    save_file(damage(state), turned / "model.safetensors")
    row = swap_folder(cfg, tmp_path / "swapped", turned)
    assert row.agreement == DIFFERS and row.lossless in ("equal", "ties")


@pytest.mark.engines
def test_vllm_looks_up_the_prompt_and_gives_the_targets_text(vllm_home):
    cfg = vllm_config(vllm_home, "lookup", drafters=[CONTROL], num_draft_tokens=[4])
    _, rows = read_all_rows(run(cfg) / "results.jsonl")
    assert [(row.method, row.drafter) for row in rows] == [
        ("autoregressive", ""),
        ("ngram", CONTROL),
    ]
    assert {row.lossless for row in rows} <= {"equal", "ties"}
    assert rows[1].accepted > 0 and rows[1].agreement == NOT_COMPARED


@pytest.mark.engines
def test_control_a_folder_that_vllm_reads_wrongly_differs(vllm_home, tmp_path):
    cfg = vllm_config(vllm_home, "swapped")
    row = swap_folder(cfg, tmp_path / "swapped", vllm_home / "broken")
    assert row.agreement == DIFFERS
    assert row.lossless in ("equal", "ties")


@pytest.mark.engines
def test_a_drafter_that_vllm_refuses_is_named_with_its_words(vllm_home, tmp_path):
    cfg = vllm_config(vllm_home, "refused")
    strange = tmp_path / "strange"
    shutil.copytree(vllm_home / "noisy", strange)
    config = read_json(strange / "config.json") | {"model_type": "no_such_model"}
    (strange / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = r"(?s)engine=vllm, drafters: noisy .* failed with draft_model .*no_such_model"
    with pytest.raises(UserError, match=words):
        swap_folder(cfg, tmp_path / "swapped", strange)

"""P-EAGLE heads in the layouts of speculators and SpecForge. Round trips: test_layouts.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from decoding.errors import UserError
from heads.eagle.checkpoint import load_head
from heads.export import export
from heads.registry import kind_in
from scripts import check_head
from tests.heads import law_6
from tests.heads.published import PLAIN, change, config_of, notes_of, saved


def test_speculators_gets_the_keys_of_a_p_eagle_head(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours", "p_eagle with a draft vocabulary")
    notes = "\n".join(export(ours, "speculators", tmp_path / "out"))
    config, state = config_of(tmp_path / "out"), load_file(tmp_path / "out/model.safetensors")
    assert config["architectures"] == ["PEagleSpeculator"]
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "peagle"
    (method,) = config["speculators_config"]["proposal_methods"]
    assert (config["mask_token_id"], method["speculative_tokens"]) == (60, 4)
    assert config["embed_requires_grad"] is False, "its own heads train an embedding"
    assert not {"pard_token", "num_parallel_tokens", "taps"} & config.keys()
    assert state["mask_hidden"].shape == (1, 1, 3 * law_6.HIDDEN)
    assert "layers.0.self_attn.q_proj.weight" in state and "embed_tokens.weight" not in state
    assert "vLLM 0.32 reads hidden_states 1, 2, 4 (eagle_aux_hidden_state_layer_ids)" in notes
    assert "NOT" not in notes and "SGLang 0.5.23 does not read the layout speculators" in notes


def test_specforge_gets_the_keys_of_a_p_eagle_head(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours", "p_eagle", fc_norm=False)
    notes = export(ours, "specforge", tmp_path / "out")
    config, state = config_of(tmp_path / "out"), load_file(tmp_path / "out/model.safetensors")
    assert config["architectures"] == ["PEagleDraftModel"]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    assert config["dflash_config"] == {"mask_token_id": 60}, "where SpecForge looks for it"
    assert "layers.0.mlp.up_proj.weight" in state and state["mask_hidden"].shape[-1] == 48
    assert not state["d2t"].any() and state["t2d"].all(), "buffers that its model has"
    refused = "vLLM 0.32 does not read the layout specforge"
    assert {refused, "SGLang 0.5.23 does not read the layout specforge"} <= {*notes}


def test_vllm_does_not_load_all_heads_of_speculators(tmp_path: Path) -> None:
    """Check the forms whose keys vLLM does not take over; the control are those that it does."""
    words = {
        ("eagle3", (("taps", (1, 3)),)): "it reads 3 layers in this layout, and the head 2",
        ("p_eagle", ()): "it knows no fc_norm in a P-EAGLE head of this layout",
        ("eagle3", ()): "",
        ("p_eagle", (("fc_norm", False),)): "",
    }
    for number, ((name, fields), expected) in enumerate(words.items()):
        _, ours = saved(tmp_path / f"ours{number}", name, **dict(fields))
        notes = export(ours, "speculators", tmp_path / f"out{number}")
        refused = f"vLLM 0.32 does not load the head: {expected}"
        assert (refused in notes) is bool(expected)
        assert "does not load" not in notes_of(ours), "what training writes"


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        (
            "p_eagle",
            {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"},
            "mask_hidden unknown",
        ),
        (
            PLAIN,
            {
                "architectures": ["PEagleSpeculator"],
                "speculators_model_type": "peagle",
                "mask_token_id": 60,
            },
            "mask_hidden missing",
        ),
    ],
    ids=["a P-EAGLE head as EAGLE-3", "an EAGLE-3 head as P-EAGLE"],
)
def test_mislabelled_heads_of_speculators_are_found(
    name: str, values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _, ours = saved(tmp_path / "ours", name)
    export(ours, "speculators", tmp_path / "out")
    check_head.check_form(tmp_path / "out", kind_in(tmp_path / "out"))  # the control
    changed = change(tmp_path / "out", **values)
    with pytest.raises(UserError, match=words):
        check_head.check_form(changed, kind_in(changed))


@pytest.mark.parametrize(
    ("layout", "values", "words"),
    [
        ("speculators", {"embed_requires_grad": True}, "embed_requires_grad is true, expected"),
        ("speculators", {"mask_token_id": None}, "mask_token_id is None, expected a whole number"),
        (
            "speculators",
            {"speculators_config": {}},
            "speculators_config.proposal_methods is None, expected a whole number of 2 or more",
        ),
        (
            "specforge",
            {"dflash_config": {}},
            "dflash_config.mask_token_id is None, expected a whole number from 0 to 60",
        ),
        (
            "specforge",
            {"num_parallel_tokens": None},
            "num_parallel_tokens is None, expected a whole number of 2 or more",
        ),
    ],
    ids=str,
)
def test_p_eagle_heads_without_what_drafting_needs_are_refused(
    layout: str, values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _, ours = saved(tmp_path / "ours", "p_eagle", fc_norm=False)
    export(ours, layout, tmp_path / "out")
    folder = change(tmp_path / "out", **values)
    with pytest.raises(UserError, match=words):
        load_head(folder)


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_a_trained_embedding_is_not_taken_for_the_targets(layout: str, tmp_path: Path) -> None:
    """Check P-EAGLE files of speculators and SpecForge themselves, which train an embedding."""
    _, ours = saved(tmp_path / "ours", "p_eagle", fc_norm=False)
    export(ours, layout, tmp_path / "out")
    config = config_of(tmp_path / "out")
    del config["embed_requires_grad"]
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="embed_requires_grad is true, expected false"):
        load_head(tmp_path / "out")

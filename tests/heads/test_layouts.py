"""Published layouts of heads: export, reading back, and the check of a folder's form."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoding.drafters.registry import head_of
from decoding.errors import UserError
from heads.block import read_config
from heads.eagle import checkpoint as eagle_checkpoint
from heads.eagle.checkpoint import load_head, read_head_config
from heads.export import export, form_of
from heads.registry import kind_in
from scripts import check_head, export_head
from scripts.usage import run_script
from tests.heads import law_6
from tests.heads.published import LLAMA3, PLAIN, change, config_of, notes_of, saved

# every layout, with heads that it can hold: their rows, and fields of their shapes
AS_PUBLISHED = {"fc_norm": False, "norm_output": False}
HELD: list[tuple[str, str, dict[str, Any]]] = [
    ("served", "eagle3 with a normalized residual", {}),
    ("served", "p_eagle with a draft vocabulary", {}),
    ("served", "parallelspec", {}),
    ("speculators", "p_eagle", LLAMA3),
    ("speculators", "p_eagle with a draft vocabulary", {"taps": (1, 3)}),
    ("specforge", "p_eagle with a draft vocabulary", {"norm_before_residual": True}),
    ("specforge", "p_eagle", {"fc_norm": False}),
    ("served", "eagle1 with a bias", LLAMA3),
    ("specforge", PLAIN, LLAMA3),
    ("specforge", "eagle3 with a draft vocabulary", AS_PUBLISHED),
    ("modelopt", PLAIN, AS_PUBLISHED),
    ("modelopt", "eagle3 with a draft vocabulary", AS_PUBLISHED | {"taps": (1, 3)}),
    ("original", "medusa", {"accuracy": ((0.5, 0.25),) * 4}),
    ("vllm", "medusa with a shared projection", {}),
    ("speculators", "eagle3 with a draft vocabulary", {"taps": (1, 3)}),
    ("speculators", "eagle3 with a normalized residual", LLAMA3),
    ("served", "domino", {}),
    ("served", "jetspec", {}),
    ("speculators", "dflash with a draft vocabulary", {}),
    ("speculators", "dspark", {}),
    ("speculators", "dflash2", {}),
    ("deepspec", "dspark", {}),
]
of_all = pytest.mark.parametrize(("layout", "name", "fields"), HELD, ids=str)


# ------------------------------------------------------------------------------------- round trip


@of_all
def test_a_round_trip_keeps_every_bit(
    layout: str, name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    row, ours = saved(tmp_path / "ours", name, **fields)
    export(ours, layout, tmp_path / "theirs")
    assert row.kind.contract is not None
    export(tmp_path / "theirs", next(iter(row.kind.contract.layouts)), tmp_path / "back")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / file).read_bytes() == (ours / file).read_bytes()
    form_of(row.kind, tmp_path / "theirs", row.kind.read_shape(ours)).check(tmp_path)


@of_all
def test_an_exported_head_drafts_the_same_tokens(
    layout: str, name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    row, ours = saved(tmp_path / "ours", name, **fields)
    export(ours, layout, tmp_path / "theirs")
    model = law_6.target()
    before = [one.tokens for one in law_6.drafts(row.load(ours), model)]
    assert before == [one.tokens for one in law_6.drafts(row.load(tmp_path / "theirs"), model)]
    assert head_of(tmp_path / "theirs") == head_of(ours)


def test_weights_keep_their_dtype(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours")
    state = load_file(ours / "model.safetensors")
    half = {
        name: each.bfloat16() if each.is_floating_point() else each for name, each in state.items()
    }
    save_file(half, ours / "model.safetensors")
    export(ours, "specforge", tmp_path / "theirs")
    written = load_file(tmp_path / "theirs/model.safetensors")
    assert all(torch.equal(written[name], each) for name, each in half.items())


# ------------------------------------------------------------------- what servers and trainers read


def test_specforge_gets_outputs_of_layers_and_the_full_vocabulary(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours")
    export(ours, "specforge", tmp_path / "out")
    config, state = config_of(tmp_path / "out"), load_file(tmp_path / "out/model.safetensors")
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    assert "eagle_aux_hidden_state_layer_ids" not in config and config["norm_output"] is True
    # SpecForge's exporter to SGLang requires these
    assert {"fc.weight", "norm.weight", "lm_head.weight", "t2d", "d2t"} <= state.keys()
    assert "midlayer.hidden_norm.weight" in state and not state["d2t"].any() and state["t2d"].all()


def test_norm_output_is_left_out_where_specforge_reads_it_otherwise(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours", norm_output=False)
    export(ours, "specforge", tmp_path / "out")
    assert "norm_output" not in config_of(tmp_path / "out")


def test_modelopt_gets_exactly_its_tensors(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours", "eagle3 with a draft vocabulary", **AS_PUBLISHED)
    export(ours, "modelopt", tmp_path / "out")
    layer = [f"self_attn.{part}_proj" for part in "qkvo"]
    layer += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    layer += ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    expected = {f"layers.0.{name}.weight" for name in layer}
    expected |= {"norm.weight", "fc.weight", "lm_head.weight", "d2t"}
    assert load_file(tmp_path / "out/model.safetensors").keys() == expected
    served = config_of(tmp_path / "out")["eagle_config"]
    assert served["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert served["use_last_layernorm"] is True and served["use_mtp_layernorm"] is False


def test_speculators_gets_the_sizes_in_an_inner_object(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours", "eagle3 with a draft vocabulary")
    (ours / "drafter_card.json").write_text(json.dumps({"target": "some/model"}))
    export(ours, "speculators", tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert "hidden_size" not in config and "model_type" not in config
    assert config["transformer_layer_config"]["hidden_size"] == law_6.HIDDEN
    assert config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 10000.0
    assert (config["draft_vocab_size"], config["fc_norm"]) == (20, True)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/model"
    card = json.loads((tmp_path / "out/drafter_card.json").read_text())
    assert (
        card["layout"] == "speculators" and card["drafter_hash"] != card["copy_of"]["drafter_hash"]
    )


def test_sizes_that_speculators_leaves_out_are_its_defaults(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours")
    export(ours, "speculators", tmp_path / "out")
    inner = config_of(tmp_path / "out")["transformer_layer_config"]
    del inner["intermediate_size"], inner["max_position_embeddings"], inner["rope_parameters"]
    shape = read_head_config(change(tmp_path / "out", transformer_layer_config=inner))
    assert (shape.intermediate_size, shape.max_positions) == (11008, 2048)
    assert shape.rope_theta == 10000.0


def test_speculators_gets_the_layers_of_a_block_drafter_as_hidden_states(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours", "dspark", taps=(1, 3))
    notes = "\n".join(export(ours, "speculators", tmp_path / "out"))
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["DSparkSpeculator"]
    assert config["aux_hidden_state_layer_ids"] == [1, 3] and "dflash_config" not in config
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dspark"
    assert config["sample_from_anchor"] is config["sliding_window_non_causal"] is True
    assert config["transformer_layer_config"]["head_dim"] == 4
    # its defaults are 256, true and true
    assert config["markov_rank"] == 6 and config["confidence_head_with_markov"] is True
    assert "vLLM 0.32 reads hidden_states 1, 3" in notes and "NOT" not in notes
    assert "SGLang 0.5.23 does not read the layout speculators" in notes


def test_deepspec_gets_flat_keys(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours", "dspark", taps=(1, 3))
    export(ours, "deepspec", tmp_path / "out")
    config = config_of(tmp_path / "out")
    flat = {"target_layer_ids": [0, 2], "markov_rank": 6, "markov_head_type": "vanilla"}
    flat |= {"architectures": ["Qwen3DSparkModel"], "enable_confidence_head": True}
    assert flat.items() <= config.items()
    assert not {"dflash_config", "taps"} & config.keys()


def test_an_export_with_the_target_holds_what_servers_need(tmp_path: Path) -> None:
    row, ours = saved(tmp_path / "ours", "dflash with a draft vocabulary")
    model = law_6.target()
    model.save_pretrained(tmp_path / "target")
    needed = "vLLM 0.32 needs lm_head.weight for draft_vocab_size 20"
    assert needed in "\n".join(export(ours, "speculators", tmp_path / "without"))
    notes = export(ours, "speculators", tmp_path / "out", tmp_path / "target")
    assert "needs lm_head" not in "\n".join(notes)
    state, head = load_file(tmp_path / "out/model.safetensors"), row.load(ours).head
    drafted = model.get_output_embeddings().weight[head.token_ids_V]
    assert torch.equal(state["lm_head.weight"], drafted)
    assert torch.equal(state["embed_tokens.weight"], model.get_input_embeddings().weight)
    assert state["t2d"].nonzero()[:, 0].tolist() == head.token_ids_V.tolist()
    before = [one.tokens for one in law_6.drafts(row.load(ours), model)]
    assert before == [one.tokens for one in law_6.drafts(row.load(tmp_path / "out"), model)]
    other = model.config.to_dict() | {"vocab_size": 62}
    (tmp_path / "target/config.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="vocab_size 61, but the target has 62"):
        export(ours, "speculators", tmp_path / "more", tmp_path / "target")


def test_a_file_of_speculators_alone_loads(tmp_path: Path) -> None:
    """Check a file without this project's keys, from which the target's depth is unknown."""
    row, ours = saved(tmp_path / "ours", "dflash")
    export(ours, "speculators", tmp_path / "out")
    config = config_of(tmp_path / "out")
    del config["num_target_layers"]
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    model = law_6.target()
    before = [one.tokens for one in law_6.drafts(row.load(ours), model)]
    assert before == [one.tokens for one in law_6.drafts(row.load(tmp_path / "out"), model)]
    del config["aux_hidden_state_layer_ids"]
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="expected aux_hidden_state_layer_ids, as in a DFlash"):
        row.load(tmp_path / "out")


def test_two_draft_vocabularies_are_refused(tmp_path: Path) -> None:
    row, ours = saved(tmp_path / "ours", "dflash with a draft vocabulary")
    export(ours, "speculators", tmp_path / "out")
    state = load_file(tmp_path / "out/model.safetensors")
    save_file({**state, "t2d": ~state["t2d"]}, tmp_path / "out/model.safetensors")
    with pytest.raises(UserError, match="t2d and d2t hold different draft vocabularies"):
        row.load(tmp_path / "out")


# ----------------------------------------------------------------------------- mislabelled folders


def test_each_servers_layers_are_named(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours", **AS_PUBLISHED)
    for server in ("vLLM 0.32", "SGLang 0.5.23"):
        assert f"{server} reads hidden_states 1, 2, 4" in notes_of(ours)
    assert "NOT" not in notes_of(ours)
    notes = "\n".join(export(ours, "modelopt", tmp_path / "out"))
    assert "hidden_states 1, 2, 4 are [0, 1, 3] in eagle_config." in notes
    assert "vLLM 0.32 reads hidden_states 0, 1, 3" in notes and "NOT 1, 2, 4" in notes
    assert "SGLang 0.5.23 reads hidden_states 1, 2, 4" in notes


def test_what_a_server_ignores_is_named(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours", "eagle3 with a normalized residual")
    assert "SGLang 0.5.23 ignores norm_before_residual=true and computes with false" in (
        notes_of(ours)
    )
    config = config_of(ours)
    del config["eagle_config"]
    (ours / "config.json").write_text(json.dumps(config))
    assert "SGLang 0.5.23 finds no layers in eagle_config." in notes_of(ours)
    export(ours, "speculators", tmp_path / "out")
    assert "SGLang 0.5.23 does not read the layout speculators" in notes_of(tmp_path / "out")


def test_layers_of_two_conventions_under_both_keys_are_refused(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours")
    served = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    with pytest.raises(UserError, match=r"\[1, 2, 4\] are hidden_states \[2, 3, 5\], but taps is"):
        load_head(change(ours, eagle_config=served))


def test_all_wrong_tensors_are_listed_at_once(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours", **AS_PUBLISHED)
    export(ours, "modelopt", tmp_path / "out")
    state = load_file(tmp_path / "out/model.safetensors")
    del state["layers.0.hidden_norm.weight"]
    state |= {"input_norm.weight": torch.ones(3), "norm.weight": torch.ones(3)}
    save_file(state, tmp_path / "out/model.safetensors")
    kind = kind_in(tmp_path / "out")
    form = form_of(kind, tmp_path / "out", kind.read_shape(tmp_path / "out"))
    with pytest.raises(UserError) as raised:
        form.check(tmp_path / "out")
    for words in (
        "layers.0.hidden_norm.weight missing",
        "input_norm.weight unknown",
        "norm.weight has the shape [3]",
    ):
        assert words in str(raised.value)
    assert any(str(entry).endswith("[16, 16]         ok") for entry in form.tensors)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"embed_requires_grad": True}, "embed_requires_grad is true, expected false"),
        ({"transformer_layer_config": {"hidden_size": 16}}, 'model_type is "qwen3", expected "ll'),
        ({"norm_before_fc": True}, "norm_before_fc is true, expected false"),
        (
            {"transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 4}},
            "num_hidden_layers is 4, expected 1",
        ),
        (
            {
                "transformer_layer_config": {
                    "model_type": "llama",
                    "num_hidden_layers": 1,
                    "layer_types": ["sliding_attention"],
                }
            },
            "layer_types is .*sliding_attention.*, expected .*full_attention",
        ),
    ],
    ids=str,
)
def test_other_forms_of_speculators_are_refused(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _, ours = saved(tmp_path / "ours")
    export(ours, "speculators", tmp_path / "out")
    with pytest.raises(UserError, match=words):
        load_head(change(tmp_path / "out", **values))


def test_other_copies_than_the_targets_tensors_are_refused(tmp_path: Path) -> None:
    model = law_6.target()
    embedding_VH = model.get_input_embeddings().weight.detach()
    row, ours = saved(tmp_path / "ours", "dflash with a draft vocabulary")
    head = row.load(ours).head
    rows_VH = model.get_output_embeddings().weight.detach()[head.token_ids_V]
    copies = {"embed_tokens.weight": embedding_VH.bfloat16(), "lm_head.weight": rows_VH}
    state = load_file(ours / "model.safetensors")

    def check(**changed: torch.Tensor) -> None:
        save_file({**state, **copies, **changed}, ours / "model.safetensors")
        check_head.check_copies(ours, row.kind, head, model)

    check()
    with pytest.raises(UserError, match=r"embed_tokens.weight differs from the target's own"):
        check(**{"embed_tokens.weight": embedding_VH + 1})
    for wrong in (rows_VH + 1, rows_VH[:-1].clone()):
        with pytest.raises(UserError, match=r"lm_head.weight differs from the target's own"):
            check(**{"lm_head.weight": wrong})


# -------------------------------------------------------------------------------------- the scripts


@pytest.mark.parametrize(
    ("name", "fields", "layout", "words"),
    [
        (PLAIN, {}, "gguf", "layout 'gguf' is unknown, expected one of served, specforge"),
        (PLAIN, {}, "modelopt", "fc_norm is true, expected false; norm_output is true, expected"),
        (PLAIN, {"taps": (1, 3)}, "specforge", "num_taps is 2, expected 3"),
        (PLAIN, {"taps": (3, 1)}, "speculators", r"taps are \[3, 1\], expected rising layers"),
        ("medusa", {"shared": True}, "original", "shared is true, expected false"),
        ("p_eagle", {}, "modelopt", "layout 'modelopt' is unknown, expected one of served, specf"),
        ("p_eagle", {}, "specforge", "fc_norm is true, expected false"),
        (
            "p_eagle",
            {"fc_norm": False, **LLAMA3},
            "specforge",
            "rope_scaling is .*llama3.*, expected null",
        ),
        ("eagle1", {}, "modelopt", "layout 'modelopt' is unknown, expected one of served"),
        ("recurrent", {}, "served", "has no published layout"),
        ("jetspec", {}, "speculators", "in_block_mask is causal, expected bidirectional"),
        ("domino", {}, "speculators", "correction is gru, expected one of none, markov, selector"),
        ("specdiff", {}, "speculators", "target's embedding .* among the layers"),
        ("dflash", {}, "deepspec", "layout is fill_in, expected anchor_first.*; the correction is"),
        ("parallelspec", {}, "specforge", "masks_by_depth is true, expected false"),
        ("parallelspec", {}, "speculators", "masks_by_depth is true, expected false"),
        ("fusion per layer", {}, "speculators", "fusion per_layer, each layer's own mixture"),
        ("dspark", {"taps": (0, 3)}, "deepspec", "target's embedding .* among the layers"),
        ("dflash2", {"confidence": True}, "speculators", "confidence head that reads .* selector"),
        ("dflash", {"conv_taps": 2, "conv_group": 4}, "speculators", "convolution without a sel"),
        ("dflash2 with a draft vocabulary", {}, "speculators", "a selector without a convolution"),
        ("dflash2", {"layout": "anchor_first"}, "speculators", "a selector in blocks whose first"),
    ],
    ids=str,
)
def test_heads_that_a_layout_cannot_hold_are_refused(
    name: str, fields: dict[str, Any], layout: str, words: str, tmp_path: Path
) -> None:
    _, ours = saved(tmp_path / "ours", name, **fields)
    with pytest.raises(UserError, match=words):
        export(ours, layout, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_page_names_every_key_of_published_heads_that_are_refused() -> None:
    page = (Path(__file__).parents[2] / "docs/engines.md").read_text()
    _, found, rest = page.partition("### Published heads that are refused")
    refused = rest.partition("\n## ")[0]
    keys = {*eagle_checkpoint.ONLY, *(key for key, _ in read_config.ONLY)}
    assert found and not {key for key in keys if f"`{key}`" not in refused}
    assert "`fc_norm`" not in refused, "control: a key of heads that are read"


def test_a_folder_that_exists_is_kept(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours")
    with pytest.raises(UserError, match="exists already"):
        export(ours, "specforge", ours)


def run(script: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *words: Path | str) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", *map(str, words)])
    run_script(script)


def test_the_scripts_print_the_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, ours = saved(tmp_path / "ours")
    run(export_head.main, monkeypatch, ours, "specforge", tmp_path / "out")
    assert "has the layout specforge" in capsys.readouterr().out
    run(check_head.main, monkeypatch, tmp_path / "out")
    printed = capsys.readouterr().out
    assert "eagle3, one decoder layer" in printed and "layout specforge" in printed
    assert "all expected, with the right shapes" in printed
    for words in ((ours, "specforge", tmp_path / "out"), (ours,)):
        with pytest.raises(SystemExit) as stopped:
            run(export_head.main, monkeypatch, *words)
        assert str(stopped.value.code).startswith(("error", "usage"))

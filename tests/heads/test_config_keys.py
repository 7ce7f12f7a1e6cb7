"""Keys of config.json: every finding about a server appears in a damaged folder, and only there."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from heads.export import export
from heads.registry import kind_in
from scripts import check_head
from tests.heads.published import PLAIN, config_of, notes_of, saved
from training.heads.config_keys import get

AS_PUBLISHED = {"fc_norm": False, "norm_output": False}
MISSING = object()
# row, fields of its shape, layout, path of config.json, its damaged value, the finding
DAMAGES: list[tuple[str, dict[str, Any], str, str, Any, str]] = [
    (
        "medusa", {}, "vllm", "medusa_fc_bias", MISSING,
        "vLLM 0.32 takes false for medusa_fc_bias, which config.json does not have, and the head "
        "has true: it skips the biases of the blocks",
    ),
    (
        "medusa", {}, "vllm", "medusa_fc_bias", False,
        "vLLM 0.32 reads medusa_fc_bias=false, and the head has true: it skips the biases",
    ),
    (
        "medusa", {}, "vllm", "architectures", ["MedusaForCausalLM"],
        'vLLM 0.32 does not know the head\'s architecture "MedusaForCausalLM": put MedusaModel '
        "first in architectures",
    ),
    (
        "medusa", {}, "vllm", "medusa_accuracy", [[0.5, 0.2]] * 4,
        "vLLM 0.32 ignores medusa_accuracy and drafts a chain of the likeliest tokens",
    ),
    (
        "medusa", {}, "original", "base_model_name_or_path", MISSING,
        "FasterDecoding/Medusa needs base_model_name_or_path, which config.json does not have: it "
        "loads the target by it",
    ),
    (
        PLAIN, {}, "served", "architectures", ["Eagle3Speculator"],
        'vLLM 0.32 does not know the head\'s architecture "Eagle3Speculator": put '
        "LlamaForCausalLMEagle3 or Eagle3LlamaForCausalLM first",
    ),
    (
        PLAIN, {}, "served", "architectures", ["Eagle3LlamaForCausalLM"],
        'SGLang 0.5.23 does not know the head\'s architecture "Eagle3LlamaForCausalLM": put '
        "LlamaForCausalLMEagle3 first",
    ),
    (
        "p_eagle", {}, "served", "architectures",
        ["PeagleLlamaForCausalLM", "LlamaForCausalLMEagle3"],
        'vLLM 0.32 does not know the head\'s architecture "PeagleLlamaForCausalLM"',
    ),
    (
        PLAIN, AS_PUBLISHED, "modelopt", "draft_vocab_size", MISSING,
        "SGLang 0.5.23 takes the target's lm_head, as config.json has no draft_vocab_size",
    ),
    (
        PLAIN, {}, "speculators", "norm_before_residual", MISSING,
        "vLLM 0.32 takes true for norm_before_residual, which config.json does not have, and the "
        "head has false",
    ),
    (
        PLAIN, {}, "speculators", "speculators_config.verifier.name_or_path", MISSING,
        "vLLM 0.32 needs the target's name in its command, as config.json has no "
        "speculators_config.verifier.name_or_path",
    ),
    (
        PLAIN, {}, "speculators", "speculators_config.proposal_methods", MISSING,
        "vLLM 0.32 needs speculators_config.proposal_methods",
    ),
    (
        PLAIN, {}, "speculators", "embed_requires_grad", MISSING,
        "speculators 0.9 takes true for embed_requires_grad, which config.json does not have, and "
        "the head has false: it reads an embedding of the head's own",
    ),
    (
        PLAIN, AS_PUBLISHED, "specforge", "norm_output", True,
        "SpecForge 0.2 reads norm_output=true, and the head has false: it norms the input of the "
        "lm_head by this key, and feeds back the state without its norm",
    ),
    (
        "dflash", {}, "served", "architectures", ["DominoDraftModel"],
        'vLLM 0.32 does not know the head\'s architecture "DominoDraftModel"',
    ),
    (
        "dflash", {}, "speculators", "sliding_window_non_causal", False,
        "vLLM 0.32 reads sliding_window_non_causal=false, and the head has true: it makes blocks "
        "causal",
    ),
    (
        "dflash", {}, "speculators", "sliding_window_non_causal", MISSING,
        "vLLM 0.32 takes false for sliding_window_non_causal",
    ),
    (
        "dflash", {}, "speculators", "enable_confidence_head", MISSING,
        "vLLM 0.32 takes true for enable_confidence_head, which config.json does not have, and the "
        "head has false",
    ),
    (
        "dflash", {}, "speculators", "speculators_config.proposal_methods", MISSING,
        "vLLM 0.32 needs speculators_config.proposal_methods",
    ),
    (
        "dflash", {}, "speculators", "speculators_config.verifier.name_or_path", MISSING,
        "vLLM 0.32 needs the target's name in its command, as config.json has no",
    ),
]  # fmt: skip


def damage(folder: Path, path: str, value: Any) -> None:
    """Set or delete the value at a path of a folder's config.json."""
    values = config_of(folder)
    *outer, last = path.split(".")
    place = get(values, ".".join(outer)) if outer else values
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    (folder / "config.json").write_text(json.dumps(values))


def written(tmp_path: Path, name: str, fields: dict[str, Any], layout: str) -> Path:
    """Return the folder of a row's head in a layout, with the target's name on its card."""
    row, ours = saved(tmp_path / "ours", name, **fields)
    (ours / "drafter_card.json").write_text(json.dumps({"target": "some/model"}))
    assert row.kind.contract is not None
    if layout == next(iter(row.kind.contract.layouts)):
        return ours
    export(ours, layout, tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("name", "fields", "layout", "path", "value", "words"),
    DAMAGES,
    ids=lambda each: each[:40] if isinstance(each, str) else "",
)
def test_a_damaged_key_is_found(
    name: str,
    fields: dict[str, Any],
    layout: str,
    path: str,
    value: Any,
    words: str,
    tmp_path: Path,
) -> None:
    folder = written(tmp_path, name, fields, layout)
    assert words not in notes_of(folder), "the control"
    damage(folder, path, value)
    assert words in notes_of(folder)


def test_a_causal_block_under_jetspecs_own_key_is_not_causal_in_vllm(tmp_path: Path) -> None:
    folder = written(tmp_path, "jetspec", {}, "served")
    words = (
        "vLLM 0.32 takes false for dflash_config.causal, which config.json does not have, and the "
        "head has true: the slots of a block see others than in training"
    )
    assert words not in notes_of(folder)
    damage(folder, "dflash_config.causal_head", True)
    damage(folder, "dflash_config.causal", MISSING)
    assert words in notes_of(folder)


@pytest.mark.parametrize("layout", ["served", "deepspec"])
def test_a_missing_key_of_a_blocks_layout_is_read_by_method(layout: str, tmp_path: Path) -> None:
    """Check slots that fill in, which vLLM and SGLang take for anchor_first without the key."""
    fields = {} if layout == "deepspec" else {"layout": "fill_in", "temperatures": ()}
    folder = written(tmp_path, "dspark", fields, layout)
    shape = kind_in(folder).read_shape(folder)
    note = (
        "takes true for sample_from_anchor, which config.json does not have, and the head has false"
    )
    values = config_of(folder)
    without = {name: value for name, value in values.items() if name != "sample_from_anchor"}
    for server in kind_in(folder).contract.servers:  # type: ignore[union-attr]
        (key,) = [
            each
            for each in server.keys
            if each.paths == ("sample_from_anchor",) and each.applies(shape)
        ]
        assert key.note(layout, values, shape) == ""
        found = key.note(layout, without, shape)
        assert note in found if layout == "served" else found == ""


@pytest.mark.parametrize("server", ["vLLM 0.32", "SGLang 0.5.23"])
def test_dflash_in_servers_reads_every_block_as_fill_in(server: str, tmp_path: Path) -> None:
    words = f"{server} takes false for sample_from_anchor whatever config.json has, and the head"
    assert words not in notes_of(written(tmp_path / "a", "dflash", {}, "served"))
    folder = written(tmp_path / "b", "dflash", {"layout": "anchor_first"}, "served")
    assert words in notes_of(folder)


def test_a_mask_token_under_another_key_is_unknown_to_sglang(tmp_path: Path) -> None:
    folder = written(tmp_path, "dflash", {}, "served")
    shape = kind_in(folder).read_shape(folder)
    (sglang,) = [each for each in kind_in(folder).contract.servers if "SGLang" in each.name]  # type: ignore[union-attr]
    values = config_of(folder)
    assert not any(key.note("served", values, shape) for key in sglang.keys)
    del values["dflash_config"]["mask_token_id"]
    (note,) = filter(None, (key.note("served", values, shape) for key in sglang.keys))
    assert "takes the token <|MASK|> for masks, as config.json has no dflash_config.mask" in note


def test_temperatures_of_a_confidence_are_ours(tmp_path: Path) -> None:
    words = "ignores dflash_config.confidence_temperatures and stops by the confidence as it was"
    assert words in notes_of(written(tmp_path / "a", "dspark", {}, "served"))
    plain = written(tmp_path / "b", "dspark", {"temperatures": ()}, "served")
    assert words not in notes_of(plain)


def test_the_script_prints_findings_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path, "medusa", {}, "vllm")
    damage(folder, "medusa_fc_bias", MISSING)
    damage(folder, "max_paths", 64)
    monkeypatch.setattr(sys, "argv", ["check_head.py", str(folder)])
    check_head.main()
    printed = capsys.readouterr().out
    assert "vLLM 0.32 takes false for medusa_fc_bias" in printed
    assert "keys of config.json that are not read: max_paths" in printed

"""READMEs of exported heads: what a folder is, and the commands that serve it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from decoding.models.folder import load_state
from heads.export import export
from tests.heads import law_6
from tests.heads.published import config_of, saved
from training.drafter_folder import Provenance
from training.heads.folder import write_card
from training.model_card import NOT_RUN

VLLM, SGLANG = "vLLM 0.32", "SGLang 0.5.23"


def commands(readme: str) -> dict[str, tuple[str, str]]:
    """Return engine -> how its command was tested, and the command."""
    blocks = re.findall(r"^\*\*(.+)\*\* \((.+)\)\n\n```bash\n((?:.+\n)+)```$", readme, re.M)
    return {name: (tested, command.rstrip()) for name, tested, command in blocks}


def exported(tmp_path: Path, layout: str, name: str, /, target: bool = False, **fields: Any) -> str:
    """Return the README of a row's head, exported from a folder with a card."""
    _, ours = saved(tmp_path / "ours", name, **fields)
    card = {"name": "mine", "target": "some/model", "num_draft_tokens": 5}
    (ours / "drafter_card.json").write_text(json.dumps(card))
    export(ours, layout, tmp_path / "out", tmp_path / "target" if target else None)
    return (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(
    ("layout", "name", "fields", "expected"),
    [
        ("served", "eagle3", {}, {VLLM: "run", SGLANG: NOT_RUN}),
        ("speculators", "eagle3", {}, {VLLM: "run"}),
        ("specforge", "eagle3", {}, {SGLANG: NOT_RUN}),
        ("speculators", "eagle3", {"taps": (1, 3)}, {}),
        ("served", "p_eagle", {}, {VLLM: "run"}),
        ("speculators", "p_eagle", {"fc_norm": False}, {VLLM: NOT_RUN}),
        ("speculators", "p_eagle", {}, {}),
        ("specforge", "p_eagle", {"fc_norm": False}, {}),
        ("served", "eagle1", {}, {VLLM: "run", SGLANG: NOT_RUN}),
        ("served", "eagle1 with a bias", {}, {SGLANG: NOT_RUN}),
        ("vllm", "medusa", {}, {VLLM: "run"}),
        ("vllm", "medusa", {"draft_vocab_size": 20}, {}),
        ("original", "medusa", {}, {}),
        ("vllm", "medusa with a shared projection", {}, {}),
        ("vllm", "medusa", {"shared": True}, {VLLM: "run"}),
        ("served", "dflash", {}, {VLLM: "run", SGLANG: NOT_RUN}),
        ("served", "dflash", {"layout": "anchor_first"}, {}),
        ("deepspec", "dspark", {}, {VLLM: NOT_RUN, SGLANG: NOT_RUN}),
        ("served", "domino", {}, {}),
    ],
    ids=str,
)
def test_a_command_is_that_of_a_server_that_reads_the_layout(
    layout: str, name: str, fields: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    found = commands(exported(tmp_path, layout, name, **fields))
    tested, command = found.pop("Shallow Draft")
    assert tested == "run" and command.startswith("python -m eval.run target.path=some/model ")
    assert command.replace('"', "").endswith(" drafters=[.]")
    assert {engine: tested for engine, (tested, _) in found.items()} == expected
    assert all("some/model" in command for _, command in found.values())


def test_the_draft_lengths_are_those_of_the_head_and_its_card(tmp_path: Path) -> None:
    found = commands(exported(tmp_path / "a", "served", "eagle3"))
    assert '"num_speculative_tokens": 5' in found[VLLM][1], "of the card"
    assert "num-steps 5 " in found[SGLANG][1] and found[SGLANG][1].endswith("draft-tokens 6")
    (_, line) = commands(exported(tmp_path / "b", "served", "p_eagle"))[VLLM]
    assert '"num_speculative_tokens": 4, "parallel_drafting": true' in line, "of the training"


def test_a_readme_names_the_head_the_layout_and_what_servers_ignore(tmp_path: Path) -> None:
    text = exported(tmp_path, "speculators", "p_eagle with a draft vocabulary")
    for words in (
        "license: unknown\nlibrary_name: shallow-draft\npipeline_tag: text-generation\n"
        "tags: [speculative-decoding, drafter, p_eagle]",
        "# mine in the layout speculators",
        "A P-EAGLE head (arXiv 2602.01469) for `some/model`: one decoder layer on",
        "- vLLM 0.32 ignores the tensors t2d",
        "- SGLang 0.5.23 does not read the layout speculators",
    ):
        assert words in text
    assert "TARGET" not in text


def test_a_head_without_a_card_leaves_the_target_open(tmp_path: Path) -> None:
    _, ours = saved(tmp_path / "ours")
    export(ours, "served", tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    assert "Put the target's path in the place of TARGET." in text
    assert commands(text)[VLLM][1].startswith("vllm serve TARGET ")


def test_a_command_needs_the_rows_that_the_server_needs(tmp_path: Path) -> None:
    """Check a draft vocabulary, whose output rows vLLM takes from the folder alone."""
    name = "dflash with a draft vocabulary"
    without = exported(tmp_path, "served", name)
    assert VLLM not in commands(without) and "needs lm_head.weight" in without
    law_6.target().save_pretrained(tmp_path / "target")
    (tmp_path / "more").mkdir()
    export(tmp_path / "ours", "served", tmp_path / "more/out", tmp_path / "target")
    assert VLLM in commands((tmp_path / "more/out/README.md").read_text())
    assert "lm_head.weight" in load_file(tmp_path / "more/out/model.safetensors")
    assert config_of(tmp_path / "more/out") == config_of(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eagle3", {VLLM: "run", SGLANG: NOT_RUN}),
        ("p_eagle", {VLLM: "run"}),
        ("medusa", {VLLM: "run"}),
        ("dflash", {VLLM: "run", SGLANG: NOT_RUN}),
        ("dflash with a draft vocabulary", {}),
        ("domino", {}),
        ("early exit", {}),
    ],
)
def test_a_trained_heads_readme_marks_its_commands_too(
    name: str, expected: dict[str, str], tmp_path: Path
) -> None:
    row, folder = saved(tmp_path, name)
    shape = row.shape(law_6.target().config)
    loss, data = {"name": "forward_kl"}, {"sources": ["hf:owner/chats"]}
    origin = Provenance("mine", "some/model", folder, data, loss, {}, draft_tokens=5)
    count = sum(each.numel() for each in load_state(folder).values())
    write_card(row.kind, folder, shape, count, origin)
    text = (folder / "README.md").read_text()
    found = commands(text)
    assert found.pop("Shallow Draft")[0] == "run"
    assert {engine: tested for engine, (tested, _) in found.items()} == expected
    assert text.count("```bash") == 1 + len(expected), "no command is without a mark"
    made = ModelCard(text).data
    assert (made.base_model, made.datasets) == ("some/model", ["owner/chats"])

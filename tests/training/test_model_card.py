"""The front matter of drafters' READMEs, read by the Hub's own parser."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from decoding.models.folder import CARD, hash_input, read_json
from training.drafter_folder import Provenance, write_card
from training.model_card import OURS, TRANSFORMERS, UNKNOWN, front_matter, license_of

APACHE = (
    "                              Apache License\n                        Version 2.0, January"
)


def card_of(target: str, *sources: str, **fields: Any) -> dict[str, Any]:
    return {"target": target, "data": {"sources": [*sources]}, **fields}


def parsed(card: dict[str, Any], *tags: str) -> dict[str, Any]:
    """Return the front matter as the Hub reads it."""
    made = ModelCard(front_matter(card, TRANSFORMERS, *tags) + "# Title\n")
    return made.data.to_dict()


def test_every_field_of_the_hub_is_there() -> None:
    card = card_of("owner/model@main", "chats.json", "hf:owner/chats@en:train:messages")
    assert parsed(card | {"license": {"license": "mit"}}, "medusa") == {
        "base_model": "owner/model",
        "datasets": ["owner/chats"],
        "license": "mit",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "drafter", "medusa"],
    }


def test_names_that_the_hub_does_not_know_are_left_out(tmp_path: Path) -> None:
    """Check folders, which the Hub would refuse as names or take for somebody else's."""
    (tmp_path / "owner" / "data").mkdir(parents=True)
    sources = (f"hf:{tmp_path}/owner/data", "embedded:chats", "hf:owner/kept", "hf:owner/kept:test")
    found = parsed(card_of("embedded:target", *sources))
    assert "base_model" not in found and found["datasets"] == ["owner/kept"]
    assert found["license"] == UNKNOWN, "of a card without a licence"
    assert "base_model" not in parsed(card_of(str(tmp_path)))
    assert "datasets" not in parsed(card_of("owner/model", "chats.json"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {"license": "unknown"}),
        ({"LICENSE": APACHE}, {"license": "apache-2.0"}),
        ({"LICENSE.txt": "MIT License\n\nCopyright"}, {"license": "mit"}),
        ({"LICENSE": "All rights reserved."}, {"license": "unknown"}),
        ({"README.md": "---\nlicense: gemma\n---\n"}, {"license": "gemma"}),
        (
            {"README.md": "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---\n"},
            {"license": "other", "license_name": "mine", "license_link": "LICENSE"},
        ),
        ({"README.md": "---\nlicense: mit\n---\n", "LICENSE": APACHE}, {"license": "mit"}),
        ({"README.md": "---\nlicense: [\n---\n", "LICENSE": APACHE}, {"license": "apache-2.0"}),
        ({"README.md": "---\nlicense_name: x\n---\n"}, {"license": "unknown"}),
    ],
    ids=str,
)
def test_a_licence_is_the_one_that_the_target_states(
    files: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert license_of(tmp_path) == expected
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert license_of(tmp_path / "model.gguf") == expected


def test_the_targets_licence_is_on_the_card_and_in_the_readme(tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "drafter"
    for path in (target, folder):
        path.mkdir()
        (path / "config.json").write_text("{}")
    (target / "LICENSE").write_text(APACHE)
    origin = Provenance("mine", str(target), target, {"sources": []}, {"name": "kl"}, {})
    write_card(folder, origin, {}, lambda card: front_matter(card, OURS, "eagle3"))
    assert read_json(folder / CARD)["license"] == {"license": "apache-2.0"}
    assert read_json(folder / CARD)["drafter_hash"] == hash_input(folder)
    made = ModelCard.load(folder / "README.md")
    assert made.data.license == "apache-2.0" and made.data.library_name == "shallow-draft"

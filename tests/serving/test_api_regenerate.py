"""Chats that `distill.regenerate` has the HTTP server answer, with the tokens of a local run."""

import json
import shutil
from pathlib import Path

import pytest

from decoding.models.text.tokenizer import TOKENIZER_FILES
from tests.support.api_server import TOKENIZER, Served, serve, small_model
from tests.support.regeneration import regenerated, write_chats


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model that the server has in memory."""
    folder = tmp_path_factory.mktemp("target")
    small_model().save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (TOKENIZER / name).is_file():
            shutil.copyfile(TOKENIZER / name, folder / name)
    settings = folder / "generation_config.json"
    values = json.loads(settings.read_text()) if settings.is_file() else {}
    settings.write_text(json.dumps(values | {"eos_token_id": 2}))
    return folder


def test_the_answers_are_those_of_a_local_run(target: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl")
    local = regenerated(target, chats, tmp_path / "local", "temperature=0")
    with serve("chain", max_rows=3) as served:
        url = f"server={served.url}/v1"
        found = regenerated(target, chats, tmp_path / "served", "temperature=0", url)
        assert served.metric("accepted_tokens_total") > 0, "a drafter drafts the answers"
    assert found == local and len(local) > 3


def test_fields_of_vllm_that_this_server_cannot_follow_are_refused() -> None:
    with serve("none") as served:
        body = {"model": served.model, "prompt": [4, 5], "max_tokens": 3, "temperature": 0}
        same = {"stop_token_ids": [2], "repetition_penalty": 1.0, "top_k": -1}
        answers = [served.post({**body, **more}) for more in ({}, same)]
        assert answers[0].json()["choices"] == answers[1].json()["choices"]
        for name, value, words in (
            ("stop_token_ids", [2, 7], "expected some of [2]"),
            ("stop_token_ids", "2", "expected some of [2]"),
            ("repetition_penalty", 1.2, "does not support"),
            ("top_k", -2, "a whole number from 0"),
        ):
            check(served, {**body, name: value}, name, words)


def check(served: Served, body: dict[str, object], name: str, words: str) -> None:
    error = served.post(body).json()["error"]
    assert error["param"] == name and words in error["message"]

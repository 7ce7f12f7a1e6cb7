"""The real vLLM with the file of draft lengths by batch size that scripts/bench/load.py writes."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from decoding.loop import decode
from decoding.rounds.settings import Settings
from scripts.bench import common
from scripts.bench.load import Options, write_vllm_file
from scripts.bench.served_models import load_engine
from tests.decoding.test_real_models import GAP_LIMIT, gap
from tests.support.vllm_server import Answer, serve

pytestmark = pytest.mark.engines
QUESTIONS = [
    *("def add(a, b):", "Write a class for a queue.", "import json", "How is a file opened?"),
    *("What does sorted() return?", "Write a function that reverses a list."),
]
TOKENS = 48
SETTINGS = Settings(max_new_tokens=TOKENS, ignore_eos=True)
UP_TO_TWO = [[1, 2, 4], [3, 8, 0]]  # four tokens with one or two rows, none with more


def parallel(target: Path, folder: Path) -> Path:
    """Copy the target as a model that is said to draft four tokens in one forward."""
    shutil.copytree(target, folder)
    config = json.loads((target / "config.json").read_text())
    config |= {"pard_token": config["vocab_size"] - 1, "num_parallel_tokens": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["ngram", "draft_model", "pard"])
def test_vllm_serves_the_file_and_gives_the_targets_text_across_its_ranges(
    kind: str,
    embedded_target: Path,
    vllm_python: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check texts and drafts of requests sent one by one, and of six at once."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    drafter = {
        "ngram": lambda: "prompt_lookup",
        "draft_model": lambda: str(embedded_target),
        "pard": lambda: str(parallel(embedded_target, tmp_path / "parallel")),
    }[kind]()
    chosen = Options(target=str(embedded_target), drafters=[drafter], name="mine")
    engine = load_engine(chosen, drafter)
    table = [[1, 8, 4]] if kind == "pard" else UP_TO_TWO
    file = write_vllm_file(drafter, engine, table, chosen)
    assert file.endswith(".yaml"), file

    line = f"vllm serve {shlex.quote(str(embedded_target))} --config {shlex.quote(file)}"
    with serve(line, tmp_path, tmp_path / "log") as server:
        one_by_one = server.ask(QUESTIONS, TOKENS)
        alone = server.tested_and_accepted()[0][0]
        at_once = server.ask(QUESTIONS, TOKENS, at_once=len(QUESTIONS))
        together = server.tested_and_accepted()[0][0] - alone
    check_equal(one_by_one, engine.target)
    check_equal(at_once, engine.target)
    assert alone > 0
    if kind != "pard":
        assert together < alone / 2, "drafts stop where more than two requests run"


def check_equal(answers: list[Answer], target: Any) -> None:
    """Check that answers are the target's own, except after a near tie (law 1)."""
    plain = decode(target, None, [one.prompt for one in answers], SETTINGS)
    for answer, own in zip(answers, plain, strict=True):
        assert len(answer.tokens) == TOKENS
        if answer.tokens != own.tokens:
            at = next(i for i in range(TOKENS) if answer.tokens[i] != own.tokens[i])
            assert gap(target, answer.prompt + answer.tokens[:at], SETTINGS, 0) < GAP_LIMIT

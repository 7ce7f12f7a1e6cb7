"""Errors for values that a chosen file of conf/ leaves to the user."""

import sys

import pytest

from eval.config import EvalConfig
from eval.run import check, run
from jobs.job import job_main

FILE = "benchmark=gsm8k: GSM8K (Cobbe et al. 2021, arXiv 2110.14168) as chats"


@pytest.mark.parametrize(
    ("given", "missing", "words"),
    [
        (["benchmark=gsm8k", "target.path=x"], "benchmark.path", FILE),
        (["benchmark=gsm8k", "target.path=???"], "benchmark.path, target.path", FILE),
        (["benchmark=mgsm", "target.path=x"], "benchmark.path", "FOLDER holds mgsm_LANGUAGE"),
        (["benchmark.path=x", "benchmark=gsm8k", "target.path=???"], "target.path", ""),  # control
    ],
)
def test_a_missing_value_is_explained_by_the_file_that_leaves_it_open(
    given: list[str],
    missing: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.run", *given])
    with pytest.raises(SystemExit) as stop:
        job_main("eval.run", EvalConfig, run, check)
    printed = capsys.readouterr().err
    assert stop.value.code == 2 and f"no value for {missing}. Set it" in printed
    assert words in printed and ("github.com" in printed) == bool(words)
    assert ("GSM8K" in printed) == (words == FILE)

"""Test the quality figures of the embedded target: scored windows and parsed functions."""

import json
import lzma
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from distill.config import QualityConfig
from distill.quality import _windows, parses, run, xz_bits_per_byte


def test_windows_score_every_token_once(embedded_target) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_target)
    document = "def add(left, right):\n    return left + right\n" * 30
    ids = tokenizer(document)["input_ids"]
    for context in (8, 64, 100, len(ids) - 1, len(ids), 5000):
        windows = list(_windows(tokenizer, document, context))
        scored = [token for window in windows for token in window.ids[window.scored_from :]]
        assert scored == ids[1:]
        assert all(len(window.ids) <= context for window in windows)
        assert all(window.scored_from >= context // 2 for window in windows[1:]), (
            "half of the context precedes each scored token"
        )


def test_only_valid_python_with_a_body_parses() -> None:
    request = 'def f(x):\n    """Double x."""'
    assert parses(request, "if x:\n    return 2 * x\nreturn 0")
    assert not parses(request, "")
    assert not parses(request, "return (2 * x")
    assert not parses(request, "if x:\nreturn 1")
    assert not parses(request, "x = '\0'")


def test_xz_uses_preset_9_of_the_command_line_tool() -> None:
    text = "the same line again\n" * 1000
    assert xz_bits_per_byte(text) == 8 * len(
        lzma.compress(text.encode(), format=lzma.FORMAT_XZ, preset=9)
    ) / len(text)


def test_a_dry_run_measures_nothing_and_a_finished_run_is_printed_again(
    tiny_target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"job": "distill.quality", "model": str(tiny_target), "output_dir": str(tmp_path)}
    path = run(QualityConfig(**config, dry_run=True))
    assert not path.exists()
    figures = {"bits_per_byte": 1.5, "samples": ["def f(): pass"], "drawn": []}
    monkeypatch.setattr("distill.quality.measure", lambda *_, **__: figures)
    assert run(QualityConfig(**config)) == path
    assert json.loads(path.read_text()) == figures
    monkeypatch.setattr("distill.quality.measure", None)
    capsys.readouterr()
    run(QualityConfig(**config))
    assert '"bits_per_byte": 1.5' in capsys.readouterr().out

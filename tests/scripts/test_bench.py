"""Test the benchmarks' help, and the machine's limits measured while other processes run."""

import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from decoding.costs.roofline import ForwardBudget
from jobs.help import field_docs

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path.stem
    for path in (ROOT / "scripts" / "bench").glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
)


def defaults(schema: type) -> dict[str, object]:
    return dataclasses.asdict(schema())


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_help_has_the_docstring_and_every_option(
    name: str, asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module(f"scripts.bench.{name}")
    monkeypatch.setattr(sys, "argv", [f"scripts/bench/{name}.py", asked])
    if name == "gpu":  # it can import few packages, so it parses its options itself
        assert script.main(sys.argv[1:]) == 0
    else:
        with pytest.raises(SystemExit) as ended:
            script.main()
        assert not ended.value.code
    about, _, listed = capsys.readouterr().out.partition(
        "\nOptions, as KEY=VALUE, with their defaults:\n"
    )
    assert about.strip() == script.__doc__.strip()
    lines = listed.splitlines()
    docs = field_docs(script.Options)
    assert (
        [line.split("=")[0].strip() for line in lines]
        == list(docs)
        == list(defaults(script.Options))
    )
    for (key, value), line in zip(defaults(script.Options).items(), lines, strict=True):
        assert line.lower().startswith(f"  {key}={value}".lower())
        assert docs[key] and line.endswith(docs[key]), f"{key} has a comment, and help shows it"


@pytest.mark.long
def test_help_is_printed_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/bench/bandwidth.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "  layers=12  " in done.stdout and "decoder layers" in done.stdout


def test_the_best_round_of_a_reader_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the fastest of a reader's rounds counts, as other processes slow rounds down.

    By the median, decoding would exceed the measured bandwidth. Such a share gives a warning.
    """
    from scripts.bench.bandwidth import compute_shares

    budget = ForwardBudget(weight_bytes=900, cache_bytes=100, operations=50)
    rounds = {
        "forward 1": [8.0, 9.0, 9.5],
        "forward 2": [4.5, 4.5, 4.5],
        "sum": [5.0, 6.0, 10.0],
        "copy": [1.0] * 3,
    }
    rounds["product"] = [2.0, 10.0, 1.0]
    sizes = {"sum": 1000, "copy": 2000, "product": 100}
    found = compute_shares(rounds, budget, sizes)
    assert found["best_reader"] == "sum"
    assert found["share_of_bandwidth"] == pytest.approx(0.9)
    assert found["share_of_operations"] == pytest.approx(0.45)
    assert found["V"] == {"1": 1.0, "2": 2.0}
    assert "warnings" not in found and not capsys.readouterr().err
    slow = compute_shares({**rounds, "sum": [5.0, 6.0, 6.0]}, budget, sizes)
    assert slow["warnings"] == ["share_of_bandwidth is 1.50: yardstick read slowly: not valid"]
    assert "not valid" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_engines_are_measured_on_an_idle_machine_only(tmp_path: Path) -> None:
    """Check the table of our loop and Hugging Face's, and the refusal while a process is busy."""
    script = [sys.executable, str(ROOT / "scripts/bench/engines.py"), "engines=[ours,hf]"]
    small = ["dtypes=[float32]", "batch_sizes=[1]", "max_prompts=2", "max_new_tokens=8"]
    options = [*small, "threads=1", f"output_dir={tmp_path / 'runs'}"]
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        refused = subprocess.run([*script, *options], capture_output=True, text=True)
    finally:
        busy.kill()
        busy.wait()
    assert refused.returncode and "other processes use" in refused.stderr
    done = subprocess.run([*script, *options, "busy=true"], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    line = (
        r"batch 1, temperature 0: [\d.]+ tokens/s, [\d.]+x of hf \(2 prompts, median of 3 rounds\)"
    )
    assert re.search(line, done.stdout)

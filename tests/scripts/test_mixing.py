"""The comparison of mixtures at toy size."""

import json
import subprocess
from pathlib import Path

import pytest

from scripts.bench.mixing import SIDES
from tests.support.forks import run_forked


def toy(tiny_target: Path, folder: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    words = {"letters": "abc abd abe ", "numbers": "12 13 14 ", "names": "Ann Bob Cid "}
    for name, text in words.items():
        lines = (json.dumps({"text": text * (20 + number)}) for number in range(12))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    given = (
        f"target={tiny_target} texts={folder} dtype=float32 threads=1 max_length=64 "
        f"tokens_per_step=256 steps=4 eval_every=2 work={folder}/work"
    )
    domains = ",".join(f"{name}={name}.jsonl" for name in words)
    return run_forked("scripts.bench.mixing", *given.split(), f"domains=[{domains}]", *more)


@pytest.mark.long
def test_every_mixture_sees_equally_many_rows(tiny_target: Path, tmp_path: Path):
    done = toy(
        tiny_target,
        tmp_path,
        f"name={tmp_path / 'figures'}",
        "seeds=[0,1]",
        "smoothing=0",
        "rate=5",
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert set(figures["runs"]) == set(SIDES)
    for runs in figures["runs"].values():
        assert [sum(run["rows"].values()) for run in runs.values()] == [16, 16], (
            "every side sees as many rows"
        )
        assert all(run["worst"] == min(run["by_domain"].values()) for run in runs.values())
    fixed, moved = (figures["runs"][side]["0"]["shares"] for side in ("fixed", "acceptance"))
    assert fixed != moved
    assert figures["over_fixed"]["acceptance"]["worst"]["low"] is not None


@pytest.mark.long
def test_a_domain_too_small_to_split_is_named(tiny_target: Path, tmp_path: Path):
    (tmp_path / "few.jsonl").write_text(json.dumps({"text": "one line of text"}))
    done = toy(tiny_target, tmp_path, "domains=[few=few.jsonl]")
    assert done.returncode == 1
    assert "domain few (few.jsonl) has 1 pieces of text" in done.stderr

"""What eval.run and its page cost, by scripts/bench/own_cost.py and report_page.py."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import eval.run as job
from scripts.bench import common, own_cost, report_page
from tests.support import tiny_folders as tiny


def figures_of(
    script: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> dict[str, Any]:
    """Run a script with these options; return its figures."""
    monkeypatch.setattr(common, "RESULTS", folder / "scripts" / "bench" / "results")
    (folder / "scripts" / "bench").mkdir(parents=True, exist_ok=True)
    name = script.__name__.rpartition(".")[2]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    script.main()
    return dict(json.loads((common.RESULTS / f"{name}.json").read_text())["figures"])


def own_cost_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if not (folder / "target").exists():
        tiny.save(folder / "target")
        tiny.prompts(folder / "prompts.jsonl", count=6)
    paths = [f"target={folder / 'target'}", f"prompts={folder / 'prompts.jsonl'}"]
    return figures_of(own_cost, folder, monkeypatch, *paths, "threads=1", "max_new_tokens=8")


@pytest.mark.usefixtures("undrawn")
def test_seconds_outside_decoding_are_the_runs_own_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that a slow page counts as own cost, and a slow start does not."""
    slow, page, load = 1.0, job.evaluation_page, job.load
    monkeypatch.setattr(job, "evaluation_page", lambda *given: (time.sleep(slow), page(*given))[1])
    found = own_cost_of(tmp_path, monkeypatch)
    assert slow < found["page_seconds"] < slow + 1
    parts = [found[f"{part}_seconds"] for part in (*own_cost.PARTS, "rest")]
    assert sum(parts) == pytest.approx(found["total_seconds"]) and min(parts) > 0
    own = found["page_seconds"] + found["rest_seconds"]
    assert found["own_cost"] == pytest.approx(own / found["decoding_seconds"])
    assert not found["goals"]["own_cost"]["met"]
    printed = capsys.readouterr().out
    assert f"own cost: {found['own_cost']:.2%} of decoding" in printed
    left_out = {part: found[f"{part}_seconds"] for part in ("start", "timing")}
    for part, spent in left_out.items():
        share = spent / found["decoding_seconds"]
        assert f"{part} {spent:.2f} s ({share:.2%})" in printed, "beside the figure"
    outside = found["outside_decoding"]
    assert outside == pytest.approx(
        found["own_cost"] + sum(left_out.values()) / found["decoding_seconds"]
    )
    assert f"all outside decoding: {outside:.2%} of decoding" in printed
    monkeypatch.setattr(job, "evaluation_page", page)
    monkeypatch.setattr(job, "load", lambda cfg: (time.sleep(slow), load(cfg))[1])
    again = own_cost_of(tmp_path, monkeypatch)
    assert again["start_seconds"] > slow > again["page_seconds"], "control: a slow start is not"
    assert job.evaluation_page is page, "the functions are restored"


@pytest.mark.long
def test_a_page_of_simulated_prompts_has_its_seconds_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("prompts=12", "sweep_prompts=2", "max_new_tokens=24")
    found = figures_of(report_page, tmp_path, monkeypatch, *small)
    parts = [found[f"of_these_{part}"] for part in ("reading", "rows", "page")]
    assert sum(parts) == pytest.approx(found["seconds"]) and min(parts) > 0
    assert found["processor_seconds"] > 0 and found["peak_megabytes"] > 100
    assert found["page_megabytes"] > 0.05, "plots are drawn"
    assert found["goals"]["seconds"]["met"] == (found["seconds"] <= report_page.SECONDS)
    assert found["goals"]["memory"]["met"] == (found["peak_megabytes"] <= report_page.MEGABYTES)
    assert "12 prompts, 3 drafters" in capsys.readouterr().out


def test_simulated_generations_have_the_acceptance_of_their_drafter(tmp_path: Path) -> None:
    report_page.write_run(tmp_path, report_page.Options(prompts=40, sweep_prompts=2))
    records = report_page.read_records(tmp_path / "records.jsonl")
    for name, (alpha, _) in report_page.DRAFTERS.items():
        mine = [one for one in records if one.drafter == name]
        tested, accepted = (
            sum(sum(getattr(one, counts)) for one in mine)
            for counts in ("tested_by_depth", "accepted_by_depth")
        )
        assert accepted / tested == pytest.approx(alpha, abs=0.03)
        for one in mine:
            assert len(one.trace) == len(one.tokens) == 128
            assert one.tested_by_depth[1:] == one.accepted_by_depth[:-1]

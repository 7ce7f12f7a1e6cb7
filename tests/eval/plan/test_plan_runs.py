"""Where a plan finds the runs whose acceptances it adds."""

import json
import shutil
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from decoding.models.folder import hash_input
from eval.plan.config import PlanConfig
from eval.plan.curves import collect, run_folders

RESULTS = Path(__file__).parents[2] / "fixtures" / "eval.run" / "results.jsonl"


def training(folder: Path, alpha: float) -> Path:
    """Write the run folder of a training whose drafter had this held-out acceptance."""
    drafter = folder / "drafter"
    drafter.mkdir(parents=True)
    (drafter / "config.json").write_text(json.dumps({"alpha": alpha}))
    card = {
        "name": "medusa",
        "target": "target",
        "target_hash": "1",
        "drafter_hash": hash_input(drafter),
        "acceptance": {"temperature": 0.0, "acceptance": alpha},
    }
    (drafter / "drafter_card.json").write_text(json.dumps(card))
    return folder


def rates(patterns: list[str]) -> list[float | None]:
    """Return the acceptance rates of the runs that are found."""
    found, notes = collect(patterns)
    assert notes == []
    return sorted(one.alpha_by_depth[0] or 0.0 for one in found)


def test_runs_of_jobs_experiments_and_sweeps_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    training(tmp_path / "runs" / "heads.train" / "default", 0.2)
    training(tmp_path / "runs" / "heads.train" / "every_head" / "medusa", 0.3)
    training(tmp_path / "runs" / "distill.train" / "sweep" / "medusa" / "depths=[1,2]", 0.4)
    kept = training(tmp_path / "runs" / "heads.train" / "default" / "checkpoints" / "best", 0.9)
    shard = tmp_path / "runs" / "eval.run" / "default" / "shards" / "1"
    shard.mkdir(parents=True)
    shutil.copy(RESULTS, shard)
    monkeypatch.chdir(tmp_path)
    assert rates(PlanConfig().runs) == [0.2, 0.3, 0.4]
    assert "runs: 3 runs found" in capsys.readouterr().out
    at_two = [folder for folder in glob("runs/*/*") if (Path(folder) / "drafter").is_dir()]
    assert len(at_two) == 1, "a control: the folders at this depth alone are not all"
    assert rates([str(kept)]) == [0.9], "a control: a folder that is named is read"
    assert run_folders([str(shard)]) == [shard]


def test_a_run_that_is_reached_twice_counts_once(tmp_path: Path):
    run = training(tmp_path / "disk" / "heads.train" / "default", 0.2)
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "again").symlink_to(tmp_path / "disk")
    every = [str(tmp_path / "runs"), str(tmp_path / "disk"), str(run), str(tmp_path / "missing")]
    assert rates(every) == rates([str(run)]) == rates([str(tmp_path / "runs")]) == [0.2]
    (one,) = run_folders(every)
    assert one.samefile(run)
    assert rates([]) == []

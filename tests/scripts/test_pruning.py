"""The pruning benchmark at toy size, and its claim about cost."""

import json
from pathlib import Path

import pytest

from scripts.bench import common, pruning


def test_importance_costs_less_than_a_fiftieth_of_published_masks():
    found = pruning.count_published_flops()
    assert found["l0"] == pytest.approx(6 * 6_738_415_616 * 419_430_400)
    assert found["ratio"] > 50
    assert found["importance_in_stages"] > found["importance"]
    assert found["ratio_in_stages"] > 50, "two cuts, with the probes of both"


@pytest.mark.exhaustive
def test_every_side_runs(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    given = [
        "layers=[2]",
        "seeds=[0,1]",
        "steps=2",
        "mask_steps=3",
        "probe_steps=1",
        "tokens_per_step=512",
        "max_prompts=2",
    ]
    monkeypatch.setattr(
        "sys.argv",
        [
            "pruning.py",
            f"target={tiny_target}",
            *given,
            "max_new_tokens=6",
            "sequences=16",
            "threads=1",
            f"work={tmp_path}/work",
        ],
    )
    pruning.main()
    figures = json.loads((tmp_path / "pruning.json").read_text())["figures"]
    runs = figures["runs"]["2"]
    assert {side: len(of) for side, of in runs.items()} == dict.fromkeys(pruning.SIDES, 2)
    assert all(
        0 < one["acceptance"] < 1 and one["tau_greedy"] >= 1
        for of in runs.values()
        for one in of.values()
    )
    assert figures["importance_over"]["2"]["random"]["acceptance"]["low"] is not None

"""Plans of `eval.plan` for a small target: their settings, rows and acceptances."""

import json
from pathlib import Path
from typing import Any

from decoding.models.folder import hash_input
from eval.plan.config import PlanConfig
from eval.plan.costs import FILE
from eval.plan.curves import Curve
from eval.plan.job import ROWS, run
from eval.plan.rows import PlanRow, row_of
from jobs.config import TargetConfig

NAMES = ["1 layer, width 32", "2 layers, width 32", "medusa", "eagle3"]


def config(home: Path, name: str, **changes: Any) -> PlanConfig:
    """Return a plan for the target in `home`."""
    values = {
        "job": "eval.plan",
        "output_dir": str(home / name),
        "target": TargetConfig(path=str(home / "target"), device="cpu", execution="eager"),
        "depths": [1, 2],
        "heads": ["medusa", "eagle3"],
        "max_draft_tokens": 3,
        "context": 24,
        "cost_seconds": 0.01,
        "assumed_tflops": 100.0,
        "acceptance": str(home / "acceptance.jsonl"),
        "runs": [],
    }
    return PlanConfig(**{**values, **changes})


def rows_in(folder: Path) -> list[PlanRow]:
    """Return the rows of a plan."""
    return [row_of(json.loads(line)) for line in (folder / ROWS).read_text().splitlines()]


def curve(home: Path, kind: str, layers: int, alpha: float, **changes: Any) -> Curve:
    """Return a measured acceptance of the target in `home`."""
    values: dict[str, Any] = {
        "target": str(home / "target"),
        "target_hash": hash_input(home / "target"),
        "drafter": kind,
        "drafter_hash": f"{kind} {layers}",
        "kind": kind,
        "draft_shape": "chain",
        "drafter_class": "",
        "stopping": "fixed",
        "layers": layers,
        "hidden_size": 32 if layers else 0,
        "draft_vocab_size": 0,
        "training_tokens": 1_000_000,
        "temperature": 0.0,
        "alpha_by_depth": [alpha, alpha, alpha],
        "tested_by_depth": [900, 800, 700],
        "benchmark": "prompts",
        "source": "eval.run",
    }
    return Curve(**{**values, **changes})


def again(home: Path, tmp_path: Path, **changes: Any) -> Path:
    """Plan once more from the measured costs of `planned`, with other settings."""
    given = {"costs": str(home / "planned" / FILE), "output_dir": str(tmp_path / "again")}
    return run(config(home, "", **{**given, **changes}))

"""Evaluations of drafters in engines beside our own loop."""

import dataclasses
from pathlib import Path

from eval.config import EvalConfig
from eval.engines.measure import EngineSession
from eval.engines.plan import plan_engines
from eval.engines.rows import build_engine_rows
from eval.measure.setup import load
from eval.statistics.engine_row import EngineRow
from jobs.config import TargetConfig
from jobs.drafters import CONTROL
from tests.support import tiny_folders as tiny


def engine_config(home: Path, name: str, **changes: object) -> EvalConfig:
    """Return an evaluation in the engines of the drafter `noisy`, greedy and in float32."""
    values = {
        "engine": ["ours", "hf"],
        "target": TargetConfig(path=str(home / "target"), dtype="float32", device="cpu"),
        "drafters": [str(home / "noisy")],
        "temperatures": [0.0],
        "max_new_tokens": 40,
        "num_draft_tokens": [3],
        "stop_at_eos": True,  # so that acceptance has decodings of its own, past stop tokens
        "sweep": [],
        **changes,
    }
    return tiny.config(home, name, **values)


def swap_folder(cfg: EvalConfig, folder: Path, folder_of_engine: Path) -> EngineRow:
    """Measure with a plan by which engines load another folder than our loop; return the row."""
    loaded = load(cfg)
    plan = plan_engines(cfg, loaded)
    plan = dataclasses.replace(plan, folders=dict.fromkeys(plan.folders, folder_of_engine))
    folder.mkdir()
    session = EngineSession(cfg, loaded, plan, folder)
    session.measure()
    rows = build_engine_rows(
        loaded.run, loaded.facts, session.records, plan.arms, session.versions, [], False
    )
    [row] = [r for r in rows if r.drafter not in ("", CONTROL) and r.engine != "ours"]
    return row

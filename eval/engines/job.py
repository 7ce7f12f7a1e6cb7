"""The part of eval.run that measures engines, from the check to the rows."""

from __future__ import annotations

from pathlib import Path

from eval.config import EvalConfig
from eval.engines.distribution import Verdict, read_or_test
from eval.engines.measure import EngineSession
from eval.engines.plan import EnginePlan
from eval.engines.rows import build_engine_rows
from eval.measure.records import AUTOREGRESSIVE
from eval.measure.setup import Loaded
from eval.statistics.engine_row import EngineRow
from serving.engines.interface import Sampling
from serving.engines.registry import ENGINES, python_of


def measure_engines(
    cfg: EvalConfig, loaded: Loaded, plan: EnginePlan, folder: Path
) -> list[EngineRow]:
    """Measure the engines of a run and return their rows, those of our own loop among them."""
    session = EngineSession(cfg, loaded, plan, folder)
    session.measure()
    return build_engine_rows(
        loaded.run,
        loaded.facts,
        session.records,
        plan.arms,
        session.versions,
        _verdicts(cfg, plan, folder),
        ignore_eos=not cfg.stop_at_eos,
    )


def _verdicts(cfg: EvalConfig, plan: EnginePlan, folder: Path) -> list[Verdict]:
    """Test the sampling of engines that are tested, at the temperatures of the run."""
    found = []
    for name in plan.engines:
        if not ENGINES[name].distribution_is_tested:
            continue
        methods = {arm.method for arm in plan.arms if arm.engine == name} - {AUTOREGRESSIVE}
        for temperature in filter(None, cfg.temperatures):
            found += read_or_test(
                folder / "engines" / f"{name}_distribution.json",
                name,
                python_of(name, cfg.engine_python),
                sorted(methods),
                Sampling(1, temperature, cfg.top_k, cfg.top_p),
            )
    return found

"""Share of its time that eval.run spends on itself, besides what it measures.

    python scripts/bench/own_cost.py drafter=runs/quickstart/distill.train/drafter

A run has four parts: the start (models, prompts, warm-up, costs that rules use), decoding, the
timing of a round's parts, and its own cost, which is all the rest: rendering prompts, comparing
outputs, records, progress, rows with their intervals, and the page. The figure is the own cost over
decoding. The page has a fixed cost of some seconds, so the share is stated without it too. Start
and timing are no own cost, as they measure or load what any run needs; they are printed with their
shares, and so is everything outside decoding together.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import eval.run as job
from eval.config import BenchmarkConfig, EvalConfig
from eval.measure import measurement, session
from jobs.config import TargetConfig
from scripts.bench import common
from scripts.usage import run_script

GOAL = 0.02  # own cost over decoding
# part -> the functions whose seconds it takes, each with the module that calls it
PARTS: dict[str, list[tuple[Any, str]]] = {
    "start": [(job, "load"), (session, "freeze_costs"), (session, "warm_up")],
    "decoding": [(measurement, "decode")],
    "timing": [(session, "time_slice"), (job, "with_limits")],
    "page": [(job, "evaluation_page")],
}


@dataclass
class Options(common.BenchOptions):
    target: str = "embedded:target"  # model folder
    drafter: str = ""  # model folder; empty: prompt lookup alone
    prompts: str = "embedded:prompts"  # prompts that are decoded
    max_prompts: int = 64  # prompts that are decoded
    max_new_tokens: int = 128  # of each generation
    num_draft_tokens: int = 4  # draft length
    dtype: str = "float32"  # of both models
    name: str = "own_cost"  # name of the results file


@dataclass
class Watch:
    """Seconds of each part; those of a part within another count for the inner one alone."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    inner: float = 0.0  # seconds of the calls that ended within the current one

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its seconds counted."""

        def call(*given: Any, **named: Any) -> Any:
            before, self.inner, began = self.inner, 0.0, time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                spent = time.perf_counter() - began
                self.seconds[part] += spent - self.inner
                self.inner = before + spent

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the parts of what runs in the block."""
        real = {(module, name): getattr(module, name) for _, module, name in _functions()}
        try:
            for part, module, name in _functions():
                setattr(module, name, self.timed(part, real[module, name]))
            yield
        finally:
            for (module, name), function in real.items():
                setattr(module, name, function)


def _functions() -> Iterator[tuple[str, Any, str]]:
    for part, functions in PARTS.items():
        for module, name in functions:
            yield part, module, name


def measure(cfg: EvalConfig) -> dict[str, float]:
    """Run an evaluation; return the seconds of its parts, and the shares of its own cost."""
    watch, began = Watch(), time.perf_counter()
    with watch.watching():
        job.run(cfg)
    total = time.perf_counter() - began
    rest = total - sum(watch.seconds.values())
    decoding, page = watch.seconds["decoding"], watch.seconds["page"]
    seconds = {f"{part}_seconds": spent for part, spent in watch.seconds.items()}
    return {
        **seconds,
        "rest_seconds": rest,
        "total_seconds": total,
        "own_cost": (rest + page) / decoding,
        "own_cost_without_page": rest / decoding,
        "outside_decoding": (total - decoding) / decoding,
    }


def describe(found: dict[str, float]) -> str:
    """Return a table of all parts, and lines on what the figure holds and what it leaves out."""
    decoding, total = found["decoding_seconds"], found["total_seconds"]
    parts = [(part, found[f"{part}_seconds"]) for part in (*PARTS, "rest", "total")]
    rows = [
        (part, f"{spent:.2f}", f"{spent / decoding:.2%}", f"{spent / total:.2%}")
        for part, spent in parts
    ]
    left = {part: found[f"{part}_seconds"] for part in ("start", "timing")}
    left_out = " and ".join(
        f"{part} {spent:.2f} s ({spent / decoding:.2%})" for part, spent in left.items()
    )
    return "\n".join(
        [
            common.table(("part", "seconds", "of decoding", "of the run"), rows),
            f"own cost: {found['own_cost']:.2%} of decoding (page and rest), goal {GOAL:.0%}; "
            f"{found['own_cost_without_page']:.2%} without the page",
            f"not in this figure: {left_out}; all outside decoding: "
            f"{found['outside_decoding']:.2%} of decoding",
        ]
    )


def main() -> None:
    """Print and save the seconds of each part, and whether the goal is met."""
    chosen = common.read_options(Options)
    with tempfile.TemporaryDirectory() as home:
        found = measure(
            EvalConfig(
                job="eval.run",
                output_dir=str(Path(home) / "run"),
                target=TargetConfig(chosen.target, dtype=chosen.dtype, device=chosen.device),
                drafters=[chosen.drafter] if chosen.drafter else [],
                benchmark=BenchmarkConfig(path=chosen.prompts),
                max_prompts=chosen.max_prompts,
                max_new_tokens=chosen.max_new_tokens,
                num_draft_tokens=[chosen.num_draft_tokens],
                sweep=[],
                temperatures=[0.0],
                threads=chosen.threads,
            )
        )
    print(describe(found))
    goals = {"own_cost": common.goal(found["own_cost"], found["own_cost"] <= GOAL)}
    common.save(chosen.name, chosen, {**found, "goals": goals}, show=False)


if __name__ == "__main__":
    run_script(main)

"""SIMULATED runs with known results, for the tests of eval.compare."""

import json

from eval.config import CompareConfig
from eval.statistics.comparison.entries import entries_of
from eval.statistics.comparison.evaluations import labels_of, read_evaluation
from eval.statistics.comparison.panels import panels_of
from tests.support import simulated_runs

SHALLOW = {"simulated-1": simulated_runs.drafter(0.62, 1, 3_100_000, 0.4)}
DEEP = {"simulated-4": simulated_runs.drafter(0.72, 4, 9_200_000, 1.6)}
SLOW = {"simulated-6": simulated_runs.drafter(0.72, 6, 14_000_000, 4.2)}


def configured(home, name, folders, **changes):
    values = {
        "job": "eval.compare",
        "output_dir": str(home / f"{name}.out"),
        "bootstrap_resamples": 200,
    }
    return CompareConfig(**{**values, "runs": [str(folder) for folder in folders], **changes})


def evaluations_of(*folders):
    return [
        read_evaluation(folder, label)
        for folder, label in zip(folders, labels_of(folders), strict=True)
    ]


def panels(*folders, prompts="headline"):
    return panels_of(entries_of(evaluations_of(*folders), prompts), 200, 0)


def lines(folder):
    return [json.loads(line) for line in (folder / "comparison.jsonl").read_text().splitlines()]


def three(runs):
    return [runs / label / "eval.run" for label in ("one", "four", "six")]

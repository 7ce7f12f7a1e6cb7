"""Examinations of the doctor on the tiny target that chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eval.config import BenchmarkConfig
from eval.doctor.config import DoctorConfig
from eval.doctor.diagnosis import Diagnosis, diagnose
from eval.doctor.estimates import LEAST_LOSS
from eval.doctor.subject import Subject
from jobs.config import TargetConfig
from tests.support import planted

TARGET = planted.MODELS / "target"


def doctor_config(
    home: Path, drafter: Any, target: Path = TARGET, dtype: str = "float32", **changes: Any
) -> DoctorConfig:
    """Return the examination of a drafter that answers all questions."""
    values = {
        "job": "eval.doctor",
        "output_dir": str(home / "run"),
        "target": TargetConfig(path=str(target), device="cpu", dtype=dtype),
        "benchmark": BenchmarkConfig(
            path=str(planted.write_prompts(home / "prompts.jsonl", planted.shuffled()))
        ),
        "drafter": {"use": str(drafter)} if isinstance(drafter, Path) else drafter,
        "max_new_tokens": 32,
    }
    return DoctorConfig(**{**values, **changes})


def examined(home: Path, drafter: Any, *conditions: Any, **changes: Any) -> Diagnosis:
    """Return the diagnosis of a drafter; the arguments are those of `doctor_config`."""
    return diagnose(Subject(doctor_config(home, drafter, *conditions, **changes)))


def causes(found: Diagnosis) -> list[str]:
    """Return the names of the causes, and check their form."""
    for one in found.causes:
        assert one.found and one.expected and one.remedy, one.cause
        assert one.loss is None or one.loss.value >= LEAST_LOSS, one.cause
    return [one.cause for one in found.causes]


def healthy(home: Path, noise: float = 0.02) -> Path:
    """Write a drafter that is the target with some noise."""
    return planted.write_drafter(home / "drafter", TARGET, planted.noisy(TARGET, noise))


def training_run(home: Path, chats: Path, /, **data: Any) -> None:
    """Write the configuration of a training above the drafter's folder. data: other values."""
    values = {
        "job": "distill.train",
        "target": {"path": str(TARGET)},
        "data": {
            "chats": [str(chats)],
            "template": "auto",
            "max_length": 96,
            "train_on": "answers",
            **data,
        },
    }
    (home / "config.yaml").write_text(OmegaConf.to_yaml(values), encoding="utf-8")

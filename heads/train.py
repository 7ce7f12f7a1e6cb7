"""`python -m heads.train head=NAME`: train a drafter head of any kind on the frozen target's hidden
states; leaves a head folder (training/heads/train.py).

A kind brings its own configuration, so the command line's `head=`, an experiment's, or a saved
configuration's `kind` is read before anything is composed.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from decoding.errors import UserError
from heads.registry import KINDS, kind_of
from jobs.job import CONF, job_main
from jobs.stages import ON_FILE
from training.heads.config import HeadJobConfig
from training.heads.train import train_head
from training.held_out import check_stages

USUAL = "recurrent"  # as conf/heads_train.yaml has it


def run(config: Any) -> Path:
    """Train, and write the head to output_dir/drafter. Returns that folder."""
    kind = kind_of(config.kind)
    if not isinstance(config, kind.config):
        raise UserError(f"kind={config.kind} is set by head={config.kind} alone: leave it out")
    return train_head(config, kind)


def schema_of(name: str) -> type[HeadJobConfig]:
    """Return the configuration of the job for a kind of head: that of the kind, and its name."""
    of_kind: Any = kind_of(name).config

    @dataclass
    class HeadsTrainConfig(of_kind):
        """`python -m heads.train head=NAME`: a drafter head for the frozen target."""

        kind: str = name  # the kind of head: set by head=NAME

    return HeadsTrainConfig


def schema_for(arguments: Sequence[str]) -> type[HeadJobConfig]:
    """Return the configuration of the job for the kind of head that a command line names."""
    return schema_of(chosen_kind(arguments))


def chosen_kind(arguments: Sequence[str]) -> str:
    """Return the kind of head that a command line names, the usual one where it names none that
    there is: what is wrong with it is found when it is composed.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments if "=" in argument)
    name = given.get("head") or _of_experiment(given.get("+experiment", "")) or USUAL
    if ON_FILE in arguments[:-1]:
        name = str(_written(Path(arguments[arguments.index(ON_FILE) + 1])).get("kind"))
    return name if name in KINDS else USUAL


def _of_experiment(name: str) -> str:
    """The kind that an experiment's defaults name; empty where they name none."""
    defaults = _written(CONF / "experiment" / f"{name}.yaml").get("defaults", [])
    found = [one["override /head"] for one in defaults if "override /head" in one]
    return str(found[-1]) if found else ""


def _written(file: Path) -> dict[str, Any]:
    """What a YAML file holds; nothing where it is not there or no mapping, which others say."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    job_main("heads.train", schema_for(sys.argv[1:]), run, check_stages)

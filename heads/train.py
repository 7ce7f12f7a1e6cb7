"""`python -m heads.train head=NAME`: train a drafter head of any kind into a head folder.

See training/heads/train.py. A kind has its own configuration, so `head=` of the command line or the
experiment, or `kind` of a saved configuration, is read before composing.
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
from training.held_out.answers import check_stages

DEFAULT_KIND = "recurrent"  # as in conf/heads_train.yaml


def run(config: Any) -> Path:
    """Train a head, write it to output_dir/drafter and return that folder.

    Raises UserError if `kind` was set without `head=`.
    """
    kind = kind_of(config.kind)
    if not isinstance(config, kind.config):
        raise UserError(
            f"kind={config.kind} is set only by head={config.kind}. Set head and remove kind."
        )
    return train_head(config, kind)


def schema_of(name: str) -> type[HeadJobConfig]:
    """Return the job's configuration class for the kind of head called `name`."""
    of_kind: Any = kind_of(name).config

    @dataclass
    class HeadsTrainConfig(of_kind):
        """`python -m heads.train head=NAME`: a drafter head for the frozen target."""

        # the kind of head: set by head=NAME
        kind: str = name

    return HeadsTrainConfig


def schema_for(arguments: Sequence[str]) -> type[HeadJobConfig]:
    """Return the job's configuration class for the arguments of a command line."""
    return schema_of(find_kind_name(arguments))


def find_kind_name(arguments: Sequence[str]) -> str:
    """Return the name of the kind of head that a command line asks for, or the default name.

    An unknown name gives the default too, since composing reports the error.
    """
    given = dict(argument.partition("=")[::2] for argument in arguments if "=" in argument)
    name = given.get("head") or _of_experiment(given.get("+experiment", "")) or DEFAULT_KIND
    if ON_FILE in arguments[:-1]:
        name = str(_written(Path(arguments[arguments.index(ON_FILE) + 1])).get("kind"))
    return name if name in KINDS else DEFAULT_KIND


def _of_experiment(name: str) -> str:
    """Return the name of the kind in an experiment's defaults, or an empty string."""
    defaults = _written(CONF / "experiment" / f"{name}.yaml").get("defaults", [])
    found = [one["override /head"] for one in defaults if "override /head" in one]
    return str(found[-1]) if found else ""


def _written(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; empty for an invalid file, which composing reports."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    job_main("heads.train", schema_for(sys.argv[1:]), run, check_stages)

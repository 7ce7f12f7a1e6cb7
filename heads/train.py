"""`python -m heads.train head=NAME`: train a drafter head of any kind into a head folder.

See training/heads/train.py. A kind has its own configuration, so the kind of the preset in `head=`
of the command line or the experiment, or that of a saved configuration, is read before composing.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from heads.registry import find_kind, kind_of, read_mapping
from jobs.composing import CONF, search_folders
from jobs.job import exit_on_errors, job_main
from jobs.stages import ON_FILE
from training.heads.config import HeadJobConfig
from training.heads.train import train_head
from training.held_out.answers import check_stages

DEFAULT_KIND = "recurrent"  # as in conf/heads_train.yaml


def run(config: Any) -> Path:
    """Train a head, write it to output_dir/drafter and return that folder.

    Raises UserError for an unknown kind, and for one that was set without `head=`.
    """
    kind = kind_of(config.kind)
    if not isinstance(config, kind.config):
        raise UserError(
            f"kind={config.kind} is set only by a file of conf/head. Set head=NAME to one with "
            f"this kind, and remove kind."
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

    An unknown preset gives the default too, since composing reports the error. Raises UserError for
    an unknown kind, and for a sweep over presets of several kinds.
    """
    if ON_FILE in arguments[:-1]:
        name = str(read_mapping(Path(arguments[arguments.index(ON_FILE) + 1])).get("kind"))
        return kind_of(name).name
    given = dict(argument.partition("=")[::2] for argument in arguments if "=" in argument)
    folders = (CONF, *search_folders(arguments))
    preset = given.get("head") or _of_experiment(given.get("+experiment", ""), folders)
    kinds = {one: find_kind(one, folders) for one in preset.split(",")}
    if len({*kinds.values()} - {""}) > 1:
        named = ", ".join(f"{one} ({kind})" for one, kind in kinds.items() if kind)
        raise UserError(
            f"head={preset} sweeps over several kinds of heads, {named}, whose options differ. "
            f"Train each with a command of its own, or all in a stage of an experiment, as "
            f"conf/experiment/every_head.yaml does."
        )
    return next(filter(None, kinds.values()), DEFAULT_KIND)


def _of_experiment(name: str, folders: Iterable[Path]) -> str:
    """Return the name of the preset in an experiment's defaults, or an empty string."""
    files = (folder / "experiment" / f"{name}.yaml" for folder in folders)
    file = next((file for file in files if file.is_file()), None)
    defaults = read_mapping(file).get("defaults", []) if file else []
    found = [one["override /head"] for one in defaults if "override /head" in one]
    return str(found[-1]) if found else ""


if __name__ == "__main__":
    exit_on_errors(lambda: job_main("heads.train", schema_for(sys.argv[1:]), run, check_stages))

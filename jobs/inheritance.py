"""Inheritance of settings between an experiment and its stages.

A stage inherits each key that both jobs have from the same dataclass, which can limit these keys
with `SHARED`. A stage of the called job inherits all keys. A stage that names another experiment
(`+experiment=`) inherits only the groups in `SETTING` and the settings of every job.
"""

import dataclasses
from typing import Any

from jobs.config import SETTING, JobConfig, fields_of

OF_THE_RUN = ("output_dir", "stages", "stage_overrides")  # never inherited


def inherited_keys(
    mine: type[Any],
    theirs: type[Any],
    is_called_job: bool = False,
    has_own_experiment: bool = False,
) -> list[str]:
    """Return the dotted keys of the groups and values that a stage inherits.

    mine, theirs: dataclasses of the settings of the experiment's job and of the stage's job.
    is_called_job: whether the two jobs are the same, even with different kinds of head.
    has_own_experiment: whether the stage names another experiment.
    """
    all_parts = is_called_job and not has_own_experiment
    kinds, keys = fields_of(theirs), []
    for name, kind in fields_of(mine).items():
        if kinds.get(name) != kind or name in OF_THE_RUN:
            continue
        is_group, owner = dataclasses.is_dataclass(kind), _declaring(mine, name)
        if has_own_experiment and kind not in SETTING and owner is not JobConfig:
            continue
        if is_group:
            parts = [] if all_parts else _shared(kind)
            keys += [f"{name}.{part}" for part in parts] or [name]
        elif owner is _declaring(theirs, name):
            parts = [] if all_parts else _shared(owner)
            keys += [name] if name in (parts or [name]) else []
    return keys


def _shared(owner: Any) -> list[str]:
    """Return the fields that stages of other jobs inherit; an empty list means all of them."""
    return list(vars(owner).get("SHARED", ()))


def _declaring(schema: type[Any], name: str) -> type[Any]:
    """Return the dataclass that declares a field: the schema or one of its base classes."""
    return next(owner for owner in schema.__mro__ if name in vars(owner).get("__annotations__", {}))

"""Which settings of an experiment a stage inherits.

A stage inherits every key that the same dataclass declares in its job's settings and in the
experiment's, or of that dataclass what its `SHARED` names; a stage of the called job itself
inherits all keys. A stage with an experiment of its own (`+experiment=`) takes from there what it
does, and inherits where and on what: the groups in `SETTING`, and what every job shares.
"""

import dataclasses
from typing import Any

from jobs.config import SETTING, JobConfig, fields_of

OF_THE_RUN = ("output_dir", "stages", "stage_overrides")  # which each stage has for itself


def inherited_keys(
    mine: type[Any],
    theirs: type[Any],
    is_called_job: bool = False,
    has_own_experiment: bool = False,
) -> list[str]:
    """Return the dotted keys of the groups and values that a stage inherits.

    mine, theirs: the settings of the experiment's job, and of the stage's. is_called_job: they are
    one job, though perhaps of two kinds of head.
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
    """The fields of a dataclass that stages of other jobs inherit; empty: all."""
    return list(vars(owner).get("SHARED", ()))


def _declaring(schema: type[Any], name: str) -> type[Any]:
    """The dataclass that a field is written in: the schema, or one that it extends."""
    return next(owner for owner in schema.__mro__ if name in vars(owner).get("__annotations__", {}))

"""Configurations of jobs from overrides, as a command line gives them."""

from copy import deepcopy
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from omegaconf import DictConfig, OmegaConf

from jobs.composing import CONF, compose_job
from jobs.config import typed
from jobs.schemas import schema_of


def configuration(job: str, *overrides: str) -> Any:
    """Return the typed configuration of `python -m JOB OVERRIDES`.

    Hydra takes longer than many jobs of tests, so each choice of files is composed once; values of
    keys are set in a copy.
    """
    files, values = [], []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        is_file = (CONF / override.key_or_group).is_dir()
        is_value = override.type == OverrideType.CHANGE and not is_file
        (values if is_value else files).append(override)
    composed = deepcopy(_composed(job, tuple(str(one.input_line) for one in files)))
    for one in values:
        OmegaConf.update(composed, one.key_or_group, one.value())
    return typed(composed, schema_of(job, overrides))


@cache
def _composed(job: str, overrides: tuple[str, ...]) -> DictConfig:
    return compose_job(job, schema_of(job, overrides), overrides)

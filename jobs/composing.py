"""Composition of a job's configuration from conf/ and overrides, by Hydra."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobs.paths import data_folder
from jobs.syntax import composition_error

CONF = data_folder("conf")


def translate_errors(action: Callable[[], Any]) -> Any:
    """Call a function that composes a configuration, and return its result.

    Raises UserError for the errors of Hydra, OmegaConf and YAML.
    """
    try:
        return action()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise composition_error(error) from error


def register(job: str, schema: type[Any]) -> None:
    """Register a schema's fields and defaults with Hydra, as plain values.

    `typed` checks keys and types after all files are merged, and suggests the nearest key.
    """
    fields = _plain_fields(schema)  # type: ignore[arg-type]  # classes are hashable
    ConfigStore.instance().store(name=f"{job.replace('.', '_')}_defaults", node=fields)


@cache
def _plain_fields(schema: type[Any]) -> Any:
    """Return the fields and defaults of a schema. Reading a dataclass takes OmegaConf 30 ms."""
    return OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(schema)))


def compose_job(job: str, schema: type[Any], overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of `python -m JOB OVERRIDES`.

    Raises UserError for overrides and files that do not compose.
    """
    register(job, schema)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        found = translate_errors(lambda: compose(job.replace(".", "_"), list(overrides)))
    assert isinstance(found, DictConfig)
    return found

"""Overrides with which a job's command line gives a configuration."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from jobs.composing import compose_job
from jobs.schemas import schema_of
from jobs.syntax import quoted

# strings that Hydra reads as such without quotes
_BARE = re.compile(
    r"(?!(?:null|true|false|yes|no|on|off|nan|inf)$)[A-Za-z_/][\w./@-]*", re.IGNORECASE
)


def overrides_of(job: str, config: Mapping[str, Any]) -> list[str]:
    """Return the overrides that turn the defaults of a job into a configuration.

    config: plain values of the job's fields, as in a run folder's config.yaml.
    """
    defaults: Any = OmegaConf.to_container(compose_job(job, schema_of(job), []), resolve=True)
    return [f"{key}={text}" for key, text in _differences(config, defaults, "")]


def _differences(
    config: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values differ, with the values as written in an override."""
    for name, value in config.items():
        default = defaults[name]
        if isinstance(value, Mapping) and isinstance(default, Mapping) and {*value} == {*default}:
            yield from _differences(value, default, f"{prefix}{name}.")
        elif value != default:
            new = "++" if isinstance(value, Mapping) else ""  # its keys may be new
            yield f"{new}{prefix}{name}", _written(value)


def _written(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}: {_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) else quoted(value)
    return json.dumps(value)

"""Composition of a job's configuration from conf/ and overrides, by Hydra."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from jobs.config import structured
from jobs.paths import data_folder
from jobs.syntax import composition_error, quoted

CONF = data_folder("conf")
SEARCH_PATH = "hydra.searchpath"


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
    """Return the fields and defaults of a schema as plain values."""
    return OmegaConf.create(OmegaConf.to_container(structured(schema)))  # type: ignore[arg-type]


def compose_job(job: str, schema: type[Any], overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of `python -m JOB OVERRIDES`.

    Raises UserError for overrides and files that do not compose.
    """
    register(job, schema)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        found = translate_errors(lambda: compose(job.replace(".", "_"), list(overrides)))
    assert isinstance(found, DictConfig)
    return found


def search_folders(overrides: Sequence[str]) -> list[Path]:
    """Return the folders of a command line's `hydra.searchpath=[...]`, searched after conf/.

    Invalid overrides give none, since composing reports them.
    """
    given = [one for one in overrides if one.startswith(f"{SEARCH_PATH}=")]
    try:
        found: Any = OverridesParser.create().parse_overrides(given[-1:])
    except HydraException:
        return []
    values = found[0].value() if found else []
    return [_folder_of(str(one)) for one in values] if isinstance(values, list) else []


def _folder_of(source: str) -> Path:
    """Return the folder of an entry of Hydra's search path: file://FOLDER, FOLDER or pkg://NAME."""
    scheme, separator, rest = source.partition("://")
    if scheme == "pkg" and separator:
        return Path(str(files(rest.replace("/", "."))))
    return Path(rest if separator else scheme)


def keep_search_path(composed: DictConfig, folders: Sequence[str]) -> None:
    """Store Hydra's search path in a composed configuration, for its stages and its sweep.

    Hydra removes its own settings from what it composes, and `typed` ignores them.
    """
    if folders:
        with open_dict(composed):
            composed.hydra = {"searchpath": [*folders]}


def explain_missing(composed: DictConfig, choices: Mapping[str, str | None]) -> str:
    """Return the comments of the chosen files that leave a missing value open (`???`), or "".

    choices: group -> the file that is chosen in it, such as benchmark -> gsm8k.
    """
    missing, found = OmegaConf.missing_keys(composed), ""
    for group, choice in choices.items():
        file = CONF / group / f"{choice}.yaml"
        if not any(key.startswith(f"{group}.") for key in missing) or not file.is_file():
            continue
        if {f"{group}.{key}" for key in OmegaConf.missing_keys(OmegaConf.load(file))} & missing:
            lines = file.read_text("utf-8").splitlines()
            comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
            found += f" {group}={choice}: " + " ".join(line.lstrip("# ") for line in comment)
    return found


def search_path_overrides(composed: DictConfig) -> list[str]:
    """Return the override for the stored search path of a configuration, or an empty list."""
    found = OmegaConf.select(composed, SEARCH_PATH)
    return [f"{SEARCH_PATH}=[{','.join(quoted(one) for one in found)}]"] if found else []

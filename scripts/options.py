"""Options of a script as `KEY=VALUE` arguments: the fields of a dataclass."""

from collections.abc import Sequence
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf

from jobs.config import plain, typed
from jobs.help import field_docs

Schema = TypeVar("Schema")


def read_options(schema: type[Schema], arguments: Sequence[str]) -> Schema:
    """Return the options of `KEY=VALUE` arguments. Raises UserError for unknown ones."""
    given = OmegaConf.from_cli(list(arguments))
    assert isinstance(given, DictConfig)
    return typed(given, schema)


def describe_options(docstring: str | None, schema: type) -> str:
    """Return a script's docstring, and every option with its default and meaning."""
    defaults = plain(schema())
    lines = [
        f"  {f'{key}={str(defaults[key]).lower()}':<18}  {doc}"
        for key, doc in field_docs(schema).items()
    ]
    return "\n".join([(docstring or "").strip(), "", "Options, with their defaults:", *lines])

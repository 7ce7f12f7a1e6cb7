"""Options of a script as `KEY=VALUE` arguments: the fields of a dataclass."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf

from jobs.config import plain, typed
from jobs.help import field_docs
from scripts.usage import run_script, show_usage

Schema = TypeVar("Schema")


def read_options(schema: type[Schema], arguments: Sequence[str]) -> Schema:
    """Return the options of `KEY=VALUE` arguments. Raises UserError for unknown ones."""
    given = OmegaConf.from_cli(list(arguments))
    assert isinstance(given, DictConfig)
    return typed(given, schema)


def describe_options(docstring: str | None, schema: type) -> str:
    """Return a script's docstring, and every option with its default and meaning."""
    docs = field_docs(schema)
    lines = [
        f"  {f'{key}={str(value).lower() if isinstance(value, bool) else value}':<32}  {docs[key]}"
        for key, value in plain(schema()).items()
    ]
    title = "Options, as KEY=VALUE, with their defaults:"
    return "\n".join([(docstring or "").strip(), "", title, *lines])


def run_with_options(run: Callable[[Schema], str], schema: type[Schema], docs: str | None) -> None:
    """Run a script with the options on the command line, and print the line that it returns.

    docs: the script's docstring, which --help prints with the options. A user error ends the
    script with one line.
    """
    show_usage(describe_options(docs, schema))
    run_script(lambda: print(run(read_options(schema, sys.argv[1:]))))

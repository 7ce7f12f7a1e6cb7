"""`--help` of every job: its purpose, its usage, and each setting with its value and meaning.

The values take the command line into account: `+experiment=smoke --help` shows the values of that
experiment. The meanings are the comments on the fields of the dataclasses.
"""

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from jobs.composing import CONF, compose_job
from jobs.config import fields_of

EXPERIMENT = "+experiment="


def field_docs(schema: type[Any], prefix: str = "") -> dict[str, str]:
    """Return dotted key -> the comment on its field, nested fields included, in order."""
    comments = {
        name: text
        for owner in reversed(schema.__mro__)
        if dataclasses.is_dataclass(owner)
        for name, text in _comments(owner).items()
    }
    docs: dict[str, str] = {}
    for name, kind in fields_of(schema).items():
        if dataclasses.is_dataclass(kind):
            docs |= field_docs(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            docs[prefix + name] = comments.get(name, "")
    return docs


def print_help(job: str, schema: type[Any], overrides: list[str]) -> None:
    """Print the help of `job`, with the values of its settings under `overrides`."""
    composed = compose_job(job, schema, overrides)
    console = Console(highlight=False, markup=False)
    groups = list(_groups(job, schema))
    experiments = "[+experiment=NAME] " if groups[0][0] == EXPERIMENT else ""
    console.print(
        f"{' '.join((schema.__doc__ or '').split())}\n\n"
        f"Usage: python -m {job} {experiments}[KEY=VALUE ...] [GROUP=NAME ...]\n"
        "  -m with several values (KEY=1,2,4) runs one job per value; dry_run=true prints what a "
        "run would cost",
        soft_wrap=True,
    )
    keys = []
    for key, doc in field_docs(schema).items():
        value = OmegaConf.select(composed, key, throw_on_missing=False)
        missing = value is None and OmegaConf.is_missing(composed, key)
        keys.append((f"{key}={'(required)' if missing else _written(value)}", doc))
    for title, rows in (("Groups (conf/)", groups), ("Keys, with their values and meanings", keys)):
        console.print(f"\n{title}:", style="bold")
        table = Table.grid(padding=(0, 2))
        # "fold" breaks what is longer than its column, where the default cuts it
        table.add_column(max_width=console.width // 2, overflow="fold")
        table.add_column(overflow="fold")
        for name, text in rows:
            table.add_row(f"  {name}", text)
        console.print(table)


def _groups(job: str, schema: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield each group of the job as written on a command line, and the names of its files."""
    fields = fields_of(schema)
    for folder in sorted(path for path in CONF.iterdir() if path.is_dir()):
        files = sorted(folder.glob("*.yaml"))
        name = f"{folder.name}=" if folder.name in fields else ""
        if folder.name == "experiment":
            name = EXPERIMENT
            files = [file for file in files if f"job: {job}\n" in file.read_text()]
        elif folder.name == "drafter":  # drafters for decoding are a list, or one mapping
            is_mapping = typing.get_origin(fields.get("drafter")) is dict
            name = "drafter={use: NAME}" if is_mapping else "drafters=[NAME]"
            name = name if is_mapping or "drafters" in fields else ""
        if name and files:  # some jobs occur only as stages of other jobs' experiments
            yield name, ", ".join(file.stem for file in files)


def _written(value: Any) -> str:
    """Return a value as text."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _comments(owner: type[Any]) -> dict[str, str]:
    """Return field name -> its comment, on its definition's last line or on the lines above."""
    lines = textwrap.dedent(inspect.getsource(owner)).splitlines()
    definition = ast.parse("\n".join(lines)).body[0]
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _, _, trailing = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")
            above = takewhile(
                lambda line: line.startswith("    # "), reversed(lines[: node.lineno - 1])
            )
            text = trailing or " ".join(reversed([line.lstrip(" #") for line in above]))
            found[node.target.id] = text
    return found

"""`--help` of every job: its purpose, its usage, and each setting with its value and meaning.

Values are those of the given command line: `+experiment=smoke --help` shows the values of that
experiment. The descriptions are the comments on the fields in the code.
"""

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

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


def print_help(job: str, schema: type[Any], conf: Path, overrides: list[str]) -> None:
    """Print the help of `job` with the values that `overrides` give."""
    with initialize_config_dir(str(conf), version_base="1.3"):
        composed = compose(job.replace(".", "_"), overrides)
    console = Console(highlight=False, markup=False)
    about = " ".join((schema.__doc__ or "").split())
    groups = list(_groups(job, schema, conf))
    experiments = "[+experiment=NAME] " if groups[0][0] == EXPERIMENT else ""
    console.print(
        f"{about}\n\nUsage: python -m {job} {experiments}[KEY=VALUE ...] [GROUP=NAME ...]",
        soft_wrap=True,
    )
    console.print(
        "  -m with several values (KEY=1,2,4) runs one job per value; dry_run=true prints what a "
        "run would cost",
        soft_wrap=True,
    )
    console.print("\nGroups (conf/):", style="bold")
    shown_groups = Table.grid(padding=(0, 2))
    for called, names in groups:
        shown_groups.add_row(f"  {called}", ", ".join(names))
    console.print(shown_groups)
    console.print("\nKeys, with their values and meanings:", style="bold")
    keys = Table.grid(padding=(0, 2))
    for key, doc in field_docs(schema).items():
        value = OmegaConf.select(composed, key, throw_on_missing=False)
        shown = (
            "(required)" if value is None and OmegaConf.is_missing(composed, key) else _short(value)
        )
        keys.add_row(f"  {key}={shown}", doc)
    console.print(keys)


def _groups(job: str, schema: type[Any], conf: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each group that the job takes, as it is written on a command line, with its files."""
    fields = fields_of(schema)
    # Drafters for decoding are a list, or one mapping.
    decodes = (
        "drafters=[NAME]"
        if "drafters" in fields
        else "drafter={use: NAME}"
        if typing.get_origin(fields.get("drafter")) is dict
        else ""
    )
    for folder in sorted(path for path in conf.iterdir() if path.is_dir()):
        texts = {file.stem: file.read_text() for file in sorted(folder.glob("*.yaml"))}
        if folder.name == "experiment":
            found = [name for name, text in texts.items() if f"job: {job}\n" in text]
            if found:  # some jobs only occur as stages of others' experiments
                yield EXPERIMENT, found
        elif folder.name == "drafter":
            if decodes:
                yield decodes, list(texts)
        elif folder.name in fields:
            yield f"{folder.name}=", list(texts)


def _short(value: Any) -> str:
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    if value is None:
        return "null"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 30 else text[:27] + "..."


def _comments(owner: type[Any]) -> dict[str, str]:
    """Return field name -> its comment, on its definition's last line or on the lines above."""
    source = textwrap.dedent(inspect.getsource(owner))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokens
        if token.type == tokenize.COMMENT
    }
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    taken: set[int] = set()  # lines whose comment belongs to the field on them
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while (
                node.end_lineno not in by_line and first - 1 in by_line and first - 1 not in taken
            ):
                first -= 1
            above = " ".join(by_line[line] for line in range(first, node.lineno))
            found[node.target.id] = by_line.get(node.end_lineno or 0, above)
            taken.add(node.end_lineno or 0)
    return found

"""Commands of scripts in the guides and in the scripts' own docstrings: their options exist."""

import ast
import importlib
import re
import shlex
from typing import Any

import pytest
from omegaconf import OmegaConf

from decoding.errors import UserError
from jobs.config import plain, typed
from tests.test_readme import ROOT, joined

SCRIPTS = {
    str(path.relative_to(ROOT)): reads[1]
    for path in sorted((ROOT / "scripts").rglob("*.py"))
    if (reads := re.search(r"= (?:common\.)?read_options\((\w+)", path.read_text()))
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """Return the commands of SCRIPTS in the guides and in docstrings, each from the script on."""
    texts = [page.read_text() for page in PAGES]
    for path in SCRIPTS:
        texts.append(ast.get_docstring(ast.parse((ROOT / path).read_text())) or "")
    found = {
        match.partition(" #")[0].strip()
        for text in texts
        for match in re.findall(r"(scripts/[\w/]+\.py(?: +[^`\n|]*)?)", joined(text))
        if "=" in match
    }
    return sorted(command for command in found if command.split()[0] in SCRIPTS)


def read(command: str) -> Any:
    """Return the options of a command. Raises UserError for an unknown one and for a bad value."""
    path, *words = shlex.split(command.replace("=...", "=OTHER"))
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    schema = getattr(module, SCRIPTS[path])
    given = OmegaConf.from_cli([word for word in words if "=" in word])
    return typed(OmegaConf.merge(OmegaConf.create(plain(schema())), given), schema)  # type: ignore[arg-type]


def test_every_command_of_a_script_has_its_options() -> None:
    assert len(SCRIPTS) > 15
    assert len(commands()) > 15
    for command in commands():
        read(command)


def test_an_option_that_no_script_has_is_found() -> None:
    with pytest.raises(UserError, match="drafer"):
        read("scripts/bench/server.py target=MODEL drafer=FOLDER")
    with pytest.raises(UserError, match="rounds"):
        read("scripts/bench/server.py target=MODEL rounds=many")

"""What a stranger types: options of scripts, extras and Python examples in the guides exist."""

import ast
import importlib
import re
import shlex
import textwrap
import tomllib
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


def test_every_extra_that_is_installed_exists() -> None:
    """Check `pip install -e '.[NAME]'`, the one form: the project is installed from a clone."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [page.read_text() for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]]
    named = {
        name
        for text in texts
        for names in re.findall(r"[ '\"]\.\[([a-z,]+)\]", text)
        for name in names.split(",")
    }
    assert {"server", "web", "gguf"} <= named
    assert not [text for text in texts if "shallow-draft[" in text], "another form"
    assert named <= extras["optional-dependencies"].keys()


def imports_in(code: str) -> list[tuple[str, str]]:
    """Return (module, name) of what a piece of code imports from this project's packages.

    Raises SyntaxError for code that Python cannot read.
    """
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    return [
        (node.module, one.name)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in packages
        for one in node.names
    ]


def test_every_python_example_can_be_read_and_finds_its_imports() -> None:
    examples = [
        textwrap.dedent(code)
        for page in PAGES
        for code in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.S | re.M)
    ]
    imported = [found for code in examples for found in imports_in(code)]
    assert len(examples) > 3 and imported
    for module, name in imported:
        assert hasattr(importlib.import_module(module), name), f"from {module} import {name}"
    with pytest.raises(SyntaxError):
        imports_in("from decoding import (")

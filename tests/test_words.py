"""Words of code, scripts, configurations and documents: avoided phrases, doubled full stops."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from decoding.errors import without_stop

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("decoding", "jobs", "training", "distill", "recurrent_drafting", "heads", "serving")
FOLDERS = (*PACKAGES, "eval", "scripts", "conf", "docs", "examples")
FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
SUFFIXES = {".py", ".sh", ".yaml", ".md", ".j2"}
PHRASES = re.compile(
    r"\b(hangs?\s+on|(is|are)\s+told|stands?\s+(in|beside|behind)|dearer|foretells?"
    r"|foretold|so\s+many\s+of)\b",
    re.IGNORECASE,
)


def offences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the phrase of every match; a phrase may span two lines."""
    for match in PHRASES.finditer(re.sub(r"\n[ #>]*", lambda gap: gap[0].replace("#", " "), text)):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split())


def test_avoided_phrases_are_absent() -> None:
    paths = [ROOT / name for name in FILES]
    for folder in FOLDERS:
        found = (ROOT / folder).rglob("*")
        paths += sorted(path for path in found if path.suffix in SUFFIXES and path.is_file())
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {phrase}"
        for path in paths
        for line, phrase in offences(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def test_control_an_avoided_phrase_is_found() -> None:
    assert [*offences("# The length hangs\n    # on the costs.")] == [(1, "hangs on")]
    assert not [*offences("The length depends on the costs.")]


# Full stops of other people's sentences -----------------------------------------------------


def bare_exceptions(source: str) -> Iterator[int]:
    """Yield the lines of f-strings that put a full stop straight after a caught exception.

    Its words may end with one: see `decoding.errors.without_stop`.
    """
    for handler in ast.walk(ast.parse(source)):
        if not isinstance(handler, ast.ExceptHandler):
            continue
        for text in ast.walk(handler):
            if not isinstance(text, ast.JoinedStr):
                continue
            for value, after in pairwise(text.values):
                inner = value.value if isinstance(value, ast.FormattedValue) else None
                is_bare = isinstance(inner, ast.Name) and inner.id == handler.name
                if is_bare and isinstance(after, ast.Constant) and after.value.startswith("."):
                    yield value.lineno


def test_no_full_stop_follows_an_exceptions_own() -> None:
    paths = [path for folder in (*PACKAGES, "eval") for path in (ROOT / folder).rglob("*.py")]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(paths)
        for line in bare_exceptions(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def test_control_a_bare_exception_is_found() -> None:
    source = "try: f()\nexcept ValueError as error:\n    print(f'no: {}. Try again')"
    assert [*bare_exceptions(source.replace("{}", "{error}"))] == [3]
    assert not [*bare_exceptions(source.replace("{}", "{without_stop(error)}"))]


@pytest.mark.parametrize(
    ("words", "left"), [("It ended.", "It ended"), ("and so on...", "and so on..."), ("no", "no")]
)
def test_one_full_stop_is_removed(words: str, left: str) -> None:
    assert without_stop(ValueError(words)) == left

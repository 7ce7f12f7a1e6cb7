"""Avoided phrases are absent from code, scripts, configurations and documents."""

import re
from collections.abc import Iterator
from pathlib import Path

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

"""The log of experiments: complete headers, a current index, and links that resolve."""

import re

import pytest

from scripts.experiments_index import FOLDER, ROOT, index_files, read_experiment, read_experiments

NUMBER = r"[-+−]?\d[\d,]*(?:\.\d+)?"
# a figure and its interval: 1.24x [1.19, 1.30]
INTERVAL = re.compile(
    rf"({NUMBER})\s*(?:x|%|ms|×)?\**\s*\[({NUMBER})(?:x| %)?,\s*({NUMBER})(?:x| %)?\](?!\()"
)
PAGES = [*sorted(FOLDER.glob("*.md")), ROOT / "LOG.md", ROOT / "docs" / "benchmarks.md"]


def test_the_index_is_current():
    for path, text in index_files().items():
        assert path.read_text("utf-8") == text, f"{path}: run python scripts/experiments_index.py"


def test_every_header_is_complete():
    for experiment in read_experiments():
        assert all(experiment.fields.values()), experiment.path


def test_an_incomplete_header_is_refused(tmp_path):
    path = tmp_path / "2026-11-21-topic.md"
    path.write_text("# Title\n\n- **Question:** why?\n\nText.\n")
    with pytest.raises(ValueError, match="the header has Question; expected"):
        read_experiment(path)


def test_every_link_resolves():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+?)\)", page.read_text("utf-8")):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page}: {link}"


def test_a_superseding_experiment_is_not_older():
    for experiment in read_experiments():
        for newer in re.findall(r"\]\((\S+?)\)", experiment.fields["Superseded by"]):
            assert newer[:10] >= experiment.date, experiment.path


def outside(text: str) -> list[str]:
    """Return the figures of a text that lie outside of their intervals."""
    found = []
    for match in INTERVAL.finditer(text):
        x, low, high = (float(one.replace("−", "-").replace(",", "")) for one in match.groups())
        if not low <= x <= high:
            found.append(match[0])
    return found


def test_every_figure_lies_in_its_interval():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    texts = {page: page.read_text("utf-8") for page in pages}
    assert sum(len(INTERVAL.findall(text)) for text in texts.values()) > 1000
    assert {page: wrong for page, text in texts.items() if (wrong := outside(text))} == {}


def test_a_figure_outside_of_its_interval_is_found():
    right = "1.24x [1.19, 1.30], **0.61** [0.60,\n0.62], −3 % [−5 %, 1 %], 1,200 [900, 1,300]"
    assert outside(right) == []
    for wrong in ("1.24x [1.25, 1.30]", "**0.63** [0.60, 0.62]", "−6 % [−5 %, 1 %]", "3 [2, 1]"):
        assert outside(f"{right} and {wrong}.") == [wrong.replace("**0", "0")]

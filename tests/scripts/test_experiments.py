"""The log of experiments: complete headers, a current index, and links that resolve."""

import re

import pytest

from scripts.experiments_index import FOLDER, ROOT, index_files, read_experiment, read_experiments

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

"""Test the part journal: a stopped benchmark continues, and paired intervals are Student's."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scripts.bench.part_journal import PartJournal, paired


@dataclass
class Options:
    steps: int = 10
    seeds: list[int] = field(default_factory=lambda: [0, 1])
    work: str = ""
    name: str = "toy"


def journal(work: Path, **given: object) -> PartJournal:
    return PartJournal(str(work), Options(**given), ("seeds",))  # type: ignore[arg-type]


def test_parts_measured_by_other_code_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Check that figures measured by other code are kept, with a note of that code's revision.

    Only the reader can judge whether the change matters.
    """
    monkeypatch.setattr("scripts.bench.part_journal.git_revision", lambda: "old")
    journal(tmp_path).figures({"seed": 0}, lambda: {"alpha": 0.5})
    assert journal(tmp_path).revisions() == ["old"]
    assert "other code" not in capsys.readouterr().err
    monkeypatch.setattr("scripts.bench.part_journal.git_revision", lambda: "new")
    journal(tmp_path).figures({"seed": 1}, lambda: {"alpha": 0.6})
    assert "note: some with other code: old" in capsys.readouterr().err
    assert journal(tmp_path).revisions() == ["new", "old"]


def test_a_finished_part_is_not_measured_again(tmp_path: Path):
    measured: list[int] = []

    def measure(seed: int) -> dict[str, object]:
        if seed == 2:
            raise KeyboardInterrupt
        measured.append(seed)
        return {"alpha": seed / 10, "by_temperature": {0: 1}}

    first = journal(tmp_path)
    found = first.figures({"seed": 0}, lambda: measure(0))
    with pytest.raises(KeyboardInterrupt):
        first.figures({"seed": 2}, lambda: measure(2))
    again = journal(tmp_path, seeds=[0, 1, 2], name="other")
    assert (
        again.figures({"seed": 0}, lambda: measure(0))
        == found
        == {"alpha": 0.0, "by_temperature": {"0": 1}}
    )
    again.figures({"seed": 1}, lambda: measure(1))
    assert measured == [0, 1]
    assert [part["seed"] for part, _ in again.all()] == [0, 1], "without the interrupted part"


def test_other_settings_have_another_journal(tmp_path: Path):
    journal(tmp_path).figures({"seed": 0}, lambda: {"alpha": 0.5})
    assert journal(tmp_path, seeds=[7]).all()
    assert not journal(tmp_path, steps=11).all()


def test_the_paired_interval_is_by_students_t():
    """Check the interval of differences 1, 2, 3 (mean 2, deviation 1), with t(0.975, 2) = 4.3027.

    A seed with figures on one side only is ignored, and a single pair has no interval.
    """
    found = paired({"0": 2.0, "1": 4.0, "2": 6.0, "3": 9.0}, {"0": 1.0, "1": 2.0, "2": 3.0})
    assert (found["difference"], found["seeds"]) == (pytest.approx(2), 3)
    assert found["low"] == pytest.approx(2 - 4.3027 / 3**0.5, abs=1e-4)
    assert paired({"0": 2.0}, {"0": 1.0}) == {
        "difference": 1.0,
        "low": None,
        "high": None,
        "seeds": 1,
    }
    assert paired({}, {"0": 1.0})["seeds"] == 0

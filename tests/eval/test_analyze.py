"""`eval.analyze` on output files of the published demo and on traces, checked by hand."""

from pathlib import Path

import pytest

from decoding.errors import UserError
from eval.analyze import Analyzed, lines, read
from eval.logged.traces import rounds_of_trace


def totals(path: Path, *rows: str) -> Path:
    path.write_text(
        "".join(f"tensor([{row}], device='cuda:0', dtype=torch.int32)\n" for row in rows)
    )
    return path


def test_a_published_file_is_analyzed(tmp_path: Path) -> None:
    """Check by hand: prompts of rounds 3, 2, 5 and 1, 4, where a round has at most 5 tokens."""
    path = totals(tmp_path / "out.txt", "3", "5", "10", "1", "5")
    (found,) = read(path, 4)
    assert [one.emitted for one in found.outputs] == [[3, 2, 5], [1, 4]]
    text = "\n".join(lines(found))
    assert "Average tokens matched per prompt: 3.33, 2.50" in text
    assert "Average tokens matched per dataset: 3.0000" in text
    assert "accepted drafts: 2.0000 a round" in text and "drafted: 66.7%" in text
    # tested 5, 4, 3, 2 and accepted 4, 3, 2, 1 at depths 1 to 4
    assert "alpha: 0.7143; by depth 0.80 0.75 0.67 0.50 (if every round drafted 4 tokens" in text
    # differences 2, 5, 1 (a new prompt), 4, and the last one again
    assert "the published script prints 3.2000 for the dataset" in text
    (unknown,) = read(path)
    assert "not known without the draft length" in "\n".join(lines(unknown))


def test_rows_of_a_batch_are_apart(tmp_path: Path) -> None:
    (found,) = read(totals(tmp_path / "out.txt", "3, 1", "5, 4", "2, 2"))
    assert [one.emitted for one in found.outputs] == [[3, 2], [1, 3], [2], [2]]


def test_a_round_of_more_tokens_than_the_draft_length_allows_is_refused(tmp_path: Path) -> None:
    path = totals(tmp_path / "out.txt", "1", "3", "8", "10")
    assert [one.emitted for one in read(path, 4)[0].outputs] == [[1, 2, 5, 2]]
    with pytest.raises(UserError, match=r"out.txt:3: found a round of 5 tokens, expected 1 to 3"):
        read(path, 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "out.txt holds no tensors, expected the running totals"),
        ("tensor([3])\nHello", "out.txt:2: found 'Hello', expected the running totals"),
        ("tensor([3])\ntensor([4, 5])", "out.txt:2: found 2 totals, expected 1, as in the first"),
        ("tensor([0])\ntensor([4])", "out.txt:1: found a round of 0 tokens"),
        ("tensor([a])", "out.txt:1: found 'a'"),
    ],
)
def test_a_malformed_output_file_is_refused_with_its_line(
    content: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "out.txt").write_text(content)
    with pytest.raises(UserError, match=words):
        read(tmp_path / "out.txt")


def test_an_output_file_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_bytes(b"tensor([3])\ntensor([\xff])\n")
    with pytest.raises(UserError, match=r"out.txt:2: found bytes that are not UTF-8, expected the"):
        read(tmp_path / "out.txt")


def test_the_last_round_of_an_output_may_lack_the_bonus() -> None:
    """Check by hand: rounds of 3, 1 and 2 tokens, the last of drafts alone; then one of 4."""
    outputs = [rounds_of_trace(trace) for trace in ("110011", "1110")]
    text = "\n".join(lines(Analyzed("cut", 3, outputs)))
    assert "per dataset: 2.5000" in text  # 10 tokens in 4 rounds
    assert "accepted drafts: 1.7500 a round; the target's own token, the bonus: 0.7500" in text
    outputs[0] = rounds_of_trace("110010")
    text = "\n".join(lines(Analyzed("control", 3, outputs)))
    assert "accepted drafts: 1.5000 a round; the target's own token, the bonus: 1.0000" in text


def test_a_drafter_that_is_never_right_has_an_average_of_one() -> None:
    """Check what the published average hides: the target's own token."""
    found = Analyzed("never", 4, [rounds_of_trace("0" * 9)], [[9]], [[0]])
    text = "\n".join(lines(found))
    assert "per dataset: 1.0000" in text and "accepted drafts: 0.0000" in text

"""Test that an interrupted or killed run resumes to the same bytes, and that ranks share a run."""

import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from decoding.errors import UserError
from distill.regenerate.resume import Journal, read_journal
from jobs.run_files import read_journal_lines
from tests.support.regeneration import (
    CHATS,
    configured,
    metrics,
    regenerated,
    run,
    start,
    wait_for_answers,
    with_stops,
    write_chats,
)
from tests.support.tiers import tiered

MANY = [{**chat, "id": f"{chat['id']} {n}"} for n in range(8) for chat in CHATS]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    folder = tmp_path_factory.mktemp("regenerate_resume")
    with_stops(tiny_target, folder / "target")
    write_chats(folder / "chats.jsonl", MANY)
    return folder


@pytest.fixture(scope="module")
def straight(home: Path) -> Path:
    regenerated(home / "target", home / "chats.jsonl", home / "straight")
    return home / "straight"


def interrupted(straight: Path, folder: Path, size_bytes: int) -> Path:
    """Copy an uninterrupted run as if it was killed with `size_bytes` bytes in its journal.

    Returns the path of the journal.
    """
    shutil.copytree(straight, folder)
    (folder / "chats.json").unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "finished": False}))
    journal = folder / "answers" / "rank_0.jsonl"
    os.truncate(journal, size_bytes)
    return journal


@pytest.mark.parametrize("share", tiered([0.0, 0.031, 0.4, 0.77, 0.999, 1.0], [0.031, 0.77]))
def test_a_run_resumes_from_any_byte_of_its_journal(
    share: float, home: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    content = (straight / "answers" / "rank_0.jsonl").read_bytes()
    size = int(share * len(content))
    journal = interrupted(straight, tmp_path / "run", size)
    kept = content[: content.rfind(b"\n", 0, size) + 1]
    run(configured(home / "target", home / "chats.jsonl", tmp_path / "run"))
    assert (tmp_path / "run" / "chats.json").read_bytes() == (straight / "chats.json").read_bytes()
    assert journal.read_bytes().startswith(kept), "complete lines are not written again"
    asked = [(line["chat"], line["sample"], line["turn"]) for line in read_journal(journal)]
    assert len(asked) == len(set(asked)) == content.count(b"\n")
    assert ("is cut off" in capsys.readouterr().out) == (size > len(kept))


def test_a_resumed_run_uses_the_answers_in_its_journal(home: Path, straight: Path, tmp_path: Path):
    """Control: an answer changed in the journal appears in the output of the resumed run."""
    journal = interrupted(
        straight, tmp_path / "run", (straight / "answers" / "rank_0.jsonl").stat().st_size
    )
    lines = read_journal(journal)
    assert lines[0]["turn"] == 0
    journal.write_text(json.dumps({**lines[0], "text": "something else"}) + "\n")
    run(configured(home / "target", home / "chats.jsonl", tmp_path / "run"))
    records = {
        record["id"]: record for record in json.loads((tmp_path / "run" / "chats.json").read_text())
    }
    changed = records[MANY[lines[0]["chat"]]["id"]]["conversations"]
    assert "something else" in [turn["value"] for turn in changed]


def test_a_finished_run_is_skipped_and_a_missing_output_written_again(
    home: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    config = configured(home / "target", home / "chats.jsonl", folder)
    run(config)
    assert "finished before" in capsys.readouterr().out
    run(
        configured(home / "target", home / "chats.jsonl", folder, "data.held_out_chats=[more.json]")
    )
    assert "finished before" in capsys.readouterr().out, "it does not read held-out chats"
    (folder / "chats.json").unlink()
    run(config)
    assert (folder / "chats.json").read_bytes() == (straight / "chats.json").read_bytes()


def test_another_configuration_or_input_is_refused(home: Path, straight: Path, tmp_path: Path):
    chats = tmp_path / "chats.jsonl"
    shutil.copy(home / "chats.jsonl", chats)
    regenerated(home / "target", chats, tmp_path / "run", "data.max_samples=3")
    with pytest.raises(
        UserError, match=r"belongs to another configuration; different: temperature"
    ):
        run(
            configured(
                home / "target", chats, tmp_path / "run", "data.max_samples=3", "temperature=0.5"
            )
        )
    manifest = tmp_path / "run" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "finished": False}))
    write_chats(chats, MANY[1:])
    with pytest.raises(UserError, match=r"chats.jsonl has changed since the run started"):
        run(configured(home / "target", chats, tmp_path / "run", "data.max_samples=3"))


def test_a_journal_cuts_off_a_torn_line_and_ignores_a_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append([{"a": 1}, {"a": "\u2028é"}])
    content = path.read_bytes()
    path.write_bytes(content + b'{"a": 3')
    assert read_journal(path) == [{"a": 1}, {"a": "\u2028é"}]
    with Journal(path) as journal:
        journal.append([{"a": 4}])
    assert "incomplete (7 bytes) and is cut off" in capsys.readouterr().out
    assert path.read_bytes().startswith(content) and read_journal(path)[2:] == [{"a": 4}]
    for damage in (
        b"\0\0\0\n" + content,
        content.replace(b'"a": 1', b'"a": 3') + content,
        content + b"\0\0\0\n" + b"[1]\n",
    ):
        path.write_bytes(damage)
        left = read_journal(path)
        assert (
            "journal.jsonl, line " in (words := capsys.readouterr().out)
            and "left out, and its answer" in words
        )
        assert left[-2:] == [{"a": 1}, {"a": "\u2028é"}] and len(left) == damage.count(
            content.splitlines()[1]
        ) + damage.count(content.splitlines()[0])
        with Journal(path):
            pass
        assert read_journal_lines(path, dict).wrong == [] and read_journal(path) == left


def test_every_flipped_bit_of_a_journal_is_detected(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append([{"a": 1, "text": "b"}])
    content = path.read_bytes()
    for place in range(8 * len(content)):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        assert all(set(record) != {"a", "text"} for record in read_journal(path)), (place, changed)


def test_lines_without_a_checksum_are_read(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"a": 1}\n{"a": "é"}\n')
    with Journal(path) as journal:
        journal.append([{"a": 2}])
    assert read_journal(path) == [{"a": 1}, {"a": "é"}, {"a": 2}]


@pytest.mark.parametrize("ending", tiered([signal.SIGKILL, signal.SIGTERM], [signal.SIGKILL]))
def test_a_kill_in_the_middle_changes_nothing(
    ending: signal.Signals, home: Path, straight: Path, tmp_path: Path
):
    folder = tmp_path / "run"
    journal = folder / "answers" / "rank_0.jsonl"
    process = start(home, folder)
    wait_for_answers(process, journal, 5)
    process.send_signal(ending)
    _, words = process.communicate(timeout=60)
    resumable = "interrupted: finished work is kept. Run the same command to continue" in words
    assert resumable == (ending == signal.SIGTERM), words
    before = journal.read_bytes()
    assert (
        5
        <= before.count(b"\n")
        < len((straight / "answers" / "rank_0.jsonl").read_bytes().splitlines())
    )
    assert not (folder / "chats.json").exists()
    run(configured(home / "target", home / "chats.jsonl", folder))
    assert (folder / "chats.json").read_bytes() == (straight / "chats.json").read_bytes()
    assert journal.read_bytes().startswith(before[: before.rfind(b"\n") + 1])


def test_a_signal_ends_a_sweep_with_a_message_of_each_process(home: Path, tmp_path: Path):
    """Check that no further member starts, and that Hydra reports no error of the job."""
    process = start(home, tmp_path, "-m", "seed=0,1", fork_children=True)
    wait_for_answers(process, tmp_path / "seed=0" / "answers" / "rank_0.jsonl", 5)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=60)
    assert process.returncode == 130
    said = [line for line in words.splitlines() if "interrupted" in line]
    assert said[-1] == (
        "interrupted: distill.regenerate was stopped by a signal. Run the same command to continue"
    )
    assert len(said) <= 2 and "Error" not in words, words
    assert not (tmp_path / "seed=1").exists()


@pytest.mark.long
def test_two_ranks_write_the_bytes_of_one_process(home: Path, straight: Path, tmp_path: Path):
    process = start(home, tmp_path, "parallel=ddp", "parallel.processes=2", fork_children=True)
    output, words = process.communicate(timeout=300)
    assert process.returncode == 0, words
    assert (tmp_path / "chats.json").read_bytes() == (straight / "chats.json").read_bytes()
    counts = [len(read_journal(tmp_path / "answers" / f"rank_{rank}.jsonl")) for rank in (0, 1)]
    assert min(counts) > 0 and sum(counts) == len(
        read_journal(straight / "answers" / "rank_0.jsonl")
    )
    # Ranks form other batches, so other caches are available for the next turn of a chat.
    found, expected = metrics(tmp_path), metrics(straight)
    assert 0 < found["read_tokens"] < found["prompt_tokens"]
    hang_on_batches = {"tokens_per_second": 0, "read_tokens": 0}
    assert {**found, **hang_on_batches} == {**expected, **hang_on_batches}
    assert output.count("chats:") >= 1


@pytest.mark.long
def test_a_dead_rank_is_named_and_one_process_finishes_its_work(
    home: Path, straight: Path, tmp_path: Path
):
    process = start(home, tmp_path, "parallel=ddp", "parallel.processes=2")
    wait_for_answers(process, tmp_path / "answers" / "rank_1.jsonl", 3)
    (second,) = [
        child
        for child in psutil.Process(process.pid).children()
        if child.environ().get("RANK") == "1"
    ]
    second.kill()
    _, words = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "rank 1 of 2 was ended by SIGKILL" in words
    assert not (tmp_path / "chats.json").exists()
    run(configured(home / "target", home / "chats.jsonl", tmp_path))
    assert (tmp_path / "chats.json").read_bytes() == (straight / "chats.json").read_bytes()

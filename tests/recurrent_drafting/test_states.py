"""Kept states are those that a forward gives: in memory, on disk, after a kill; and the price is told first."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from decoding.errors import UserError
from recurrent_drafting import states as module
from recurrent_drafting.positions import positions
from recurrent_drafting.states import DiskStore, MemoryStore, Store, TargetStates, states_on_disk
from tests.recurrent_drafting import tiny
from training.packing import PackedData, collate


def data() -> PackedData:
    return PackedData(tiny.samples(), tiny.ROW, 2, 0)


def on_disk(root: Path, judged: bool = True, show: bool = False) -> DiskStore:
    return states_on_disk(root, "hash", data(), tiny.HEADS, judged, tiny.HIDDEN, torch.float64, show)


class Counting(TargetStates):
    """Counts the rows that the target reads."""

    reads = 0

    def _row(self, *given):
        before = self.store.get(given[1].rows[given[2]])
        self.reads += before is None
        return super()._row(*given)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_states_from_a_store_are_those_of_a_forward(kind: str, tmp_path: Path):
    store: Store = MemoryStore(10**6) if kind == "memory" else on_disk(tmp_path)
    target, rows = tiny.target(), data().rows
    online, kept = TargetStates(target), Counting(target, store)
    for _ in range(2):
        batch = collate(data().samples, rows, tiny.ROW)
        where = positions(batch, tiny.HEADS, judged=True)
        torch.testing.assert_close(kept(batch, where), online(batch, where))
        again = collate(data().samples, [[], rows[0]], tiny.ROW)  # a rank without a row among others
        there = positions(again, tiny.HEADS, judged=True)
        torch.testing.assert_close(kept(again, there), online(again, there))
    assert kept.reads == len(rows)


def test_a_store_that_is_full_makes_the_rest_anew():
    target, rows = tiny.target(), data().rows
    kept = Counting(target, MemoryStore(1000))
    batch = collate(data().samples, rows, tiny.ROW)
    where = positions(batch, tiny.HEADS, judged=True)
    for _ in range(2):
        torch.testing.assert_close(kept(batch, where), TargetStates(target)(batch, where))
    assert kept.reads > len(rows)


def test_another_process_finds_the_rows_and_a_damaged_one_is_made_anew(tmp_path: Path):
    target, rows = tiny.target(), data().rows
    batch = collate(data().samples, rows, tiny.ROW)
    where = positions(batch, tiny.HEADS, judged=True)
    TargetStates(target, on_disk(tmp_path))(batch, where)
    second = Counting(target, on_disk(tmp_path))
    second(batch, where)
    assert second.reads == 0
    file = next(tmp_path.glob("*/states.bin"))
    with file.open("r+b") as stream:
        stream.write(b"damaged!")
    third = Counting(target, on_disk(tmp_path))
    torch.testing.assert_close(third(batch, where), TargetStates(target)(batch, where))
    assert third.reads == 1


def test_what_would_change_the_states_gets_a_folder_of_its_own(tmp_path: Path):
    on_disk(tmp_path)
    on_disk(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    on_disk(tmp_path, judged=False)
    states_on_disk(tmp_path, "another target", data(), tiny.HEADS, True, tiny.HIDDEN, torch.float64, False)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_price_is_told_before_the_room_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    store = on_disk(tmp_path / "states", show=True)
    said = capsys.readouterr().out
    batch = collate(data().samples, data().rows, tiny.ROW)
    count = len(positions(batch, tiny.HEADS, judged=True).kept_P)
    assert f"states: {count:,} of {data().tokens:,} positions" in said
    assert "GB on disk in" in said
    assert store._bytes.numel() == count * tiny.HIDDEN * 8
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"states.bin needs .* GB, 0.00 GB are free there: give states.folder"):
        on_disk(tmp_path / "full")

"""Stored states equal the states of a forward, in memory, on disk and after a kill."""

import hashlib
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from tests.support import tiny_heads as tiny
from tests.support.model_families import FAMILIES, family
from training.data.packing import PackedData, Sample, collate
from training.features import stores as module
from training.features.states import TargetStates
from training.features.stores import DiskStore, MemoryStore, Store, StoreLayout, states_on_disk
from training.heads.positions import count_kept, positions
from training.objectives import freeze


def data() -> PackedData:
    return PackedData(tiny.samples(), tiny.ROW, 2, 0)


def on_disk(
    root: Path,
    uses_teacher: bool = True,
    show: bool = False,
    tokens: int = 0,
    dtype: torch.dtype = torch.float64,
    target: str = "hash",
) -> DiskStore:
    return states_on_disk(
        root,
        target,
        data(),
        StoreLayout(tiny.HEADS, uses_teacher, tiny.HIDDEN, dtype, tokens),
        lambda mask: count_kept(mask, tiny.HEADS, uses_teacher),
        show,
    )


class Counting(TargetStates):
    """Target states that count the rows that the target reads."""

    reads = 0

    def _row(self, batch, index, *given):
        self.reads += self.store is not None and self.store.get(batch.rows[index]) is None
        return super()._row(batch, index, *given)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_states_from_a_store_are_those_of_a_forward(kind: str, tmp_path: Path):
    store: Store = MemoryStore(10**6) if kind == "memory" else on_disk(tmp_path)
    target, rows = tiny.target(), data().rows
    online, kept = TargetStates(target), Counting(target, store)
    for _ in range(2):
        batch = collate(data().samples, rows, tiny.ROW)
        where = positions(batch, tiny.HEADS, uses_teacher=True)
        torch.testing.assert_close(kept(batch, where), online(batch, where))
        # a rank without a row among others
        again = collate(data().samples, [[], rows[0]], tiny.ROW)
        there = positions(again, tiny.HEADS, uses_teacher=True)
        torch.testing.assert_close(kept(again, there), online(again, there))
    assert kept.reads == len(rows)


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_continuations_are_stored_with_states(kind: str, dtype: torch.dtype, tmp_path: Path):
    store: Store = (
        MemoryStore(10**6)
        if kind == "memory"
        else on_disk(tmp_path, uses_teacher=False, tokens=3, dtype=dtype)
    )
    target, rows = tiny.target(dtype), data().rows
    kept = Counting(target, store)
    for _ in range(2):
        for these in (rows, [[], rows[0]]):
            batch = collate(data().samples, these, tiny.ROW)
            where = positions(batch, tiny.HEADS, uses_teacher=False)
            found, made = (
                kept.continue_greedily(batch, where, 3),
                TargetStates(target).continue_greedily(batch, where, 3),
            )
            assert torch.equal(found[0], made[0]) and torch.equal(found[1], made[1])
            assert found[1].shape == (len(where.kept_P), 3) and found[1].dtype == torch.int64
    assert kept.reads == len(rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_continues_as_it_decodes(name: str):
    """Check that continuations at every position equal greedy decoding of the text so far."""
    model = freeze(family(name))
    native = NativeTarget.from_state(model.config.to_dict(), model.state_dict(), execution="eager")
    samples = tiny.samples()
    batch = tiny.packed(samples)
    where = positions(batch, tiny.HEADS, uses_teacher=False)
    _, said_PK = TargetStates(model).continue_greedily(batch, where, 4)
    said = dict(zip(where.kept_P.tolist(), said_PK.tolist(), strict=True))
    compared = 0
    for number, row in enumerate(batch.rows):
        start = number * tiny.ROW
        for index in row:
            ids = samples[index].ids.tolist()
            texts = {
                place: ids[: place - start + 1]
                for place in range(start, start + len(ids))
                if place in said
            }
            if texts:
                done = decode(native, None, list(texts.values()), Settings(max_new_tokens=4))
                assert [said[place] for place in texts] == [one.tokens for one in done]
            compared, start = compared + len(texts), start + len(ids)
    assert compared == len(said) > 40


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_on_the_states_of_decoding(name: str):
    """Check that the packed target of training has the hidden states of the decoding target.

    Control: read as one document, the second document of a row has other states.
    """
    model = freeze(family(name))
    native = NativeTarget.from_state(model.config.to_dict(), model.state_dict(), execution="eager")
    samples = tiny.samples()
    batch = tiny.packed(samples)
    where = positions(batch, tiny.HEADS, uses_teacher=True)
    states_FH = torch.zeros(batch.ids_RT.numel(), model.config.hidden_size)
    states_FH[where.kept_P] = TargetStates(model).read(batch, where)
    kept = set(where.kept_P.tolist())
    compared = 0
    for number, row in enumerate(batch.rows):
        start = number * tiny.ROW
        for index in row:
            ids = torch.from_numpy(samples[index].ids).long()[None]
            with torch.inference_mode():
                native.open(1, ids.shape[1])
                decoded_NH = native.features(ids)[0]
            for place, state_H in enumerate(decoded_NH, start):
                if place in kept:
                    torch.testing.assert_close(states_FH[place], state_H, rtol=1e-3, atol=1e-3)
                    compared += 1
            start += ids.shape[1]
    assert compared == len(kept) > 40
    # the control: as one document, the row's second one has other states
    with torch.inference_mode():
        native.open(1, tiny.ROW)
        whole_TH = native.features(batch.ids_RT[:1])[0]
    second = [place for place in kept if place < tiny.ROW and batch.documents_RT[0, place] == 2]
    assert (states_FH[second] - whole_TH[second]).abs().max() > 0.1


def test_a_full_store_recomputes_the_rest():
    target, rows = tiny.target(), data().rows
    kept = Counting(target, MemoryStore(1000))
    batch = collate(data().samples, rows, tiny.ROW)
    where = positions(batch, tiny.HEADS, uses_teacher=True)
    for _ in range(2):
        torch.testing.assert_close(kept(batch, where), TargetStates(target)(batch, where))
    assert kept.reads > len(rows)


def test_another_process_finds_the_rows_and_recomputes_a_damaged_one(tmp_path: Path):
    target, rows = tiny.target(), data().rows
    batch = collate(data().samples, rows, tiny.ROW)
    where = positions(batch, tiny.HEADS, uses_teacher=True)
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


def test_everything_that_changes_the_states_changes_the_folder(tmp_path: Path):
    on_disk(tmp_path)
    on_disk(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    on_disk(tmp_path, uses_teacher=False)
    on_disk(tmp_path, target="another target")
    on_disk(tmp_path, tokens=3)
    assert len(list(tmp_path.iterdir())) == 4


def earlier_folder(root: Path, uses_teacher: bool, width: int, dtype: torch.dtype) -> Path:
    """Create and return the folder that an earlier version uses for the same states.

    Earlier versions kept states and tokens in one file.
    """
    keys = sorted(tuple(row) for row in data().rows)
    digest = hashlib.sha256(f"hash {tiny.HEADS} {uses_teacher} {width} {dtype} {keys}".encode())
    for sample in data().samples:
        digest.update(sample.ids.tobytes() + sample.mask.tobytes())
    folder = root / digest.hexdigest()[:16]
    folder.mkdir()
    return folder


def test_an_equal_cache_of_an_earlier_version_is_read(tmp_path: Path):
    folder, rows = (
        earlier_folder(tmp_path, True, tiny.HIDDEN, torch.float64),
        sorted(map(tuple, data().rows)),
    )
    target, parts, sums = tiny.target(), [], []
    for row in rows:
        batch = collate(data().samples, [row], tiny.ROW)
        parts.append(
            TargetStates(target)(batch, positions(batch, tiny.HEADS, uses_teacher=True))
            .numpy()
            .tobytes()
        )
        sums.append(zlib.crc32(parts[-1]))
    (folder / "states.bin").write_bytes(b"".join(parts))
    (folder / "checksums.bin").write_bytes(np.array(sums, dtype=np.uint32).tobytes())
    kept = Counting(target, on_disk(tmp_path))
    batch = collate(data().samples, rows, tiny.ROW)
    where = positions(batch, tiny.HEADS, uses_teacher=True)
    torch.testing.assert_close(kept(batch, where), TargetStates(target)(batch, where))
    assert kept.reads == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_earlier_cache_with_tokens_in_its_states_is_refused(dtype: torch.dtype, tmp_path: Path):
    width = tiny.HIDDEN + 3 * 8 // dtype.itemsize
    folder = earlier_folder(tmp_path, False, width, dtype)
    count = sum(count_kept(sample.mask, tiny.HEADS, False) for sample in data().samples)
    (folder / "states.bin").write_bytes(bytes(count * width * dtype.itemsize))
    words = (
        rf"states.bin has {count * width * dtype.itemsize:,} bytes, expected .* An earlier "
        rf"version .* Delete the folder {folder}"
    )
    with pytest.raises(UserError, match=words):
        on_disk(tmp_path, uses_teacher=False, tokens=3, dtype=dtype)
    assert (folder / "states.bin").stat().st_size == count * width * dtype.itemsize, (
        "the file is unchanged"
    )
    shutil.rmtree(folder)
    on_disk(tmp_path, uses_teacher=False, tokens=3, dtype=dtype)


@pytest.mark.parametrize("uses_teacher", [True, False])
def test_kept_positions_are_counted_by_masks_alone(uses_teacher: bool):
    documents = tiny.samples(40, seed=3)
    documents += [Sample(np.arange(n, dtype=np.int32), np.arange(n) > 0) for n in range(1, 6)]
    documents.append(Sample(np.arange(9, dtype=np.int32), np.zeros(9, dtype=bool)))
    for heads in (1, 2, tiny.HEADS, 30):
        for document in documents:
            where = positions(collate([document], [[0]], tiny.ROW), heads, uses_teacher)
            assert count_kept(document.mask, heads, uses_teacher) == len(where.kept_P)


def test_the_size_is_printed_before_the_space_is_allocated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    on_disk(tmp_path / "states", show=True)
    said = capsys.readouterr().out
    batch = collate(data().samples, data().rows, tiny.ROW)
    count = len(positions(batch, tiny.HEADS, uses_teacher=True).kept_P)
    assert f"states: {count:,} of {data().tokens:,} positions" in said
    assert "MB on disk in" in said
    assert (
        next((tmp_path / "states").glob("*/states.bin")).stat().st_size == count * tiny.HIDDEN * 8
    )
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(
        UserError, match=r"full/.* needs .* MB, but 0.0 MB are free. Set states.folder"
    ):
        on_disk(tmp_path / "full")

"""Test the cache of tokens: the same rows as without it, one writer, and damage that is found."""

import json
import multiprocessing
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from decoding.errors import UserError
from training.config import DataConfig, DomainConfig, LoopConfig
from training.data.from_config import read_samples, training_data
from training.data.packing import PackedData

STEP = LoopConfig(tokens_per_step=512)


@pytest.fixture(scope="module")
def tokenizer(embedded_target: Path) -> Any:
    return AutoTokenizer.from_pretrained(embedded_target)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Return chats and texts of which a few are broken, with a cache in a folder of the test."""
    texts = tmp_path / "texts.jsonl"
    lines = [
        json.dumps({"text": f"def f{n}(x): return x * {n}\n" * (n % 9 + 1)}) for n in range(60)
    ]
    texts.write_text("\n".join([*lines, '{"text": ""}']))
    chats = ["embedded:held_out_chats"]
    return DataConfig(
        chats=chats,
        texts=[str(texts)],
        max_length=64,
        max_bad=0.1,
        cache="disk",
        cache_folder=str(tmp_path / "cache"),
    )


def without_cache(data: DataConfig) -> DataConfig:
    return DataConfig(**{**vars(data), "cache": "none"})


def content(data: PackedData) -> list[Any]:
    """Return all that training reads: every sample, the rows, and the order of steps."""
    samples = [(sample.ids.tolist(), sample.mask.tolist()) for sample in data.samples]
    return [samples, data.rows, [data.step_rows(step) for step in range(5)], data.supervised]


def caches(data: DataConfig) -> list[Path]:
    return [path for path in Path(data.cache_folder).iterdir() if path.is_dir()]


def test_rows_and_their_order_are_equal_with_and_without_a_cache(
    tokenizer: Any, data: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = content(training_data(tokenizer, without_cache(data), STEP, 3))
    printed = capsys.readouterr()
    assert "1 dropped: an empty text" in printed.out and "texts.jsonl:61" in printed.err
    for _ in ("written", "mapped"):
        assert content(training_data(tokenizer, data, STEP, 3)) == plain
        shown = capsys.readouterr()
        assert shown.out.endswith(printed.out) and shown.err == printed.err
    assert len(caches(data)) == 1
    other = DataConfig(**{**vars(data), "train_on": "all"})
    assert content(training_data(tokenizer, other, STEP, 3)) != plain, "control: another mask"
    assert len(caches(data)) == 2


def test_mixtures_are_equal_with_and_without_a_cache(tokenizer: Any, data: DataConfig) -> None:
    domains = {
        "chats": DomainConfig(chats=data.chats, share=2.0),
        "texts": DomainConfig(texts=data.texts),
    }
    mixed = DataConfig(**{**vars(data), "chats": [], "texts": [], "domains": domains})
    found = [training_data(tokenizer, one, STEP, 3) for one in (mixed, without_cache(mixed))]
    assert content(found[0]) == content(found[1])


@pytest.mark.parametrize("change", ["tokenizer", "file", "max_length", "max_samples"])
def test_another_source_of_tokens_has_another_cache(
    tokenizer: Any, base_target: Path, data: DataConfig, change: str
) -> None:
    data.chats = []
    read_samples(tokenizer, data, "train")
    if change == "tokenizer":
        tokenizer = AutoTokenizer.from_pretrained(base_target)
    elif change == "file":
        path = Path(data.texts[0])
        path.write_text(path.read_text().replace("f1(", "g1("))
    else:
        vars(data)[change] = 20
    found = [sample.ids.tolist() for sample in read_samples(tokenizer, data, "train")]
    plain = read_samples(tokenizer, without_cache(data), "train")
    assert found == [sample.ids.tolist() for sample in plain]
    assert len(caches(data)) == 2


@pytest.mark.parametrize("damage", ["truncated", "half-written"])
def test_an_incomplete_cache_is_written_again(
    tokenizer: Any, data: DataConfig, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = content(training_data(tokenizer, data, STEP, 3))
    (folder,) = caches(data)
    name = "tokens" if damage == "truncated" else "index.json"
    (folder / name).write_bytes((folder / name).read_bytes()[:-4])
    assert content(training_data(tokenizer, data, STEP, 3)) == plain
    assert f"note: {folder} is incomplete and is written again" in capsys.readouterr().err


def test_an_altered_cache_is_refused(tokenizer: Any, data: DataConfig) -> None:
    read_samples(tokenizer, data, "train")
    (folder,) = caches(data)
    tokens = np.fromfile(folder / "tokens", "<i4")
    tokens[5] ^= 1
    tokens.tofile(folder / "tokens")
    with pytest.raises(UserError, match=r"tokens was altered after it was written.*Delete "):
        read_samples(tokenizer, data, "train")


def test_too_many_bad_records_and_a_full_disk_leave_no_cache(
    tokenizer: Any, data: DataConfig
) -> None:
    """Check that a limit on the size of files, which fails as a full disk does, leaves nothing."""
    with pytest.raises(UserError, match="more than 0.0% are bad"):
        read_samples(tokenizer, DataConfig(**{**vars(data), "max_bad": 0.0}), "train")
    usual, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, usual[1]))
    try:
        with pytest.raises(UserError, match=r"could not write .*nothing was kept.*cache_folder"):
            read_samples(tokenizer, data, "train")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        signal.signal(signal.SIGXFSZ, handler)
    assert not caches(data)


def _read(tokenizer: Any, data: DataConfig, shown: Any) -> None:
    shown.put([sample.ids.tolist() for sample in read_samples(tokenizer, data, "train", False)])


def test_processes_that_start_together_share_one_cache(tokenizer: Any, data: DataConfig) -> None:
    data.chats = []
    context = multiprocessing.get_context("fork")
    shown = context.Queue()
    ranks = [context.Process(target=_read, args=(tokenizer, data, shown)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    found = [shown.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert found[0] == found[1] == found[2] and len(caches(data)) == 1


def test_auto_writes_no_cache_for_small_files(tokenizer: Any, data: DataConfig) -> None:
    data.cache = "auto"
    read_samples(tokenizer, data, "train")
    assert not Path(data.cache_folder).exists()


@pytest.mark.parametrize("form", ["saved", "parquet", "streamed", "column"])
def test_hugging_face_datasets_are_read_like_lines(
    tokenizer: Any, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": turns, "text": f"x = {n}"} for n in range(5)]
    table, folder = datasets.Dataset.from_list(rows), tmp_path / "set"
    folder.mkdir()
    if form == "saved":
        table.save_to_disk(str(folder))
    else:
        table.to_parquet(str(folder / "train.parquet"))
    source = f"hf:{folder}"
    if form == "column":
        column = DataConfig(texts=[f"{source}:train:text"], chats=[f"{source}:train:messages"])
    else:
        column = DataConfig(texts=[source], chats=[source], streaming=form == "streamed")
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    found = read_samples(tokenizer, column, "train")
    plain = read_samples(tokenizer, DataConfig(texts=[str(lines)], chats=[str(lines)]), "train")
    assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in plain]
    assert [one.mask.tolist() for one in found] == [one.mask.tolist() for one in plain]
    with pytest.raises(UserError, match=r"set:test cannot be read|no column 'none'"):
        read_samples(
            tokenizer,
            DataConfig(texts=[f"{source}:{'train:none' if form == 'saved' else 'test'}"]),
            "train",
        )


def test_a_dataset_with_fewer_rows_than_it_records_is_refused(
    tokenizer: Any, tmp_path: Path
) -> None:
    import datasets

    folder = tmp_path / "saved"
    datasets.Dataset.from_list([{"text": f"x = {n}"} for n in range(9)]).save_to_disk(str(folder))
    info = folder / "dataset_info.json"
    splits = {"train": {"name": "train", "num_examples": 12, "dataset_name": "saved"}}
    info.write_text(json.dumps(json.loads(info.read_text()) | {"splits": splits}))
    data = DataConfig(texts=[f"hf:{folder}"], cache="none")
    with pytest.raises(UserError, match=r"saved:train ended after 9 of 12 rows"):
        read_samples(tokenizer, data, "train")


def test_a_broken_record_of_a_dataset_is_named(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"text": "x = 1"}\n{"text": "y = 2')
    data = DataConfig(texts=[f"hf:{tmp_path}"], cache="none")
    with pytest.raises(UserError, match=r"cannot be read .*JSON.*without hf:, which leaves bad"):
        read_samples(tokenizer, data, "train")


def test_a_table_that_ends_early_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "texts.parquet"
    datasets.Dataset.from_list([{"text": f"x = {n}"} for n in range(9)]).to_parquet(str(path))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="texts.parquet is not a readable table"):
        read_samples(tokenizer, DataConfig(texts=[str(path)]), "train")

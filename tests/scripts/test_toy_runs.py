"""Toy runs of the benchmarks that no other test runs, with random weights or embedded files."""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import decoding
from decoding.errors import UserError
from decoding.models.llama_cpp import library
from scripts.bench import common, gguf_loops
from scripts.bench.server import GOAL
from scripts.bench.trl_gkd import gkd_rate, label_rows
from serving.engines.interface import Sampling


def run(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
) -> dict[str, Any]:
    """Run a script with these options; return the figures that it saved, {} if it saves none."""
    results = folder / "scripts" / "bench" / "results"
    results.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(common, "RESULTS", results)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "threads=1", *options])
    importlib.import_module(f"scripts.bench.{name}").main()
    file = results / f"{name}.json"
    return dict(json.loads(file.read_text())["figures"]) if file.is_file() else {}


@pytest.mark.long
def test_distillation_is_compared_on_the_same_chats(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("max_length=128", "tokens_per_step=256", "steps=1", "rounds=1", "dtype=float32")
    found = run("distillation", tmp_path, monkeypatch, f"target={tiny_target}", *small)
    assert all(rate > 0 for rate in found["useful_tokens_per_second"].values())
    assert found["useful_tokens_per_second"].keys() == {"ours", "trainer"}
    assert found["loss_on_the_same_chats"]["ours"] == pytest.approx(
        found["loss_on_the_same_chats"]["trainer"], rel=1e-3
    )
    rates = found["useful_tokens_per_second"]
    assert found["ours_over"]["trainer"]["median"] == pytest.approx(
        rates["ours"] / rates["trainer"]
    )


@pytest.mark.long
def test_cached_teachers_train_beside_an_online_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ("hidden_size=192", "vocab_size=512", "draft_vocab_size=128", "dtype=float32")
    small = ("rows=2", "length=64", "tokens_per_step=64", "steps=1", "rounds=1")
    found = run("teacher_cache", tmp_path, monkeypatch, *shape, *small)
    kinds = found["over_online"].keys()
    assert len(kinds) == 2 and found["tokens_per_second"].keys() == {"online", *kinds}
    assert all(seconds > 0 for seconds in found["seconds_of_writing"].values())


@pytest.mark.parametrize("source", ["chats", "texts"])
def test_the_token_cache_reads_all_tokens_of_a_repeated_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
) -> None:
    """Check the printed line, and that a file of twice the size has twice the tokens."""
    file = "embedded:chats"
    if source == "texts":
        file = str(tmp_path / "texts.jsonl")
        Path(file).write_text('{"text": "def one():\\n    return 1\\n"}\n')
    counts = []
    for megabytes in (0.05, 0.1):
        run("token_cache", tmp_path, monkeypatch, f"file={file}", f"megabytes={megabytes}")
        line = capsys.readouterr().out.strip().splitlines()[-1]
        found = re.match(rf"{source} {megabytes} MB: ([\d,]+) tokens, cache [\d,]+ tokens/s", line)
        assert found and re.search(r"bare [\d,]+ tokens/s, ratio [\d.]+, peak memory", line), line
        counts.append(int(found[1].replace(",", "")))
    assert counts[1] == pytest.approx(2 * counts[0], rel=0.25)


def test_trl_gets_our_tokens_and_supervised_positions() -> None:
    rows = [{"ids": [5, 6, 7], "mask": [False, True, True]}, {"ids": [8, 9], "mask": [False, True]}]
    batch = label_rows(rows)
    assert batch["input_ids"].tolist()[0] == [5, 6, 7]
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, 9, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["prompts"].tolist() == [[5], [8]]


def test_trl_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trl.experimental.gkd", None)
    with pytest.raises(UserError, match=r"TRL is not installed here .*pip install trl"):
        gkd_rate(None, None, None, [], 1, 1, tmp_path, "cpu")


@pytest.mark.long
def test_decoding_is_compared_with_transformers(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = (f"target={tiny_target}", f"drafter={tiny_target}", "dtypes=[float32]")
    small = ("max_prompts=1", "max_new_tokens=6", "rounds=1", "num_draft_tokens=2")
    found = run("decoding", tmp_path, monkeypatch, *models, "temperatures=[0.0]", *small)
    one = found["float32, temperature 0"]
    rates = one["tokens_per_second"]
    assert rates.keys() == {*("ours", "hf_dynamic", "hf_static", "ours_speculative", "hf_assisted")}
    assert one["speculative"]["median"] == pytest.approx(
        rates["ours_speculative"] / rates["hf_assisted"]
    )
    shares = found["float32, budgets"]
    assert shares["round, megabytes"] > shares["autoregressive step, megabytes"] > 0


def test_a_forward_is_compared_with_plain_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ("layers=1", "hidden_size=32", "intermediate_size=64", "heads=2", "kv_heads=1")
    small = ("vocab_size=64", "context=8", "widths=[1,2]", "forwards=1", "rounds=1")
    options = (*shape, *small, "dtypes=[float32]", "product_side=16")
    found = run("bandwidth", tmp_path, monkeypatch, *options)["float32"]
    assert found["V"].keys() == {"1", "2"} and found["V"]["1"] == 1
    assert found["best_reader"] in found["plain_reading_gigabytes_per_second"]
    assert found["share_of_bandwidth"] > 0 and found["share_of_operations"] > 0


def test_replays_of_a_chain_and_a_lookup_are_timed(
    tmp_path: Path,
    tiny_target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ("max_prompts=2", "max_new_tokens=6", "rounds=1", "num_draft_tokens=2")
    found = run("replay", tmp_path, monkeypatch, f"target={tiny_target}", *small)
    assert found["answers"] == 2 and 0 < found["positions"] <= 12
    speeds = found["positions_per_second"]
    assert speeds.keys() == {"chain, one pass", "chain, in the loop", "prompt lookup"}
    assert f"2 answers, {found['positions']} positions, 1 threads" in capsys.readouterr().out


def test_a_server_answers_as_the_decode_beside_it(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("max_prompts=2", "max_new_tokens=6", "rounds=1", "num_draft_tokens=2")
    found = run("server", tmp_path, monkeypatch, f"target={tiny_target}", "dtype=float32", *small)
    assert found["equal_texts"] and all(seconds > 0 for seconds in found["seconds"].values())
    assert found["seconds"].keys() == {"direct", "stream", "whole"}
    for name, over in found["over_direct"].items():
        assert over["median"] == pytest.approx(found["seconds"][name] / found["seconds"]["direct"])
        assert found["goals"][name] == {"found": over["median"], "met": over["median"] <= GOAL}
    assert found["cpu_over_direct"].keys() == found["goals"].keys() == {"stream", "whole"}


def test_gguf_loops_without_their_library_name_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from tests.support.gguf_files import tiny_llama, write

    model = write(tmp_path / "tiny.gguf", tiny_llama())
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(UserError, match=r"not installed\. Run pip install -e '\.\[llamacpp\]'"):
        run("gguf_loops", tmp_path, monkeypatch, f"target={model}", "busy=true")


def test_each_side_of_the_gguf_loops_is_compared_at_its_best(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Give both sides our loop, the server's without drafts but one that takes longer."""
    monkeypatch.setattr(gguf_loops, "PAUSE_SECONDS", 0.0)
    engine = decoding.load(tiny_target)
    chosen = gguf_loops.Options(target=str(tiny_target), lengths=[2], choosing_prompts=1, rounds=1)
    sides = gguf_loops.our_sides(chosen, engine)
    plain = gguf_loops.our_side(engine, None, 1)

    def longer(ids: list[int], sampling: Sampling) -> tuple[list[int], float]:
        tokens, seconds = plain(ids, sampling)
        return tokens, seconds + 60.0

    sides |= {"llama.cpp, plain": plain, "llama.cpp, slow": longer, "llama.cpp, n-gram 2": plain}
    chosen.max_new_tokens = 4
    found = gguf_loops.compare(chosen, sides, [[4, 5, 6, 7], [5, 6, 7, 8], [6, 7, 8, 9]], (), 0.0)
    assert sides.keys() == found["choosing"].keys()
    assert found["choosing"]["llama.cpp, slow"] < 4 / 60
    measured = found["tokens_per_second"]
    assert measured.keys() == sides.keys() - {"llama.cpp, slow"}, "the best of each side"
    assert found["ratios"].keys() == {
        *("plain", "best drafts", "gain of our drafts", "gain of llama.cpp's drafts")
    }
    assert "temperature 0, 2 prompts, median of 1 rounds" in capsys.readouterr().out


def test_a_folder_without_gpt_fast_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="has no generate.py, expected a clone of gpt-fast"):
        run("gpt_fast", tmp_path, monkeypatch, "device=cpu", "toy=true", f"folder={tmp_path}")

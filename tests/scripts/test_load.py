"""The benchmark of the HTTP server under load: its arithmetic, and a toy run."""

import json
import re
import shutil
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import yaml

from decoding.errors import UserError
from scripts.bench import common
from scripts.bench import load as script
from scripts.bench.load import Options
from scripts.bench.load_figures import left_out, percentiles, plots, summary, where_it_pays
from scripts.bench.load_requests import Answered, arrivals
from scripts.bench.vllm_file import KEY
from scripts.server_process import run_server
from tests.support.server_jobs import fork_server

TABLE = [[1, 2, 4], [3, 8, 0]]
SERVERS = ["plain", "prompt_lookup", "prompt_lookup by batch", "suffixes", "suffixes by batch"]


# Arithmetic -----------------------------------------------------------------------------------
def test_arrivals_are_those_of_a_poisson_process() -> None:
    times = arrivals(4.0, 4000, seed=3)
    gaps = [later - earlier for earlier, later in pairwise([0.0, *times])]
    mean, spread = statistics.mean(gaps), statistics.stdev(gaps)
    assert min(gaps) > 0 and mean == pytest.approx(0.25, rel=0.05)
    assert spread == pytest.approx(mean, rel=0.06), "of an exponential law"
    assert arrivals(4.0, 4000, seed=3) == times != arrivals(4.0, 4000, seed=4)


def test_percentiles_are_measured_values() -> None:
    assert percentiles(range(1, 101), 100) == {"p50": 50, "p90": 90, "p99": 99}
    assert percentiles([7.0], 1) == {"p50": 7.0}


def test_a_percentile_that_few_requests_do_not_show_is_left_out_and_named() -> None:
    three_passes = range(1, 97)
    assert percentiles(three_passes, 32).keys() == {"p50", "p90"}, "p99 would be the slowest one's"
    lacking = "p99 is left out: a rate has 32 requests, and p99 needs at least 100."
    assert left_out(32, 2) == [lacking] and left_out(100, 2) == []
    (drift,) = left_out(100, 1)
    assert drift.startswith("`pays` is left out: the intervals of one pass lack the drift")


def test_a_summary_counts_from_the_arrivals() -> None:
    found = [[Answered(0.1, 1.1, 11, "a"), Answered(0.5, 2.0, 4, "b")]]
    plain = [[Answered(0.1, 2.2, 11, "a"), Answered(0.5, 2.0, 4, "c")]]
    figures = summary(found, [0.0, 1.0], plain)
    assert figures["tokens_per_second"] == pytest.approx(15 / 3)
    assert figures["in_system"] == pytest.approx(3.1 / 3), "Little's law"
    assert figures["per_output_token_s"]["p50"] == pytest.approx(0.1)
    assert figures["latency_over_plain"] == pytest.approx(3.1 / 4.2)
    assert figures["equal_texts"] == 1
    again = summary(found * 2, [0.0, 1.0], plain * 2)
    assert again == figures | {"answers": 4, "equal_texts": 2}, "two passes with the same answers"


def test_the_fastest_lengths_are_the_table() -> None:
    speeds = {
        1: {0: 100.0, 1: 120.0, 2: 140.0},
        2: {0: 180.0, 1: 200.0, 2: 190.0},
        4: {0: 300.0, 1: 303.0, 2: 280.0},  # a gain of 1 % counts as none
    }
    assert script.choose_lengths(speeds, 1.02, 8) == [[1, 1, 2], [2, 3, 1], [4, 8, 0]]
    assert script.choose_lengths(speeds, 1.0, 8) == [[1, 1, 2], [2, 8, 1]], "control"


def test_a_drafter_drafts_nothing_from_the_last_range_without_drafts() -> None:
    assert script.drafts_nothing_from(TABLE) == 3
    assert script.drafts_nothing_from([[1, 4, 0], [5, 8, 2]]) is None, "larger batches gain"
    assert script.drafts_nothing_from([[1, 2, 0], [3, 4, 2], [5, 8, 0]]) == 5
    assert script.drafts_nothing_from([[1, 8, 0]]) == 1


def rows_with(*over: tuple[float | None, float | None], mine: str = "mine") -> list[dict[str, Any]]:
    """Return rows of the rates 0.5, 1 and 2 whose intervals over plain decoding are given."""
    even = (1.0, 1.0)
    return [
        {
            "rate": rate,
            "server": name,
            "latency_s": {"p50": rate, "p90": 2 * rate},
            **{f"latency_over_plain{end}": one for end, one in zip(("_low", "_high"), ends)},
            "latency_over_plain": 1.0 if None in ends else sum(ends) / 2,
        }
        for rate, given in zip((0.5, 1.0, 2.0), over, strict=True)
        for name, ends in (("plain", even), (mine, given))
    ]


PAYS, COSTS, UNKNOWN = (0.8, 0.95), (1.05, 1.2), (0.97, 1.04)


@pytest.mark.parametrize(
    ("over", "up_to", "stops_at", "not_decided"),
    [
        ((PAYS, PAYS, COSTS), 1.0, 2.0, []),
        ((PAYS, COSTS, PAYS), 0.5, 1.0, []),
        ((COSTS, PAYS, PAYS), None, 0.5, []),
        ((PAYS, PAYS, PAYS), 2.0, None, []),
        ((PAYS, UNKNOWN, COSTS), 0.5, 2.0, [1.0]),
        ((UNKNOWN, UNKNOWN, UNKNOWN), None, None, [0.5, 1.0, 2.0]),
        ((PAYS, (1.0, 1.2), (None, None)), 0.5, None, [1.0, 2.0]),
    ],
)
def test_speculation_stops_paying_only_where_an_interval_lies_above_1(
    over: Any, up_to: Any, stops_at: Any, not_decided: Any
) -> None:
    found = where_it_pays(rows_with(*over), "mine")
    assert found == {"up_to": up_to, "stops_at": stops_at, "not_decided": not_decided}


@pytest.mark.parametrize(("slower", "stops_at"), [(1.0, None), (1.01, None), (1.3, 1.0)])
def test_noise_decides_nothing(slower: float, stops_at: float | None) -> None:
    """Compare servers of 16 requests in 3 passes, whose latencies vary by 10 %."""
    random = np.random.default_rng(5)
    lengths = random.uniform(1, 4, 16)

    def answers(factor: float) -> list[list[Answered]]:
        latencies = factor * lengths * random.lognormal(0, 0.1, (3, 16))
        return [[Answered(0.1, one, 8, "") for one in taken] for taken in latencies.tolist()]

    figures = summary(answers(slower), list(range(16)), answers(1.0))
    found = where_it_pays([{"rate": 1.0, "server": "mine", **figures}], "mine")
    assert found["stops_at"] == stops_at
    assert found["not_decided"] == ([] if stops_at else [1.0])


def test_the_plots_name_every_server_and_rate() -> None:
    name = "runs/quickstart/distill.train/drafter by batch"
    latency, ratio = plots(rows_with(PAYS, UNKNOWN, (None, None), mine=name), "plain")
    end = f"…{name[-28:]}"
    for plot, names in ((latency, {"plain", end}), (ratio, {end})):
        axes = plot.figure.axes[0]
        assert {text.get_text() for text in plot.figure.legends[0].get_texts()} == names
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0.5", "1", "2"]
        assert plot.png.startswith(b"\x89PNG")
    assert "95 % intervals" in ratio.title


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"batches": [2, 4]}, r"batches is \[2, 4\], expected numbers of rows, 1 among them"),
        ({"rates": [0.0, 1.0]}, "expected requests a second above 0"),
        ({"rates": []}, "expected requests a second above 0"),
        ({"requests": 0}, "requests is 0, expected at least 1"),
        ({"passes": 0}, "passes is 0, expected at least 1"),
        ({"rounds": 0}, "rounds is 0, expected at least 1"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0, expected at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected at least 1"),
        ({"drafters": []}, "expected at least one"),
        ({"drafters": ["prompt_lookup", "prompt_lookup"]}, "differ from each other"),
        ({"drafters": ["plain"]}, "differ from each other, from plain"),
        ({"drafters": ["vllm"], "urls": {"vllm": "http://a"}}, r"urls has \['vllm'\]"),
        (
            {"urls": {"prompt_lookup by batch": "http://a"}},
            "from each drafter's `DRAFTER by batch`",
        ),
    ],
)
def test_options_that_cannot_be_measured_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        script.check(Options(**fields))


def test_a_drafter_with_options_is_one_setting(tmp_path: Path) -> None:
    given = {"use": "ranked_tree", "folder": "it's here", "max_nodes": 24, "name": "tree"}
    assert script.label_of(given) == "tree"
    setting = script.override_of(given)
    assert setting == r"drafter={use: 'ranked_tree', folder: 'it\'s here', max_nodes: 24}"
    assert script.override_of(str(tmp_path)) == f"drafter={tmp_path}"
    assert script.folder_of({"use": "ranked_tree", "folder": str(tmp_path)}) == tmp_path
    assert script.folder_of("prompt_lookup") is None


def test_a_folder_is_named_by_its_card_or_its_last_part(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine" / "drafter"
    folder.mkdir(parents=True)
    assert script.label_of(str(folder)) == "drafter"
    (folder / "drafter_card.json").write_text(json.dumps({"name": "two layers"}))
    assert script.label_of(str(folder)) == script.label_of({"use": str(folder)}) == "two layers"
    assert script.label_of({"use": str(folder), "name": "mine"}) == "mine"
    assert script.label_of("prompt_lookup") == "prompt_lookup"
    assert script.label_of("runs/missing/drafter") == "runs/missing/drafter", "a control: no folder"
    other = tmp_path / "runs" / "other" / "drafter"
    shutil.copytree(folder, other)
    with pytest.raises(UserError, match="drafters is .'two layers', 'two layers'.*differ from"):
        script.check(Options(drafters=[str(folder), str(other)]))


# The whole -------------------------------------------------------------------------------------
@pytest.mark.long
def test_a_toy_run(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run servers of two drafters beside one without, and one more server; check what is saved."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(script, "run_server", fork_server)
    options = {
        "target": tiny_target,
        "drafters": "[prompt_lookup,{use: suffix_lookup, min_match: 2, name: suffixes}]",
        "rates": "[20,5]",
        "requests": 6,
        "passes": 2,
        "batches": "[1,2]",
        "max_new_tokens": 12,
        "num_draft_tokens": 2,
        "least_gain": 0.0,  # so that some length always pays
        "rounds": 1,
        "threads": 1,
        "name": "toy",
    }
    words = [f"{key}={value}" for key, value in options.items()]
    other = (f"target.path={tiny_target}", "target.dtype=float32", "threads=1")
    with run_server("serving.api", *other, f"output_dir={tmp_path / 'other'}") as server:
        words.append(f"urls={{other: {server.url}}}")
        monkeypatch.setattr(sys, "argv", ["load.py", *words])
        script.main()
        assert server.process.poll() is None, "it is not the script's to end"
        metrics = httpx2.get(f"{server.url}/metrics").text
    figures = json.loads((tmp_path / "toy.json").read_text())["figures"]
    rows = figures["rates"]
    assert [(row["rate"], row["server"]) for row in rows] == [
        (rate, server) for rate in (5.0, 20.0) for server in [*SERVERS, "other"]
    ]
    assert {(row["answers"], row["equal_texts"]) for row in rows} == {(12, 12)}, "same texts"
    for row in rows:
        for name in ("first_token_s", "per_output_token_s", "latency_s"):
            assert row[name].keys() == {"p50"}, "6 requests show no other percentile"
        low, high = row["latency_over_plain_low"], row["latency_over_plain_high"]
        assert low <= row["latency_over_plain"] <= high
        assert (low == high == 1) is (row["server"] == "plain"), "a control"
    assert len(figures["notes"]) == 2
    answers = json.loads((tmp_path / "toy.answers.json").read_text())
    assert len(answers) == 12 * len(rows) and {one["pass"] for one in answers} == {0, 1}
    for name in ("latency", "over_plain"):
        assert (tmp_path / f"toy.{name}.png").read_bytes().startswith(b"\x89PNG")
    assert figures["pays"].keys() == {*SERVERS[1:], "other"}
    answered = re.findall(r'requests_total\{outcome="(?:stop|length)"\} (\d+)', metrics)
    assert sum(map(int, answered)) == 2 * 2 * 7, "in each pass and rate six, and one to warm up"
    lookup, suffixes = figures["drafters"]["prompt_lookup"], figures["drafters"]["suffixes"]
    assert suffixes["vllm"] == "vLLM does not run suffixes."
    table = lookup["num_draft_tokens_by_batch"]
    assert table[0][0] == 1 and table[-1][1] == 2
    if max(tokens for *_, tokens in table):
        exported = yaml.safe_load((tmp_path / lookup["vllm"]).read_text())
        lengths = {tokens for *_, tokens in table}
        expected = table if len(lengths) > 1 else None
        assert exported["speculative-config"].get(KEY) == expected
    else:
        assert "no number of rows gains" in lookup["vllm"]

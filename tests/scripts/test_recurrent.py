"""The recurrent drafter's benchmarks at toy size: equal losses, goals, and continued runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoding.engine import load
from decoding.loop import decode
from decoding.rounds.settings import Settings
from recurrent_drafting.checkpoint import save_head
from recurrent_drafting.head import HeadConfig, RecurrentHead
from scripts.bench import common, recurrent, recurrent_rounds, recurrent_show, recurrent_training
from scripts.bench import recurrent_tables as tables
from scripts.bench.recurrent_generation import find_prompts_without_loops, judge_goals, make_arms
from scripts.bench.recurrent_training import IGNORED, published_loss
from training.data.readers import Prompt


def figures_of(
    script: Any, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *given: str
) -> dict[str, Any]:
    """Run a script with these options and return its figures."""
    monkeypatch.setattr(common, "RESULTS", folder)
    monkeypatch.setattr("sys.argv", [f"{name}.py", *given, "threads=1", f"name={name}"])
    script.main()
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())["figures"]
    return found


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an untrained head of the tiny target and return its folder."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("head")
    save_head(RecurrentHead(HeadConfig(vocab_size=2048, hidden_size=32, exit_dim=64)), folder)
    return folder


# ----------------------------------------------------------------------------------------- training
@pytest.mark.long
def test_both_sides_of_training_compute_the_same_loss(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = [
        "max_length=256",
        "rows=2",
        "forwards=1",
        "steps=1",
        "rounds=1",
        "dtype=float32",
        f"target={tiny_target}",
    ]
    figures = figures_of(
        recurrent, "recurrent_training", tmp_path, monkeypatch, "part=training", *small
    )
    same = figures["loss_on_the_same_chats"]
    assert same["ours"] == pytest.approx(same["published"], rel=1e-3)
    assert all(value > 0 for value in figures["supervised_tokens_per_second"].values())
    assert figures["peak_of_published_over_ours"] > 1
    assert len(figures["goals"]) == 3
    met = [one["met"] for one in recurrent_training.judge_goals(4.1, 1.9, 0.3).values()]
    assert met == [True, False, True]


def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["recurrent.py", "part=sleeping"])
    with pytest.raises(SystemExit, match="part is 'sleeping', expected one of training"):
        recurrent.main()
    monkeypatch.setattr("sys.argv", ["recurrent_show.py", "parts=[sleeping]"])
    with pytest.raises(SystemExit, match="parts has 'sleeping', expected some of recurrence"):
        recurrent_show.main()


def test_the_published_loss_is_the_sum_of_means_over_shifted_labels():
    torch.manual_seed(0)
    logits = torch.randn(2, 1, 6, 7)
    labels = torch.tensor([[IGNORED, IGNORED, 3, 4, IGNORED, 6]])
    loss, log = published_loss(logits, labels)
    log_q = torch.log_softmax(logits, dim=-1)
    first = -(log_q[0, 0, 0, 3] + log_q[0, 0, 1, 4] + log_q[0, 0, 3, 6]) / 3
    second = -(log_q[1, 0, 0, 4] + log_q[1, 0, 2, 6]) / 2
    torch.testing.assert_close(loss, first + second)
    assert set(log) == {
        f"redrafter{i}_{what}"
        for i in (0, 1)
        for what in (*(f"top{k}" for k in range(1, 6)), "loss")
    }


# ----------------------------------------------------------------------------- drafting, generation
def test_the_shares_of_a_round_add_up(
    tiny_target: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = [
        f"target={tiny_target}",
        f"head={head}",
        "max_prompts=1",
        "max_new_tokens=8",
        "rounds=1",
        "beam_width=3",
    ]
    figures = figures_of(
        recurrent, "recurrent_drafting", tmp_path, monkeypatch, "part=drafting", *small
    )
    for way in ("greedy", "picked", "drawn"):
        one = figures[way]
        assert one["share_of_target"] + one["share_of_head"] + one[
            "share_outside"
        ] == pytest.approx(1)
        assert 0 < one["share_outside"] < 1 and one["tau"] >= 1
        assert 0 < one["operations_outside_as_on_a_gpu"] <= recurrent_rounds.GOAL_OPERATIONS
    assert len(figures["goals"]) == 2 and not any(
        "met" in one for one in figures["goals"].values()
    ), "three beams"
    slow = {
        way: {"share_outside": 0.3, "operations_outside_as_on_a_gpu": 150}
        for way in ("greedy", "drawn")
    }
    assert [one["met"] for one in recurrent_rounds.judge_goals(slow, 8, 5).values()] == [
        False,
        True,
    ]


def test_prompts_with_looping_answers_are_skipped(tiny_target: Path):
    engine = load(tiny_target)
    prompts = [Prompt(str(number), "none", [f"def f{number}(x):"]) for number in range(6)]
    asked, found = find_prompts_without_loops(engine, prompts, 2, 32)
    assert asked == 6 and len(found) <= 2, "prompts are answered in batches"
    assert find_prompts_without_loops(engine, prompts, 9, 32)[1][: len(found)] == found
    for _, ids, answer in found:
        (alone,) = decode(
            engine.target, None, [ids], Settings(32, stop_token_ids=engine.stop_token_ids)
        )
        assert answer == alone.tokens


def test_greedy_decoding_has_no_sampled_beams():
    chosen = SimpleNamespace(head="a head", head_dtype="auto", widths=[1, 4])
    assert [one["name"] for one in make_arms(chosen, 0.0)] == [
        "picked 1",
        "picked 4",
        "picked by cost",
    ]
    assert [one["name"] for one in make_arms(chosen, 1.0)][3:] == [
        "drawn 1",
        "drawn 4",
        "drawn by cost",
    ]
    assert all(one["beam_width"] == 4 for one in make_arms(chosen, 1.0) if one.get("by_cost"))


def test_goals_are_judged_by_the_speedups():
    def row(temperature: float, drafter: str, speedup: float) -> Any:
        return SimpleNamespace(temperature=temperature, drafter=drafter, headline_speedup=speedup)

    rows = [
        row(0.0, "picked 4", 1.6),
        row(0.0, "prompt_lookup", 1.7),
        row(1.0, "prompt_lookup", 0.9),
    ]
    rows += [
        row(1.0, "picked by cost", 0.95),
        row(1.0, "drawn by cost", 1.25),
        row(1.0, "drawn 4", 0.5),
    ]
    met = {
        name: one["met"]
        for name, one in judge_goals(rows, {"4": {"equal": 3, "tie": 1, "different": 0}}).items()
    }
    assert met == {
        "greedy output equal": True,
        "greedy above 1.5": True,
        "greedy above prompt lookup": False,
        "T=1 above 1.2, better of picked and drawn by cost": True,
        "T=1 by cost never below 0.97": False,
    }
    assert not judge_goals(rows, {"45": {"equal": 3, "tie": 0, "different": 1}})[
        "greedy output equal"
    ]["met"]


@pytest.mark.long
def test_generation_measures_every_width_and_temperature(
    tiny_target: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = [
        "max_prompts=2",
        "sweep_prompts=1",
        "exact_prompts=2",
        "max_new_tokens=8",
        "widths=[1,3]",
        "lengths=[2]",
    ]
    given = [
        f"target={tiny_target}",
        f"head={head}",
        *small,
        "exact_widths=[1,3,45]",
        "beam_length=3",
    ]
    figures = figures_of(
        recurrent, "recurrent_generation", tmp_path, monkeypatch, "part=generation", *given
    )
    assert all(counts["different"] == 0 for counts in figures["greedy_output_by_beams"].values())
    assert set(figures["greedy_output_by_beams"]) == {"1", "3", "45"}
    ways = ["picked 1", "picked 3", "picked by cost"]
    for temperature, drafters in (
        (0.0, ways),
        (1.0, [*ways, "drawn 1", "drawn 3", "drawn by cost"]),
    ):
        found = [row for row in figures["rows"] if row["temperature"] == temperature]
        assert {row["drafter"] for row in found} == {*drafters, "prompt_lookup"}
        assert all(row["prompts"] == 2 and row["speedup"] > 0 for row in found)
    assert "greedy above 1.5" in (tmp_path / "recurrent_generation.md").read_text()


# --------------------------------------------------------------------------------------------- show
def head_figures(better: int) -> dict[str, Any]:
    """Return figures of six answers of 12 tokens; answer n takes n + 6 - `better` rounds."""
    greedy = [[12, number + 6 - better] for number in range(6)]
    return {"steps": 7, "seconds": 3.0, "epochs": 0.5, "greedy": greedy, "sampled": greedy}


def test_tables_pair_prompts_and_seeds():
    notes = {f"base/{seed}": head_figures(0) for seed in range(2)}
    notes |= {f"LK/{seed}": head_figures(seed + 1) for seed in range(2)}
    rounds = [sum(n + 6 - better for n in range(6)) for better in (0, 1, 2)]
    ratio = tables.tau_ratio(
        [notes[f"LK/{seed}"]["greedy"] for seed in range(2)], [notes["base/0"]["greedy"]] * 2
    )
    assert ratio.value == pytest.approx(2 * rounds[0] / (rounds[1] + rounds[2]))
    assert ratio.low is not None and 1 < ratio.low < ratio.value < ratio.high  # type: ignore[operator]
    same = tables.tau_ratio([notes["base/0"]["greedy"]], [notes["base/1"]["greedy"]])
    assert (same.value, same.low, same.high) == (1.0, 1.0, 1.0), "equal pairs have no interval"
    text = tables.training_table(notes, {"LK": "base", "not there yet": "base"})
    assert text.count("\n") == 3 and f"{72 / rounds[1]:.3f} {72 / rounds[2]:.3f}" in text


def generation(
    drafter: str, seconds: float, prompt: str = "a", length: int = 4, seed: int = 0
) -> dict[str, Any]:
    shared = {"temperature": 0.0, "tokens": 10, "rounds": 5, "prompt_id": prompt}
    return {"drafter": drafter, "num_draft_tokens": length, "seconds": seconds, **shared}


def test_races_are_pooled_over_seeds_and_the_best_arms_compared():
    seconds = {"head, picked": 1.0, "head, drawn": 3.0, "pruned 1": 1.5, "pruned 2": 4.0}
    race = [
        generation("autoregressive", 2.0, length=0),
        *(generation(*one) for one in seconds.items()),
    ]
    races = [race, race]
    arms_found = tables.pool_arms(races)
    assert arms_found[0.0, "head, picked", 4] == {"tokens": [20], "rounds": [10], "seconds": [2.0]}
    assert "| 0.000 | head, picked | 4 | 2.000 | 2.000 |" in tables.race_table(races)
    assert "| 0.000 | head, picked | pruned 1 | 1.500 |" in tables.head_against_pruned_table(races)


@pytest.mark.exhaustive
def test_a_second_call_of_all_parts_measures_nothing_again(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = [
        "seeds=[0]",
        "seconds=0.05",
        "max_chats=60",
        "answer_tokens=24",
        "max_length=128",
        "tokens_per_step=256",
    ]
    small += [
        "max_prompts=3",
        "max_new_tokens=8",
        "race_prompts=2",
        "widths=[1,3]",
        "lengths=[2]",
        "race_width=3",
    ]
    small += ["pruned_layers=[1,2]", "pruned_sequences=16", "heads=3", f"work={tmp_path / 'work'}"]
    given = [f"target={tiny_target}", *small]
    found = figures_of(recurrent_show, "recurrent_show", tmp_path, monkeypatch, *given)
    notes = found["figures"]
    for part, sides in recurrent_show.TRAINED.items():
        assert f"### {part}" in found["tables"]
        for side in {*sides, *sides.values()}:
            assert notes[f"{side}/0"]["steps"] >= 1
            assert len(notes[f"{side}/0"]["greedy"]) == len(notes[f"{side}/0"]["sampled"]) == 3
    ways = {(one["drafter"], one["temperature"]) for one in notes["pruned/0"]["generations"]}
    assert {name for name, _ in ways} == {
        "autoregressive",
        "head, picked",
        "head, drawn",
        "pruned 1",
        "pruned 2",
        "prompt_lookup",
    }
    assert {one["num_draft_tokens"] for one in notes["shape/0"]["generations"]} == {0, 2}
    assert (tmp_path / "recurrent_show.md").read_text().strip() == found["tables"]
    (parts,) = (tmp_path / "work").glob("*/parts.jsonl")
    before = parts.read_bytes()
    again = figures_of(
        recurrent_show, "recurrent_show", tmp_path, monkeypatch, *given, "parts=[losses,pruned]"
    )
    assert parts.read_bytes() == before and again == found, "the tables include earlier calls"

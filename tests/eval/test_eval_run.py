"""`eval.run` from end to end on a tiny random LLaMA: measurement, files, refusals and resuming."""

import gc
import json
import re
from pathlib import Path

import pytest

from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.rounds.settings import Settings
from decoding.rounds.ties import choice_scores, top_two_gap
from eval.config import BenchmarkConfig
from eval.measure.benchmarks import load_benchmark
from eval.measure.measurement import Bench, rotate
from eval.measure.records import BASELINE, Arm, read_records
from eval.run import run
from eval.statistics.schema import read_rows
from jobs.config import TargetConfig, TrackerConfig
from jobs.drafter_use import DrafterUse
from jobs.drafters import build, describe, uses
from tests.support import tiny_folders as tiny
from tests.support.tiny_folders import GAMMAS, config


@pytest.fixture(scope="module")
def finished(home):
    return run(config(home, "finished"))


def test_a_run_leaves_rows_records_costs_and_a_report(finished):
    rows = read_rows(finished / "results.jsonl")
    swept = {(r.drafter, r.temperature, r.num_draft_tokens) for r in rows if r.part == "sweep"}
    names = ("shallow", "prompt_lookup")
    assert swept == {
        (name, temperature, gamma)
        for name in names
        for temperature in (0.0, 1.0)
        for gamma in GAMMAS
    }
    main = [r for r in rows if r.part == "main"]
    assert [(r.drafter, r.temperature) for r in main] == [(n, t) for t in (0.0, 1.0) for n in names]
    for row in main:
        assert row.prompts == 3  # without the two prompts of the sweep
        assert row.num_draft_tokens in GAMMAS
        assert row.tokens == 3 * 12
        assert set(row.V) == set(range(1, 5))
        assert row.V[1] == 1.0
        assert row.lossless == ("by rule" if row.temperature else "equal")
    assert (finished / "report.html").stat().st_size > 10_000
    assert (finished / "parts.jsonl").is_file()
    assert json.loads((finished / "manifest.json").read_text())["finished"]


def test_a_tracker_gets_every_main_row_and_a_table_of_all(home, wandb_runs):
    """Check that the tracker gets the figures of every main row, and a table of all rows.

    It starts after the measurement, which its work would disturb.
    """
    tracker = TrackerConfig(wandb="online", name="mine", group="sweep")
    folder = run(
        config(home, "tracked", temperatures=[0.0], prompt_lookup_control=False, tracker=tracker)
    )
    rows = read_rows(folder / "results.jsonl")
    [main] = [row for row in rows if row.part == "main"]
    [line] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    label = f"shallow, greedy, gamma {main.num_draft_tokens}"
    fields = ("speedup", "tau", "tokens_per_second")
    assert [line[f"{name}/{label}"] for name in fields] == [vars(main)[name] for name in fields]
    [asked] = wandb_runs
    assert (asked["name"], asked["group"], asked["job_type"]) == ("mine", "sweep", "eval.run")
    table = asked["logged"]["rows"]
    shown = [dict(zip(table.columns, cells, strict=True)) for cells in table.data]
    assert [(row["drafter"], row["part"], row["speedup"]) for row in shown] == [
        (row.drafter, row.part, row.speedup) for row in rows
    ]
    assert len(rows) == 1 + len(GAMMAS)


def test_every_arm_decodes_every_prompt_and_greedy_outputs_equal_the_targets(finished):
    records = read_records(finished / "records.jsonl")
    greedy = [r for r in records if r.temperature == 0]
    own = {r.prompt_id: r.tokens for r in greedy if r.arm == BASELINE}
    assert len(own) == 5
    assert all(r.tokens == own[r.prompt_id] for r in greedy)
    for record in records:
        assert record.decode_seconds > 0
        assert record.rounds + sum(record.accepted_by_depth) == len(record.tokens) == 12


def test_sweep_and_main_part_share_no_prompts(home, finished):
    records = read_records(finished / "records.jsonl")
    swept, main = ({r.prompt_id for r in records if r.part == part} for part in ("sweep", "main"))
    assert swept == {"p1", "p2"} and main == {"p0", "p3", "p4"}
    report = (finished / "report.html").read_text()
    assert (
        "chosen for each drafter in a sweep on 2 prompts from all over prompts.jsonl, none of "
        "which is in the main part" in report
    )


def test_with_a_file_for_the_sweep_every_prompt_is_measured(home):
    tiny.prompts(home / "others.jsonl", count=12)
    benchmark = BenchmarkConfig(
        path=str(home / "prompts.jsonl"), sweep_path=str(home / "others.jsonl")
    )
    folder = run(config(home, "swept_elsewhere", benchmark=benchmark, temperatures=[0.0]))
    records = read_records(folder / "records.jsonl")
    swept, main = ({r.prompt_id for r in records if r.part == part} for part in ("sweep", "main"))
    assert main == {f"p{n}" for n in range(5)}
    assert len(swept) == 2 and not swept & main
    inputs = json.loads((folder / "manifest.json").read_text())["inputs"]
    assert [str(home / name) for name in ("prompts.jsonl", "others.jsonl")] == list(inputs)[1:3]
    assert "2 prompts from all over others.jsonl" in (folder / "report.html").read_text()


def test_a_finished_run_is_not_measured_again(home, finished, capsys):
    before = (finished / "records.jsonl").read_bytes()
    run(config(home, "finished"))
    assert "nothing is measured again" in capsys.readouterr().out
    assert (finished / "records.jsonl").read_bytes() == before


def test_a_finished_run_of_another_version_is_named(home, finished):
    results, manifest = finished / "results.jsonl", finished / "manifest.json"
    kept, kept_manifest = results.read_text(), manifest.read_text()
    of_old = {key: value for key, value in json.loads(kept_manifest).items() if key != "artefacts"}
    manifest.write_text(json.dumps(of_old))
    row = json.loads(kept.splitlines()[0])
    del row["tau"]
    results.write_text(json.dumps(row) + "\n")
    try:
        with pytest.raises(
            UserError, match=r"results.jsonl does not hold rows of this version of eval.run \(.*tau"
        ):
            run(config(home, "finished"))
    finally:
        results.write_text(kept)
        manifest.write_text(kept_manifest)


@pytest.mark.long
def test_a_target_in_two_processes_is_measured_like_any_other(home, finished):
    """Check that a target in two processes gives the tokens of one process.

    The rows name the two processes. The drafters run in this process and in a worker.
    """
    target = TargetConfig(
        path=str(home / "target"), dtype="float64", device="cpu", parallel="tp", processes=2
    )
    wall = {"use": str(home / "shallow"), "schedule": "pearl_wall", "draft_cores": 0}
    changes = {
        "temperatures": [0.0],
        "num_draft_tokens": [3],
        "drafters": [str(home / "shallow"), wall],
    }
    folder = run(config(home, "split", target=target, **changes))
    main = [row for row in read_rows(folder / "results.jsonl") if row.part == "main"]
    assert [row.drafter for row in main] == ["shallow", "shallow+pearl_wall", "prompt_lookup"]
    for row in main:
        assert row.lossless == "equal"
        assert row.backend == "native (tp over 2 processes)"
    report = (folder / "report.html").read_text()
    assert "native (tp over 2 processes) backend" in report
    # waiting for the other rank is not a disturbance
    assert "Other processes used this machine" not in report
    own = {
        r.prompt_id: r.tokens
        for r in read_records(finished / "records.jsonl")
        if r.temperature == 0
    }
    assert all(
        record.tokens == own[record.prompt_id] for record in read_records(folder / "records.jsonl")
    )


def test_a_drafter_in_a_worker_gets_another_card(home, monkeypatch):
    import jobs.drafters as drafter_list

    monkeypatch.setattr(drafter_list, "instantiate", lambda made: made)
    target = TargetConfig(path=str(home / "target"), device="cuda")
    entries = [
        str(home / "shallow"),
        {"use": str(home / "shallow"), "schedule": "pearl_wall"},
        {
            "use": str(home / "shallow"),
            "schedule": "pearl_wall",
            "device": "cpu",
            "name": "where it says",
        },
    ]
    mappings = describe(entries, target, False)
    made = build(mappings, uses(mappings, DrafterUse()), home / "target", {"cuda": "cuda:2"})
    assert [one["device"] for one in made.values()] == ["cuda", "cuda:2", "cpu"]


def test_an_interrupted_run_resumes_and_measures_nothing_twice(home, monkeypatch):
    cfg = config(home, "interrupted", temperatures=[0.0], num_draft_tokens=[2])
    whole = run(cfg)
    lines = (whole / "records.jsonl").read_text().splitlines()
    assert len(lines) == 2 * (1 + 2 * len(GAMMAS)) + 3 * (1 + 2)
    manifest = json.loads((whole / "manifest.json").read_text())
    (whole / "manifest.json").write_text(json.dumps({**manifest, "finished": False}))
    costs = (whole / "parts.jsonl").read_bytes()
    # Cut within the last unit, after two and a half of its lines.
    (whole / "records.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    run(cfg)
    again = (whole / "records.jsonl").read_text().splitlines()
    assert len(again) == len(lines)
    # timings included: not measured again
    assert again[: len(lines) - 3] == lines[: len(lines) - 3]
    assert again[-1] != lines[-1]
    assert (whole / "parts.jsonl").read_bytes() == costs


def test_a_wrong_output_ends_with_an_error_after_the_report(home, monkeypatch):
    import eval.measure.measurement as measure

    real_decode = measure.decode

    def wrong_decode(target, drafter, prompts, settings, **options):
        rows = real_decode(target, drafter, prompts, settings, **options)
        if drafter is not None and drafter.name == "shallow":
            rows[0].tokens[5] = (rows[0].tokens[5] + 1) % target.vocab_size
        return rows

    monkeypatch.setattr(measure, "decode", wrong_decode)
    cfg = config(
        home, "wrong", temperatures=[0.0], num_draft_tokens=[2], prompt_lookup_control=False
    )
    with pytest.raises(UserError, match="shallow differs from the target's"):
        run(cfg)
    row = next(r for r in read_rows(home / "wrong" / "results.jsonl") if r.part == "main")
    assert row.lossless == "differs"
    assert "token 5" in row.lossless_detail
    assert "NOT LOSSLESS" in (home / "wrong" / "report.html").read_text()


def test_the_fastest_of_repeated_generations_counts(home, monkeypatch):
    """Check that each record has the time of the fastest run of its repeated generation.

    The first run of every generation is slowed down by 5 s.
    """
    real, calls = Bench.decode, []

    def slow_at_first(self, condition, arm, prompts, requests):
        rows = real(self, condition, arm, prompts, requests)
        if (arm, requests) not in calls:
            for row in rows:
                row.decode_seconds += 5.0
        calls.append((arm, requests))
        return rows

    monkeypatch.setattr("eval.measure.session.warm_up", lambda *_: None)
    monkeypatch.setattr(Bench, "decode", slow_at_first)
    folder = run(
        config(home, "repeated", repeats=2, temperatures=[0.0], drafters=[str(home / "shallow")])
    )
    records = read_records(folder / "records.jsonl")
    assert len(records) == 2 * 5 + 3 * 3  # units x arms, of the sweep and of the main part
    assert len(calls) == 2 * len(records)
    assert max(record.decode_seconds for record in records) < 5.0
    assert "each 2 times, of which the fastest counts" in (folder / "report.html").read_text()


def test_a_repeat_that_differs_is_not_hidden_by_a_faster_one(home, monkeypatch):
    real, seen = Bench.decode, []

    def wrong_once(self, condition, arm, prompts, requests):
        rows = real(self, condition, arm, prompts, requests)
        if arm.drafter == "shallow" and (arm, requests) not in seen:
            seen.append((arm, requests))
            rows[0].tokens[-1] += 1
            rows[0].decode_seconds += 5.0
        return rows

    monkeypatch.setattr("eval.measure.session.warm_up", lambda *_: None)
    monkeypatch.setattr(Bench, "decode", wrong_once)
    with pytest.raises(UserError, match="the output with shallow differs from the target's"):
        run(
            config(
                home, "wrong_once", repeats=2, temperatures=[0.0], drafters=[str(home / "shallow")]
            )
        )


def test_coupled_sampling_is_compared_token_by_token(home):
    folder = run(
        config(
            home, "coupled", temperatures=[1.0], verify="coupled", num_draft_tokens=[3], sweep=[]
        )
    )
    for row in read_rows(folder / "results.jsonl"):
        assert (row.verify, row.lossless) == ("coupled", "equal")


def test_batches_are_units_and_equal_single_rows(home, finished):
    folder = run(
        config(home, "batched", batch_sizes=[2], temperatures=[0.0], num_draft_tokens=[2], sweep=[])
    )
    records = read_records(folder / "records.jsonl")
    assert {r.unit for r in records} == {0, 1}  # five prompts fill two batches of two
    single = {
        r.prompt_id: r.tokens
        for r in read_records(finished / "records.jsonl")
        if r.temperature == 0
    }
    assert all(r.tokens == single[r.prompt_id] for r in records)
    assert all(
        row.lossless == "equal" and row.prompts == 4 for row in read_rows(folder / "results.jsonl")
    )


def test_later_turns_follow_the_targets_answers(home, capsys):
    tiny.prompts(home / "turns.jsonl", count=2, turns=2)
    benchmark = BenchmarkConfig(path=str(home / "turns.jsonl"), turns="all")
    changes = {"benchmark": benchmark, "temperatures": [0.0], "num_draft_tokens": [2], "sweep": []}
    records = read_records(run(config(home, "turns", **changes)) / "records.jsonl")
    run(config(home, "planned", dry_run=True, **changes))
    assert (
        f"would decode {len(records)} batches, at most {12 * len(records)} tokens"
        in capsys.readouterr().out
    )
    words = tiny.tokenizer()
    for record in records:
        if record.turn == 1:
            first = next(
                r
                for r in records
                if r.arm == BASELINE and r.prompt_id == record.prompt_id and r.turn == 0
            )
            answer = words.decode(first.tokens, skip_special_tokens=True)
            number = record.prompt_id[1]
            asked = f"<u>Question {number}, part 0?<a>{answer}</s><u>Question {number}, part 1?<a>"
            assert record.prompt_tokens == len(words(asked, add_special_tokens=False)["input_ids"])
    assert {r.turn for r in records} == {0, 1}


def test_a_dry_run_prints_the_plan_and_writes_nothing(home, capsys):
    run(config(home, "dry", dry_run=True))
    text = capsys.readouterr().out
    # Per temperature: 2 prompts x (baseline + 2 drafters x 2 gammas) + 3 prompts x (baseline + 2
    # drafters).
    assert "would decode 38 batches, at most 456 tokens" in text
    run(config(home, "dry", dry_run=True, temperatures=[0.0], batch_sizes=[1, 2]))
    # The first 19 again, and in batches of two: one x (baseline + 4 arms) and one x (baseline + 2).
    assert "would decode 27 batches, at most 420 tokens" in capsys.readouterr().out
    assert not (home / "dry").exists()
    # The plan as far as it is known without the target.
    run(config(home, "dry", dry_run=True, target=TargetConfig(path="/nowhere/llama")))
    printed = capsys.readouterr().out
    assert re.search(
        r"would measure the drafters \(1 given\) on .* \(at most 64 prompts\), .* each; .*T=1",
        printed,
    ), printed
    assert "/nowhere/llama is not there" in printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": []}, "temperatures"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"num_draft_tokens": [0]}, "num_draft_tokens"),
        ({"verify": "lenient"}, "token, block, coupled, typical, lossy_lenience:L"),
        (
            {"target": TargetConfig(path="nowhere", execution="fast")},
            "auto, eager, fused, graph or compiled",
        ),
        ({"max_new_tokens": 1}, "max_new_tokens"),
        (
            {"stopping": "fixed", "stopping_threshold": 0.5},
            "stopping_threshold is 0.5, but stopping 'fixed' has no threshold",
        ),
        ({"stopping_threshold": 0.5}, "stopping 'fixed' has no threshold"),
        ({"sweep": []}, "num_draft_tokens is empty"),
        ({"sweep_prompts": 5}, "prompts are too few"),
        ({"drafters": ["/nowhere/at/all"]}, "neither a folder"),
        ({"target": TargetConfig(path="/nowhere", parallel="rows")}, "parallel 'rows' is unknown"),
        (
            {"target": TargetConfig(path="/nowhere", parallel="tp", processes=2, backend="hf")},
            "needs the native backend, found hf",
        ),
        (
            {"target": TargetConfig(path="/nowhere", device="cpu", parallel="tp")},
            "needs at least 2 processes",
        ),
    ],
)
def test_impossible_settings_are_refused_with_a_reason(home, changes, message):
    with pytest.raises(UserError, match=message):
        run(config(home, "refused", dry_run=True, **changes))


def test_recorded_steps_give_the_same_rows(home, finished):
    target = TargetConfig(
        path=str(home / "target"), dtype="float64", device="cpu", execution="graph"
    )
    rows = read_rows(run(config(home, "graph", target=target)) / "results.jsonl")
    plain = read_rows(finished / "results.jsonl")
    assert {row.backend for row in rows} == {"native graph"} and {row.backend for row in plain} == {
        "native"
    }
    assert all(row.lossless == ("by rule" if row.temperature else "equal") for row in rows)
    swept = [
        [(row.drafter, row.alpha, row.tau) for row in found if row.part == "sweep"]
        for found in (rows, plain)
    ]
    assert swept[0] == swept[1] != []


def test_a_run_that_is_refused_after_loading_leaves_no_folder(home):
    cfg = config(home, "nothing_left", sweep_prompts=5)
    with pytest.raises(UserError, match="prompts are too few"):
        run(cfg)
    gc.collect()  # the traceback holds the folder
    assert not Path(cfg.output_dir).exists()


def test_a_drafter_of_another_tokenizer_is_refused(home, stories260k):
    with pytest.raises(UserError, match="their tokenizers differ in .* ids"):
        run(config(home, "foreign", dry_run=True, drafters=[str(stories260k)]))


# -------------------------------------------------------------------------------------- small parts
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ties_are_judged_by_the_scores_of_decoding(home, temperature):
    target = load_target(home / "target", dtype="float64")
    settings = Settings(max_new_tokens=12, temperature=temperature, verify="coupled", seed=5)
    ids = tiny.tokenizer()("<u>Why?<a>", add_special_tokens=False)["input_ids"]
    chosen = decode(target, None, [ids], settings, request_ids=[77])[0].tokens
    for at, token in enumerate(chosen):
        scores_V = choice_scores(target, [*ids, *chosen[:at]], settings, request=77)
        assert int(scores_V.argmax()) == token
        assert top_two_gap(scores_V) == pytest.approx(
            float(scores_V.max() - scores_V.sort().values[-2])
        )


def test_the_order_rotates_through_all_arms():
    arms = [BASELINE, Arm("a", 1), Arm("b", 2)]
    firsts = [rotate(arms, unit)[0] for unit in range(6)]
    assert firsts == arms + arms
    assert all(sorted(map(str, rotate(arms, unit))) == sorted(map(str, arms)) for unit in range(6))


def test_real_prompts_render_for_a_real_target(shared_data, chat24m):
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(chat24m)
    cfg = BenchmarkConfig(path=str(shared_data / "eval" / "mt_bench.jsonl"), turns="all")
    found = load_benchmark(cfg, words, max_length=2048, max_new_tokens=64, limit=10)
    assert len(found.prompts) == 10
    assert {len(prompt.turns) for prompt in found.prompts} == {2}

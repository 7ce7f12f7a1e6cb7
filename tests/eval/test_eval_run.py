"""`eval.run` from end to end on a tiny random LLaMA: what it measures, keeps, refuses and takes up again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from decoding.errors import UserError
from decoding.loop import Settings, decode
from decoding.target import load_target
from eval.benchmarks import load_benchmark, render_turns
from eval.config import BenchmarkConfig, EvalConfig
from eval.drafters import Use, build, describe, uses
from eval.measure import choice_scores, rotate, top_two_gap
from eval.records import BASELINE, Arm, read_records
from eval.run import run
from eval.schema import read_rows
from training.config import TargetConfig

from . import tiny

GAMMAS = [1, 3]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval_run")
    tiny.save(folder / "target", layers=3)
    tiny.save(folder / "shallow", layers=1)
    tiny.prompts(folder / "prompts.jsonl", count=5)
    return folder


def config(home, name, **changes):
    values = {
        "job": "eval.run",
        "output_dir": str(home / name),
        "target": TargetConfig(path=str(home / "target"), dtype="float64", device="cpu"),
        "benchmark": BenchmarkConfig(path=str(home / "prompts.jsonl")),
        "drafters": [str(home / "shallow")],
        "sweep": GAMMAS,
        "sweep_prompts": 2,
        "max_new_tokens": 12,
        "timing_repeats": 2,
        "bootstrap_resamples": 50,
        "stop_at_eos": False,
        "stopping": "fixed",  # so that counts do not hang on the clock
    }
    return EvalConfig(**{**values, **changes})


@pytest.fixture(scope="module")
def finished(home):
    return run(config(home, "finished"))


def test_a_run_leaves_rows_records_costs_and_a_report(finished):
    rows = read_rows(finished / "results.jsonl")
    swept = {(r.drafter, r.temperature, r.num_draft_tokens) for r in rows if r.part == "sweep"}
    names = ("shallow", "prompt_lookup")
    assert swept == {(name, temperature, gamma) for name in names for temperature in (0.0, 1.0) for gamma in GAMMAS}
    main = [r for r in rows if r.part == "main"]
    assert [(r.drafter, r.temperature) for r in main] == [(n, t) for t in (0.0, 1.0) for n in names]
    for row in main:
        assert row.prompts == 3  # the sweep's two are not among them
        assert row.num_draft_tokens in GAMMAS
        assert row.tokens == 3 * 12
        assert set(row.V) == set(range(1, 5))
        assert row.V[1] == 1.0
        assert row.lossless == ("by rule" if row.temperature else "equal")
    assert (finished / "report.html").stat().st_size > 10_000
    assert (finished / "parts.jsonl").is_file()
    assert json.loads((finished / "manifest.json").read_text())["finished"]


def test_every_arm_decodes_every_prompt_and_greedy_outputs_are_the_targets_own(finished):
    records = read_records(finished / "records.jsonl")
    greedy = [r for r in records if r.temperature == 0]
    own = {r.prompt_id: r.tokens for r in greedy if r.arm == BASELINE}
    assert len(own) == 5
    assert all(r.tokens == own[r.prompt_id] for r in greedy)
    for record in records:
        assert record.decode_seconds > 0
        assert record.rounds + sum(record.accepted_by_depth) == len(record.tokens) == 12


def test_a_finished_run_is_not_measured_again(home, finished, capsys):
    before = (finished / "records.jsonl").read_bytes()
    run(config(home, "finished"))
    assert "nothing is measured again" in capsys.readouterr().out
    assert (finished / "records.jsonl").read_bytes() == before


def test_a_target_in_two_processes_is_measured_like_any_other(home, finished):
    """Drafters in this process and in a worker of their own; the tokens are those of the target in one process."""
    target = TargetConfig(path=str(home / "target"), dtype="float64", device="cpu", parallel="tp", processes=2)
    wall = {"use": str(home / "shallow"), "schedule": "pearl_wall", "draft_cores": 0}
    changes = {"temperatures": [0.0], "num_draft_tokens": [3], "drafters": [str(home / "shallow"), wall]}
    folder = run(config(home, "split", target=target, **changes))
    main = [row for row in read_rows(folder / "results.jsonl") if row.part == "main"]
    assert [row.drafter for row in main] == ["shallow", "shallow+pearl_wall", "prompt_lookup"]
    for row in main:
        assert row.lossless == "equal"
        assert row.backend == "native (tp over 2 processes)"
    report = (folder / "report.html").read_text()
    assert "native (tp over 2 processes) backend" in report
    assert "Other processes used this machine" not in report  # waiting for the other rank is no sign of that
    own = {r.prompt_id: r.tokens for r in read_records(finished / "records.jsonl") if r.temperature == 0}
    assert all(record.tokens == own[record.prompt_id] for record in read_records(folder / "records.jsonl"))


def test_a_drafter_that_works_beside_the_target_gets_another_card(home, monkeypatch):
    import eval.drafters as drafter_list

    monkeypatch.setattr(drafter_list, "instantiate", lambda made: made)
    target = TargetConfig(path=str(home / "target"), device="cuda")
    entries = [
        str(home / "shallow"),
        {"use": str(home / "shallow"), "schedule": "pearl_wall"},
        {"use": str(home / "shallow"), "schedule": "pearl_wall", "device": "cpu", "name": "where it says"},
    ]
    mappings = describe(entries, target, False)
    made = build(mappings, uses(mappings, Use()), home / "target", {"cuda": "cuda:2"})
    assert [one["device"] for one in made.values()] == ["cuda", "cuda:2", "cpu"]


def test_an_interrupted_run_goes_on_and_measures_nothing_twice(home, monkeypatch):
    cfg = config(home, "interrupted", temperatures=[0.0], num_draft_tokens=[2])
    whole = run(cfg)
    lines = (whole / "records.jsonl").read_text().splitlines()
    assert len(lines) == 2 * (1 + 2 * len(GAMMAS)) + 3 * (1 + 2)
    manifest = json.loads((whole / "manifest.json").read_text())
    (whole / "manifest.json").write_text(json.dumps({**manifest, "finished": False}))
    costs = (whole / "parts.jsonl").read_bytes()
    # Cut within the last unit: its first two lines stand, and half of the third.
    (whole / "records.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    run(cfg)
    again = (whole / "records.jsonl").read_text().splitlines()
    assert len(again) == len(lines)
    assert again[: len(lines) - 3] == lines[: len(lines) - 3]  # timings included: not measured again
    assert again[-1] != lines[-1]
    assert (whole / "parts.jsonl").read_bytes() == costs


def test_a_wrong_output_ends_with_an_error_after_the_report(home, monkeypatch):
    import eval.measure as measure

    honest = measure.decode

    def lying(target, drafter, prompts, settings, **options):
        rows = honest(target, drafter, prompts, settings, **options)
        if drafter is not None and drafter.name == "shallow":
            rows[0].tokens[5] = (rows[0].tokens[5] + 1) % target.vocab_size
        return rows

    monkeypatch.setattr(measure, "decode", lying)
    cfg = config(home, "wrong", temperatures=[0.0], num_draft_tokens=[2], prompt_lookup_control=False)
    with pytest.raises(UserError, match="shallow is not the target's own"):
        run(cfg)
    row = next(r for r in read_rows(home / "wrong" / "results.jsonl") if r.part == "main")
    assert row.lossless == "differs"
    assert "token 5" in row.lossless_detail
    assert "NOT LOSSLESS" in (home / "wrong" / "report.html").read_text()


def test_coupled_sampling_is_compared_token_by_token(home):
    folder = run(config(home, "coupled", temperatures=[1.0], verify="coupled", num_draft_tokens=[3], sweep=[]))
    for row in read_rows(folder / "results.jsonl"):
        assert (row.verify, row.lossless) == ("coupled", "equal")


def test_batches_are_units_and_equal_single_rows(home, finished):
    folder = run(config(home, "batched", batch_sizes=[2], temperatures=[0.0], num_draft_tokens=[2], sweep=[]))
    records = read_records(folder / "records.jsonl")
    assert {r.unit for r in records} == {0, 1}  # five prompts fill two batches of two
    single = {r.prompt_id: r.tokens for r in read_records(finished / "records.jsonl") if r.temperature == 0}
    assert all(r.tokens == single[r.prompt_id] for r in records)
    assert all(row.lossless == "equal" and row.prompts == 4 for row in read_rows(folder / "results.jsonl"))


def test_later_turns_see_the_targets_own_answers(home):
    tiny.prompts(home / "turns.jsonl", count=2, turns=2)
    benchmark = BenchmarkConfig(path=str(home / "turns.jsonl"), turns="all")
    cfg = config(home, "turns", benchmark=benchmark, temperatures=[0.0], num_draft_tokens=[2], sweep=[])
    records = read_records(run(cfg) / "records.jsonl")
    words = tiny.tokenizer()
    for record in records:
        if record.turn == 1:
            first = next(r for r in records if r.arm == BASELINE and r.prompt_id == record.prompt_id and r.turn == 0)
            answer = words.decode(first.tokens, skip_special_tokens=True)
            number = record.prompt_id[1]
            asked = f"<u>Question {number}, part 0?<a>{answer}</s><u>Question {number}, part 1?<a>"
            assert record.prompt_tokens == len(words(asked, add_special_tokens=False)["input_ids"])
    assert {r.turn for r in records} == {0, 1}


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(home, capsys):
    run(config(home, "dry", dry_run=True))
    text = capsys.readouterr().out
    # Per temperature: 2 prompts x (baseline + 2 drafters x 2 gammas) + 3 prompts x (baseline + 2 drafters).
    assert "would decode 38 batches" in text
    assert not (home / "dry").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": []}, "temperatures"),
        ({"batch_sizes": [0]}, "batch_sizes"),
        ({"num_draft_tokens": [0]}, "num_draft_tokens"),
        ({"verify": "typical"}, "token or block or coupled"),
        ({"target": TargetConfig(path="nowhere", execution="fast")}, "eager or graph or compiled"),
        ({"max_new_tokens": 1}, "max_new_tokens"),
        ({"sweep": []}, "num_draft_tokens is empty"),
        ({"sweep_prompts": 5}, "prompts are too few"),
        ({"drafters": ["/nowhere/at/all"]}, "neither a folder"),
        ({"target": TargetConfig(path="/nowhere", parallel="rows")}, "parallel 'rows' is unknown"),
        (
            {"target": TargetConfig(path="/nowhere", parallel="tp", processes=2, backend="hf")},
            "native backend, not of hf",
        ),
        ({"target": TargetConfig(path="/nowhere", device="cpu", parallel="tp")}, "needs processes=N"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_reason(home, changes, message):
    with pytest.raises(UserError, match=message):
        run(config(home, "refused", dry_run=True, **changes))


def test_recorded_steps_give_the_same_rows(home, finished):
    target = TargetConfig(path=str(home / "target"), dtype="float64", device="cpu", execution="graph")
    rows = read_rows(run(config(home, "graph", target=target)) / "results.jsonl")
    plain = read_rows(finished / "results.jsonl")
    assert {row.backend for row in rows} == {"native graph"} and {row.backend for row in plain} == {"native"}
    assert all(row.lossless == ("by rule" if row.temperature else "equal") for row in rows)
    swept = [[(row.drafter, row.alpha, row.tau) for row in found if row.part == "sweep"] for found in (rows, plain)]
    assert swept[0] == swept[1] != []


def test_a_drafter_of_another_tokenizer_is_refused(home, stories260k):
    with pytest.raises(UserError, match="their tokenizers differ in .* ids"):
        run(config(home, "foreign", dry_run=True, drafters=[str(stories260k)]))


# ---------------------------------------------------------------------------------------------- small parts
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_scores_behind_a_tie_are_those_that_decoding_chose_by(home, temperature):
    target = load_target(home / "target", dtype="float64")
    settings = Settings(max_new_tokens=12, temperature=temperature, verify="coupled", seed=5)
    ids = tiny.tokenizer()("<u>Why?<a>", add_special_tokens=False)["input_ids"]
    chosen = decode(target, None, [ids], settings, request_ids=[77])[0].tokens
    for at, token in enumerate(chosen):
        scores_V = choice_scores(target, [*ids, *chosen[:at]], settings, request=77)
        assert int(scores_V.argmax()) == token
        assert top_two_gap(scores_V) == pytest.approx(float(scores_V.max() - scores_V.sort().values[-2]))


def test_drafters_by_folder_by_name_and_by_mapping(home):
    target = TargetConfig(path=str(home / "target"), dtype="bfloat16", device="cpu")
    mine = {"_target_": "decoding.chain.ChainDrafter", "folder": str(home / "shallow"), "name": "mine"}
    found = describe([str(home / "shallow"), mine], target, control=True)
    assert list(found) == ["shallow", "mine", "prompt_lookup"]
    assert found["shallow"]["dtype"] == "bfloat16"  # a folder runs as the target does
    assert list(describe(["prompt_lookup"], target, control=True)) == ["prompt_lookup"]
    for wrong, message in (
        (["a", "a"], "neither"),
        ([3], "expected a folder"),
        ([{"folder": "x"}], "without `use` or `_target_`"),
    ):
        with pytest.raises(UserError, match=message):
            describe(wrong, target, control=False)
    shutil.copytree(home / "shallow", home / "cut")
    weights = home / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    mappings = describe([str(home / "cut")], target, False)
    with pytest.raises(UserError, match="model.safetensors: has .* bytes, but its header promises"):
        build(mappings, uses(mappings, Use()), home / "target")
    mappings = describe([{"use": str(home / "shallow"), "depth": 3}], target, False)
    with pytest.raises(UserError, match="shallow could not be made from .*unexpected keyword argument 'depth'"):
        build(mappings, uses(mappings, Use()), home / "target")
    tree = describe([{"use": "multi_candidate", "folder": str(home / "shallow"), "branching": [2]}], target, False)
    assert tree["multi_candidate"]["branching"] == [2]
    assert tree["multi_candidate"]["dtype"] == "bfloat16"
    with pytest.raises(
        UserError, match=r"multi_candidate.yaml: Missing mandatory value: folder.*use: multi_candidate, folder"
    ):
        describe(["multi_candidate"], target, False)
    given = describe([{"use": str(home / "shallow"), "stopping": "entropy"}], target, True)
    assert list(given) == ["shallow+entropy", "prompt_lookup"]
    used = uses(given, Use(schedule="pearl_virtual"))
    assert used == {"shallow+entropy": Use("entropy", None, "pearl_virtual"), "prompt_lookup": Use()}
    with pytest.raises(UserError, match="stopping 'mood' is unknown, expected one of fixed"):
        uses(describe([{"use": str(home / "shallow"), "stopping": "mood"}], target, False), Use())
    with pytest.raises(UserError, match="schedule 'both' is unknown, expected one of serial, pearl_virtual"):
        Use(schedule="both")
    with pytest.raises(UserError, match="two entries are called 'shallow'"):
        describe([str(home / "shallow")] * 2, target, control=False)
    with pytest.raises(UserError, match="is empty"):
        describe([], target, control=False)


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


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_schedules_and_policies_are_rows_of_one_run(home, tmp_path):
    shallow = str(home / "shallow")
    ways = [{"use": shallow}, {"use": shallow, "schedule": "pearl_virtual"}, {"use": shallow, "stopping": "fixed"}]
    folder = run(config(home, "ways", drafters=ways, stopping=None, temperatures=[0.0, 1.0], verify="coupled"))
    rows = read_rows(folder / "results.jsonl")
    names = {"shallow", "shallow+pearl_virtual", "shallow+fixed", "prompt_lookup"}
    assert {row.drafter for row in rows} == names
    assert {row.schedule for row in rows if row.drafter == "shallow+pearl_virtual"} == {"pearl_virtual"}
    assert all(row.lossless in ("equal", "ties") for row in rows)
    assert all(0 <= row.overhead < 1 for row in rows if row.schedule == "pearl_virtual")
    assert set(json.loads((folder / "costs.json").read_text())) == {"shallow, batch 1"}
    assert {row.drafter: row.stopping for row in rows} == {**dict.fromkeys(names, "fixed"), "shallow": "cost_ratio"}


def test_the_drafter_alone_is_the_other_end_of_the_scale(home):
    """Its text is its own model's, and no row is asked to equal the target's by it."""
    shallow = str(home / "shallow")
    ways = [{"use": shallow, "stopping": "fixed"}, {"use": shallow, "schedule": "alone", "name": "small"}]
    folder = run(config(home, "alone", drafters=ways, prompt_lookup_control=False, temperatures=[0.0], show_texts=1))
    records = read_records(folder / "records.jsonl")
    model, target = load_target(home / "shallow", dtype="float64"), load_target(home / "target", dtype="float64")
    bench = load_benchmark(
        BenchmarkConfig(path=str(home / "prompts.jsonl")), tiny.tokenizer(), max_length=200, max_new_tokens=12, limit=0
    )
    prompt = next(p for p in bench.prompts if p.id == records[-1].prompt_id)
    ids = render_turns(prompt.turns, [], tiny.tokenizer(), "chat")
    for name, alone in (("small", model), ("autoregressive", target)):
        (own,) = decode(alone, None, [ids], Settings(max_new_tokens=12))
        assert [r.tokens for r in records if (r.drafter, r.prompt_id) == (name, prompt.id)] == [own.tokens]
    (row,) = [row for row in read_rows(folder / "results.jsonl") if row.drafter == "small"]
    assert (row.lossless, row.part, row.num_draft_tokens, row.tau) == ("another model", "main", 0, 1.0)
    assert row.predicted_speedup is None
    page = (folder / "report.html").read_text()
    assert "Who wrote what" in page
    assert 'class="drafted"' in page
    with pytest.raises(UserError, match="schedule=alone, but a PromptLookup cannot write a text"):
        run(config(home, "lookup", drafters=[{"use": "prompt_lookup", "schedule": "alone", "name": "x"}]))


def test_samples_of_a_prompt_differ_and_count_as_one_prompt(home):
    folder = run(config(home, "samples", samples=3, temperatures=[0.0, 1.0], verify="coupled"))
    records = [record for record in read_records(folder / "records.jsonl") if record.part == "main"]
    drafted = [record for record in records if record.drafter == "shallow"]
    greedy, sampled = ([r for r in drafted if r.temperature == t] for t in (0.0, 1.0))
    assert {r.sample for r in greedy} == {0}
    assert {r.sample for r in sampled} == {0, 1, 2}
    one = [tuple(r.tokens) for r in sampled if r.prompt_id == sampled[0].prompt_id]
    assert len(set(one)) == len(one) == 3, "each sample has noise of its own"
    for row in read_rows(folder / "results.jsonl"):
        assert row.lossless == "equal"
        if row.part == "main":
            assert row.prompts == 3
            assert row.tokens == 12 * 3 * (3 if row.temperature else 1)


def test_overlapped_rows_are_replayed(home):
    shallow = str(home / "shallow")
    names = ["pearl_virtual", "pearl_virtual_wo_pre", "pearl_virtual_wo_post", "pearl_plus_virtual"]
    ways = [{"use": shallow, "schedule": name, "name": name} for name in names]
    folder = run(config(home, "replayed", drafters=ways, temperatures=[0.0], sweep=[3]))
    rows = {row.drafter: row for row in read_rows(folder / "results.jsonl") if row.part == "main"}
    assert all(rows[name].replayed_speedup > 0 for name in names[:3])
    assert rows["pearl_plus_virtual"].replayed_speedup is None, "costs decide there, not the trace alone"
    assert rows["prompt_lookup"].replayed_speedup is None


def test_pearls_suite_runs_every_benchmark_on_any_pair_of_models(home, tmp_path):
    """Stages that are the called job itself take its overrides, and their own values."""
    for name in ("humaneval", "gsm8k_test"):
        tiny.prompts(tmp_path / f"{name}.jsonl", count=3)
    given = [
        *(
            "+experiment=pearl_comparison",
            f"target.path={home / 'target'}",
            "target.dtype=float64",
            "target.device=cpu",
        ),
        *(
            f"draft_model={home / 'shallow'}",
            f"benchmark_folder={tmp_path}",
            "stages=['eval.run:humaneval','eval.run:gsm8k']",
        ),
        *("sweep=[]", "num_draft_tokens=[2]", "max_prompts=2", "sweep_prompts=0", "max_new_tokens=4", "samples=2"),
        *("timing_repeats=1", "bootstrap_resamples=50", f"output_dir={tmp_path / 'out'}", "threads=1"),
        "drafters=[{use: ${draft_model}, schedule: alone, name: small}, {use: ${draft_model}, schedule: pearl_virtual}]",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "eval.run", *given], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = {name: read_rows(tmp_path / "out" / name / "results.jsonl") for name in ("humaneval", "gsm8k")}
    assert [found[0].benchmark for found in rows.values()] == ["HumanEval", "GSM8K"]
    lengths = [read_records(tmp_path / "out" / name / "records.jsonl")[0].prompt_tokens for name in rows]
    assert lengths[1] == lengths[0] + len("Q: \nA:"), "only GSM8K's prompts stand in a frame"

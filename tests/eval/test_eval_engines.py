"""Engines beside our own loop: comparison of acceptance, and real runs of them."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import fisher_exact
from transformers import AutoModelForCausalLM

from decoding.errors import UserError
from decoding.models.draft_vocabulary import restrict_head
from eval.config import BenchmarkConfig
from eval.engines.agreement import (
    AGREES,
    DIFFERS,
    TOO_FEW,
    Counts,
    compare,
    counts_of,
    fisher,
)
from eval.engines.measure import FILE
from eval.engines.ours import OurEngine
from eval.engines.plan import EngineArm, EnginePlan, plan_engines
from eval.measure.records import Condition
from eval.measure.setup import load
from eval.run import run
from eval.statistics.schema import read_all_rows, read_rows
from heads.block.kind import KIND as BLOCK
from heads.block.shape import BlockConfig
from heads.eagle.kind import KIND as EAGLE
from heads.eagle.model import EagleConfig
from heads.medusa.kind import KIND as MEDUSA
from heads.medusa.model import MedusaConfig
from jobs.drafters import CONTROL
from serving.engines.interface import Sampling
from tests.support import tiny_folders as tiny
from tests.support.engine_evaluations import engine_config, swap_folder
from tests.support.engine_folders import write_broken, write_drafter, write_target
from training.heads.checkpoint import save_head
from training.heads.kind import HeadKind

# Noise with which the first token of a draft is accepted in half of the rounds or more.
NOISE = 0.05


@pytest.fixture(scope="module")
def engine_home(tmp_path_factory):
    home = tmp_path_factory.mktemp("engines")
    write_target(home / "target")
    write_drafter(home / "target", home / "noisy", NOISE)
    tiny.prompts(home / "prompts.jsonl", count=5)
    write_broken(home / "noisy", home / "broken")
    return home


# ------------------------------------------------------------------------------- acceptance agrees
@pytest.mark.parametrize("table", [(3, 10, 8, 12), (0, 5, 5, 5), (7, 7, 9, 9), (40, 300, 80, 305)])
def test_fishers_test_equals_scipys(table):
    x, n, u, m = table
    assert fisher(x, n, u, m) == pytest.approx(fisher_exact([[x, n - x], [u, m - u]]).pvalue)


def test_equal_rates_agree_and_a_lower_one_differs_at_its_depth():
    ours = Counts([300, 200, 120], [200, 120, 80])
    assert compare(Counts([305, 194, 114], [194, 114, 75]), ours).word == AGREES
    found = compare(Counts([300, 200, 60], [200, 60, 40]), ours)
    assert (found.word, found.detail) == (
        DIFFERS,
        "differs at depth 2 (60 of 200 against 120 of 200)",
    )


def test_few_tests_decide_nothing_unless_they_differ():
    sums = Counts([132], [8]), Counts([144], [9])  # of some 35 rounds of four tokens
    assert compare(*sums).word == AGREES and compare(*sums, per_round=4).word == TOO_FEW
    assert compare(Counts([20], [10]), Counts([20], [11])).word == TOO_FEW
    assert compare(Counts([20], [0]), Counts([20], [20])).word == DIFFERS


def test_a_depth_tests_what_the_one_before_accepted_if_an_engine_reports_no_tests():
    assert counts_of([None, None], [[3, 1], [2, 2]], [5, 4]) == Counts([9, 5], [5, 3])
    assert counts_of([[4, 1]], [[1, 1]], [None]) == Counts([4, 1], [1, 1])
    assert counts_of([None], [None], [5]) is None


# --------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "vlm"}, "engine is vlm, expected one of ours, hf, vllm"),
        ({"engine": []}, r"engine is \[\], expected one of"),
        ({"engine": ["hf", "hf"]}, "a list of different ones"),
        ({"engine_python": {"vlm": "python"}}, "engine_python has vlm, expected the name"),
        ({"engine_target": {"vlm": "x.gguf"}}, "engine_target has vlm, expected the name"),
        ({"engine_target": {"hf": "/no/x"}}, "engine_target.hf is /no/x, which does not exist"),
        (
            {"benchmark": BenchmarkConfig(path="x", stop_strings=["Q:"])},
            "benchmark.stop_strings is .*, which only our own loop has",
        ),
        ({"min_p": 0.1}, "min_p is 0.1, which only our own loop has"),
        ({"max_seconds": 5.0}, "max_seconds is 5.0, which only our own loop has"),
        (
            {"engine": "vllm", "engine_python": {"vllm": "/nowhere/python"}},
            r"engine vllm is not installed: /nowhere/python cannot be run .* "
            r"Install it with ./scripts/engines/vllm.sh, or .* engine_python.vllm=PATH",
        ),
    ],
)
def test_bad_settings_are_refused_before_a_measurement(engine_home, changes, words):
    with pytest.raises(UserError, match=words):
        run(engine_config(engine_home, "refused", **changes))


def test_a_missing_llama_server_is_refused_before_a_measurement(engine_home, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("LLAMA_SERVER", str(engine_home / "none"))
    cfg = engine_config(engine_home, "no_server", engine="llama_cpp")
    with pytest.raises(UserError, match=r"llama-server is not at .*Run ./scripts/engines/llama_c"):
        run(cfg)
    assert not (Path(cfg.output_dir) / "manifest.json").exists()


@pytest.mark.parametrize("dry_run", [False, True])
def test_all_missing_engines_are_named_before_any_model_is_read(engine_home, dry_run):
    nowhere = str(engine_home / "nowhere")
    changes = {"drafters": [nowhere], "dry_run": dry_run}
    pythons = {"engine_python": {"vllm": nowhere, "openvino": nowhere}}
    missing = engine_config(
        engine_home, "missing", engine=["ours", "hf", "vllm", "openvino"], **changes, **pythons
    )
    with pytest.raises(UserError) as error:
        run(missing)
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "engine vllm is not installed",
        "engine openvino is not installed",
    ]
    for script in ("vllm", "openvino"):
        assert f"Install it with ./scripts/engines/{script}.sh" in str(error.value)
    assert not Path(missing.output_dir).exists()
    with pytest.raises(UserError, match="^drafters: .*nowhere"):  # control: with engines that exist
        run(engine_config(engine_home, "found", engine=["ours", "hf"], **changes))


def test_a_dry_run_lists_the_arms_and_what_no_engine_runs(engine_home, capsys):
    run(
        engine_config(
            engine_home,
            "dry",
            dry_run=True,
            drafters=[str(engine_home / "noisy"), "suffix_lookup"],
            batch_sizes=[1, 2],
        )
    )
    shown = capsys.readouterr().out
    assert "hf autoregressive, hf draft_model noisy 3, hf ngram prompt_lookup 3" in shown
    assert "suffix_lookup: only our own loop runs this kind of drafter" in shown
    assert "drafters in hf at batch sizes above 1" in shown


def test_a_dry_run_of_an_engine_alone_has_no_sweep_and_names_small_vocabularies(
    engine_home, tmp_path, capsys
):
    """Check a run with the default sweep, whose prompts the engine measures too."""
    few = AutoModelForCausalLM.from_pretrained(engine_home / "noisy")
    restrict_head(few, torch.arange(30))
    few.save_pretrained(tmp_path / "few")
    tiny.tokenizer().save_pretrained(tmp_path / "few")
    drafters = [str(engine_home / "noisy"), str(tmp_path / "few")]
    changes = {"sweep": [1, 2], "num_draft_tokens": [], "drafters": drafters}
    run(engine_config(engine_home, "dry", engine="hf", dry_run=True, **changes))
    shown = capsys.readouterr().out
    assert "draft lengths: given: 4" in shown and "would decode 5 prompts in each" in shown
    assert "sweep" not in shown.replace("python", "")
    assert "few: only our own loop reads its draft vocabulary of 30 tokens. `python" in shown


def write_head(folder: Path, kind: HeadKind, shape: Any) -> Path:
    """Write a random head of the target in `engine_home`."""
    torch.manual_seed(0)
    save_head(kind.layout, shape, kind.empty(shape), folder)
    return folder


def layer_sizes() -> dict[str, Any]:
    """Return the sizes that heads with layers share with the target in `engine_home`."""
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "intermediate_size": 96}
    return sizes | {"vocab_size": len(tiny.tokenizer()), "hidden_size": 64, "taps": (1,)}


def eagle_shape(**fields: Any) -> EagleConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return EagleConfig(**layer_sizes(), rope=rope, max_positions=256, **fields)


def block_shape(**fields: Any) -> BlockConfig:
    sizes = {"target_layers": 2, "block_size": 6, "mask_token_id": 5}
    return BlockConfig(**layer_sizes(), **(sizes | fields))


@pytest.mark.parametrize(
    ("kind", "shape", "method", "length"),
    [
        (MEDUSA, MedusaConfig(len(tiny.tokenizer()), 64, num_heads=2), "medusa", 2),
        (EAGLE, eagle_shape(), "eagle3", 3),
        (BLOCK, block_shape(), "dflash", 5),
        (BLOCK, block_shape(in_block_mask="causal"), "dflash", 5),
    ],
    ids=["medusa", "eagle3", "dflash", "jetspec"],
)
def test_heads_are_planned_as_chains_in_engines_that_run_them(
    engine_home, tmp_path, kind, shape, method, length
):
    cfg = engine_config(
        engine_home,
        "heads",
        engine=["ours", "hf", "vllm"],
        drafters=[str(write_head(tmp_path / "head", kind, shape))],
        prompt_lookup_control=False,
        num_draft_tokens=[3],  # of which vLLM drafts what a block or Medusa's heads have
    )
    loaded = load(cfg)
    plan = plan_engines(cfg, loaded)
    assert plan.not_run == [f"head in hf: it does not run `{method}`"]
    assert [(arm.engine, arm.method, arm.num_draft_tokens) for arm in plan.arms] == [
        *(("ours", "autoregressive", 0), ("ours", method, length)),
        *(("hf", "autoregressive", 0), ("vllm", "autoregressive", 0), ("vllm", method, length)),
    ]
    trials = plan.trials(cfg, Condition(1.0, 1))
    compared = [trial for trial in trials if trial.ignore_eos]
    assert [(trial.arm.engine, trial.rule) for trial in compared] == [
        ("vllm", "point_mass"),
        ("ours", "point_mass"),
    ]
    sampling = Sampling(8, temperature=1.0, ignore_eos=True)
    result = OurEngine(loaded.bench).decode(compared[1], [[5, 6, 7]], sampling, [0])
    assert result.drafted > result.rounds  # chains, shorter only at the end of the text
    assert len(result.tested_by_depth) <= length
    with pytest.raises(UserError, match="engine is hf, which measures none of the drafters.*head"):
        plan_engines(dataclasses.replace(cfg, engine="hf"), loaded)


def test_a_model_that_drafts_in_one_pass_is_planned_in_vllm(engine_home, tmp_path):
    folder = tmp_path / "parallel"
    shutil.copytree(engine_home / "noisy", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"pard_token": 6, "num_parallel_tokens": 3}
    (folder / "config.json").write_text(json.dumps(config))
    changes = {"drafters": [str(folder)], "prompt_lookup_control": False}
    cfg = engine_config(engine_home, "parallel", engine=["ours", "hf", "vllm"], **changes)
    plan = plan_engines(cfg, load(cfg))
    assert plan.not_run == ["parallel in hf: it does not run `pard`"]
    drafting = [(arm.engine, arm.method, arm.num_draft_tokens) for arm in plan.arms if arm.drafter]
    assert drafting == [("ours", "pard", 3), ("vllm", "pard", 3)]


@pytest.mark.parametrize(
    ("engine", "drafts"), [("openvino", []), ("vllm", ["point_mass"]), ("hf", ["token"])]
)
def test_sampled_drafts_follow_the_rule_of_the_engine_and_need_a_known_one(
    engine_home, engine, drafts
):
    arms = [EngineArm(engine), EngineArm(engine, "ngram", CONTROL, 3)]
    plan = EnginePlan(arms, {}, [])
    for temperature, rules in ((0.0, ["greedy", "greedy"]), (1.0, ["token", *drafts])):
        found = plan.trials(engine_config(engine_home, "rules"), Condition(temperature, 1))
        assert [trial.rule for trial in found if trial.arm.engine == engine] == rules


def test_a_head_that_vllm_refuses_is_named_with_its_words(engine_home, tmp_path):
    shape = block_shape(layout="anchor_first", correction="markov", rank=4)
    drafters = [str(write_head(tmp_path / "dspark", BLOCK, shape)), str(engine_home / "noisy")]
    cfg = engine_config(engine_home, "heads", engine=["ours", "vllm"], drafters=drafters)
    loaded = load(cfg)
    plan = plan_engines(cfg, loaded)
    assert {arm.drafter for arm in plan.arms} == {"", "noisy", CONTROL}
    [note] = plan.not_run
    assert note.startswith(f"dspark: vLLM does not run the head {drafters[0]}: its DSpark needs a")
    alone = dataclasses.replace(cfg, engine=["vllm"], drafters=drafters[:1])
    with pytest.raises(UserError, match="measures none of the drafters. Add ours to it, .* dspark"):
        plan_engines(alone, load(alone))


# -------------------------------------------------------------------- Hugging Face's own `generate`
@pytest.fixture(scope="module")
def with_hf(engine_home):
    return run(engine_config(engine_home, "with_hf"))


@pytest.mark.long
def test_generate_gives_the_targets_text_and_accepts_as_often_as_ours(with_hf):
    rows, engine_rows = read_all_rows(with_hf / "results.jsonl")
    assert {row.engine for row in rows} == {"ours"}
    assert [(row.engine, row.method) for row in engine_rows] == [
        (engine, method)
        for engine in ("ours", "hf")
        for method in ("autoregressive", "draft_model", "ngram")
    ]
    assert {row.lossless for row in engine_rows} <= {"equal", "ties"}
    assert {row.prompts for row in engine_rows} == {5}
    drafting = engine_rows[4]
    assert drafting.agreement == AGREES, drafting.agreement_detail
    assert 0.1 < drafting.alpha < 1  # so the agreement is one of rates, not of all or nothing
    assert drafting.tau == pytest.approx(drafting.tokens / (drafting.tokens - drafting.accepted))
    assert drafting.t_draft_ms is None
    assert drafting.backend.startswith("hf 5.")
    report = (with_hf / "report.html").read_text()
    assert "<h2>Engines</h2>" in report and "acceptance in the engine and in ours" in report
    assert f", {drafting.backend}</p>" in report  # its version, on the line of versions


@pytest.mark.long
def test_control_a_folder_that_an_engine_reads_wrongly_differs(engine_home, tmp_path):
    cfg = engine_config(engine_home, "swapped", prompt_lookup_control=False)
    row = swap_folder(cfg, tmp_path / "swapped", engine_home / "broken")
    assert row.agreement == DIFFERS
    assert row.lossless in ("equal", "ties")  # the text does not show the fault


@pytest.mark.long
def test_a_finished_run_shows_its_engines_again_and_an_interrupted_one_continues(
    engine_home, with_hf, capsys
):
    run(engine_config(engine_home, "with_hf"))
    shown = capsys.readouterr().out
    assert "Engines, target on benchmark prompts" in shown and "), hf 5." in shown
    records, manifest = with_hf / FILE, with_hf / "manifest.json"
    before = records.read_text().splitlines()
    records.write_text("\n".join(before[:-3]) + "\n")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "finished": False}))
    run(engine_config(engine_home, "with_hf"))
    after = records.read_text().splitlines()
    assert len(after) == len(before)
    complete = len(before) - len(before) // 5  # all units but the last
    assert after[:complete] == before[:complete]


@pytest.mark.long
def test_an_engine_can_decode_a_file_of_its_own(engine_home, with_hf):
    """Name it beside the figures, whose texts differ from those of the target itself."""
    own = {"engine_target": {"hf": str(engine_home / "noisy")}}
    nothing = {"drafters": [], "prompt_lookup_control": False}
    found = {}
    for folder in (run(engine_config(engine_home, "own", **nothing, **own)), with_hf):
        rows = read_all_rows(folder / "results.jsonl")[1]
        [found[folder.name]] = [
            row for row in rows if (row.engine, row.method) == ("hf", "autoregressive")
        ]
        page = (folder / "report.html").read_text()
        assert ("it decodes noisy, another model" in page) == (folder.name == "own")
    assert found["with_hf"].lossless == "equal" and found["own"].lossless != "equal"
    assert found["own"].backend.endswith(", noisy")


@pytest.mark.long
def test_an_engine_alone_has_a_page_and_no_rows_to_compare(engine_home):
    folder = run(engine_config(engine_home, "alone", engine="hf", prompt_lookup_control=False))
    rows, engine_rows = read_all_rows(folder / "results.jsonl")
    assert not rows and {row.engine for row in engine_rows} == {"hf"}
    assert "in other engines" in (folder / "report.html").read_text()
    with pytest.raises(UserError, match="has only rows of hf, expected rows of our own loop"):
        read_rows(folder / "results.jsonl")


@pytest.mark.long
def test_engines_are_compared_without_a_drafter_and_one_alone_is_not(engine_home):
    nothing = {"drafters": [], "prompt_lookup_control": False}
    folder = run(engine_config(engine_home, "plain", **nothing))
    rows, engine_rows = read_all_rows(folder / "results.jsonl")
    assert not rows
    assert {(row.engine, row.method) for row in engine_rows} == {
        ("ours", "autoregressive"),
        ("hf", "autoregressive"),
    }
    with pytest.raises(UserError, match="drafters is empty and the control is off"):
        run(engine_config(engine_home, "one", engine="ours", **nothing))


@pytest.mark.long
def test_a_drafter_that_an_engine_refuses_is_named_with_its_words(engine_home, tmp_path):
    cfg = engine_config(engine_home, "refused", prompt_lookup_control=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"(?s)engine=hf, drafters: noisy .* config.json"):
        swap_folder(cfg, tmp_path / "swapped", empty)

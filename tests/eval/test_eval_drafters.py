"""Drafters as users name them, and their options.

The options are schedules, policies, samples, allowed tokens and experiments.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.draft_vocabulary import restrict_head
from decoding.models.load import load_target
from decoding.rounds.settings import Settings
from eval.config import BenchmarkConfig
from eval.measure.benchmarks import load_benchmark, render_turns
from eval.measure.parts import time_slice
from eval.measure.records import Condition, read_records
from eval.measure.setup import load, median_prompt
from eval.report.text import drafter_label
from eval.run import run
from eval.statistics.schema import read_rows
from jobs.config import TargetConfig
from jobs.drafter_use import DrafterUse
from jobs.drafters import build, check_entries, describe, uses
from tests.support import tiny_folders as tiny
from tests.support.forks import run_forked
from tests.support.tiers import tiered
from tests.support.tiny_folders import config
from training.models.build import load_causal_lm


def test_drafters_by_folder_by_name_and_by_mapping(home):
    target = TargetConfig(path=str(home / "target"), dtype="bfloat16", device="cpu")
    mine = {
        "_target_": "decoding.drafters.chain.ChainDrafter",
        "folder": str(home / "shallow"),
        "name": "mine",
    }
    found = describe([str(home / "shallow"), mine], target, control=True)
    assert list(found) == ["shallow", "mine", "prompt_lookup"]
    assert (
        found["shallow"]["dtype"] == "bfloat16"
    )  # a folder uses the device and dtype of the target
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
    with pytest.raises(
        UserError, match="model.safetensors has .* bytes and is damaged or incomplete"
    ):
        build(mappings, uses(mappings, DrafterUse()), home / "target")
    tree = describe(
        [{"use": "multi_candidate", "folder": str(home / "shallow"), "branching": [2]}],
        target,
        False,
    )
    assert tree["multi_candidate"]["branching"] == [2]
    assert tree["multi_candidate"]["dtype"] == "bfloat16"
    with pytest.raises(
        UserError,
        match=r"multi_candidate needs folder. Set it in a mapping: {use: multi_candidate, folder",
    ):
        describe(["multi_candidate"], target, False)
    given = describe([{"use": str(home / "shallow"), "stopping": "confidence"}], target, True)
    assert list(given) == ["shallow+confidence", "prompt_lookup"]
    used = uses(given, DrafterUse(schedule="pearl_virtual"))
    assert used == {
        "shallow+confidence": DrafterUse("confidence", None, "pearl_virtual"),
        "prompt_lookup": DrafterUse(),
    }
    with pytest.raises(UserError, match="stopping 'mood' is unknown, expected one of fixed"):
        uses(
            describe([{"use": str(home / "shallow"), "stopping": "mood"}], target, False),
            DrafterUse(),
        )
    with pytest.raises(
        UserError, match="schedule 'both' is unknown, expected one of serial, pearl_virtual"
    ):
        DrafterUse(schedule="both")
    with pytest.raises(UserError, match="two entries are called 'shallow'"):
        describe([str(home / "shallow")] * 2, target, control=False)
    with pytest.raises(UserError, match="is empty"):
        describe([], target, control=False)
    with pytest.raises(
        UserError, match=r"'lokahead' is neither a folder .*; the nearest is 'lookahead'\.$"
    ):
        describe(["lokahead"], target, control=False)


def test_a_pattern_names_all_matching_folders(home, tmp_path):
    for number in (1, 2):
        folder = tmp_path / f"run{number}" / "drafter"
        shutil.copytree(home / "shallow", folder)
        (folder / "drafter_card.json").write_text(json.dumps({"name": f"depth {number}"}))
    (tmp_path / "run3" / "drafter").mkdir(parents=True)
    target = TargetConfig(path=str(home / "target"))
    found = describe([f"{tmp_path}/*/drafter"], target, control=False)
    assert {name: Path(mapping["folder"]).parent.name for name, mapping in found.items()} == {
        "depth 1": "run1",
        "depth 2": "run2",
    }, "a folder without a model does not match"
    folders = [f"{tmp_path}/run{number}/drafter" for number in (1, 2)]
    assert list(describe(folders, target, control=False)) == ["depth 1", "depth 2"], (
        "both end in `drafter`"
    )
    assert list(describe(folders[:1], target, control=False)) == ["drafter"]
    with pytest.raises(UserError, match="no folder with a config.json matches"):
        describe([f"{tmp_path}/none*/drafter"], target, control=False)


def test_an_unknown_key_is_named_with_the_nearest_one(home):
    """Check that a key that a drafter's class does not take is refused before anything is loaded.

    The error suggests the nearest key of that class.
    """
    target = TargetConfig(path=str(home / "target"), device="cpu")
    shallow = str(home / "shallow")
    for entry, key, kind, near in (
        ({"use": shallow, "stoping": "fixed"}, "stoping", "ChainDrafter", "stopping"),
        (
            {"use": "graph", "folder": shallow, "frontiers": 3},
            "frontiers",
            "GraphDrafter",
            "frontier",
        ),
        (
            {"use": "ranked_tree", "folder": shallow, "dtipe": "float32"},
            "dtipe",
            "RankedTree",
            "dtype",
        ),
        ({"use": "prompt_lookup", "max_ngrams": 3}, "max_ngrams", "PromptLookup", "max_ngram"),
        (
            {"_target_": "decoding.drafters.remote.RemoteChain", "folder": shallow, "cores": 1},
            "cores",
            "RemoteChain",
            "draft_cores",
        ),
    ):
        with pytest.raises(
            UserError,
            match=f"has the key '{key}', which {kind} does not take; the nearest is '{near}'",
        ):
            describe([entry], target, False)
    with pytest.raises(
        UserError, match="chain has the key 'foo', which ChainDrafter does not take"
    ):
        # though its folder is missing too
        run(config(home, "unknown_key", drafters=[{"use": "chain", "foo": 1}]))
    assert not (home / "unknown_key").exists()
    remote = {
        "_target_": "decoding.drafters.remote.RemoteChain",
        "folder": shallow,
        "draft_cores": 0,
        "dtype": "float64",
    }
    assert describe([remote], target, False)
    with pytest.raises(
        UserError, match="the class decoding.drafters.chain.Chain of .* cannot be imported"
    ):
        describe([{"_target_": "decoding.drafters.chain.Chain"}], target, False)


def test_lookup_precedes_models_only(home):
    target = TargetConfig(path=str(home / "target"), dtype="float64", device="cpu")
    kinds = ("graph", "static_tree", "ouroboros")
    entries = [{"use": name, "folder": str(home / "shallow"), "lookup": 4} for name in kinds]
    mappings = describe([{"use": str(home / "shallow"), "lookup": 3}, *entries], target, False)
    made = build(mappings, uses(mappings, DrafterUse()), home / "target")
    assert list(made) == ["shallow+lookup", *kinds]
    assert {name: (type(one.drafter).__name__, one.min_match) for name, one in made.items()} == {
        "shallow+lookup": ("ChainDrafter", 3),
        "graph": ("GraphDrafter", 4),
        "static_tree": ("StaticTree", 4),
        "ouroboros": ("Ouroboros", 4),
    }
    for entry, words in (
        ({"use": "prompt_lookup"}, "PromptLookup already looks up by itself"),
        ({"use": "lookahead"}, "Lookahead has no draft model"),
        (
            {"use": "chain_with_lookup", "folder": "nowhere"},
            "ChainWithLookup already looks up by itself",
        ),
        (
            {"_target_": "decoding.drafters.remote.RemoteChain", "folder": "nowhere"},
            "RemoteChain drafts while .* Omit lookup=",
        ),
    ):
        with pytest.raises(
            UserError,
            match=f"lookup= needs a model that drafts in turn with the target, but {words}",
        ):
            check_entries([{**entry, "lookup": 3}])
    check_entries([{"use": "graph", "folder": "nowhere", "lookup": 3}])
    for wrong, words in (
        (
            {"lookup": 3, "schedule": "pearl_virtual"},
            "lookup=3 does not work with schedule 'pearl_virtual', .* use schedule=serial",
        ),
        (
            {"schedule": "pearl_virtual", "stopping": "entropy"},
            "policy that learns .* Use stopping=fixed or confidence",
        ),
    ):
        with pytest.raises(UserError, match=words):
            uses(describe([{"use": str(home / "shallow"), **wrong}], target, False), DrafterUse())
    rows = read_rows(
        run(config(home, "looked_up", drafters=entries, temperatures=[0.0], sweep=[3]))
        / "results.jsonl"
    )
    assert {row.lossless for row in rows} == {"equal"}


def even_ids(tokenizer):
    """Return a function for `allowed` that allows even token ids and the stop token."""
    ids = [*range(0, len(tokenizer), 2), tokenizer.eos_token_id]
    return lambda text: ids


def test_a_function_restricts_the_tokens(home):
    """Check that target and drafter emit only tokens that the function allows.

    The rows name the function, and one that cannot be imported is refused.
    """
    name = f"{__name__}.even_ids"
    folder = run(config(home, "allowed", allowed=name, temperatures=[0.0], sweep=[3]))
    end = tiny.tokenizer().eos_token_id
    tokens = {token for record in read_records(folder / "records.jsonl") for token in record.tokens}
    assert len(tokens) > 3
    assert all(token % 2 == 0 or token == end for token in tokens)
    assert {(row.allowed, row.lossless) for row in read_rows(folder / "results.jsonl")} == {
        (name, "equal")
    }
    with pytest.raises(
        UserError, match="allowed=nowhere.at_all cannot be imported.*takes the tokenizer"
    ):
        run(config(home, "refused", dry_run=True, allowed="nowhere.at_all"))


@pytest.mark.parametrize(
    ("given", "found"),
    tiered(
        [
            (
                ["+experiment=every_way"],
                "draft_model is empty, but experiment 'every_way' needs it. Set draft_model=",
            ),
            (
                ["+experiment=pearl_case_study", "draft_model=runs/x"],
                "benchmark_folder is empty, but experiment 'pearl_case_study' needs it. Set",
            ),
            (
                ["+experiment=every_way", "draft_model=runs/x", "drafters=[{use: chain, foo: 1}]"],
                "drafters: chain has the key 'foo'",
            ),
        ],
        lambda given, found: len(given) == 1,
    ),
)
def test_an_experiment_names_missing_input_before_its_first_stage(tmp_path, given, found):
    """Check that input missing for any stage is an error before the first stage spends time."""
    done = run_forked("eval.run", *given, f"output_dir={tmp_path / 'out'}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {found}")
    assert not done.stdout, "no stage was started"
    assert not (tmp_path / "out").exists()


def test_schedules_and_policies_are_rows_of_one_run(home, tmp_path):
    shallow = str(home / "shallow")
    ways = [
        {"use": shallow},
        {"use": shallow, "schedule": "pearl_virtual"},
        {"use": shallow, "stopping": "fixed"},
    ]
    folder = run(
        config(
            home, "ways", drafters=ways, stopping=None, temperatures=[0.0, 1.0], verify="coupled"
        )
    )
    rows = read_rows(folder / "results.jsonl")
    names = {"shallow", "shallow+pearl_virtual", "shallow+fixed", "prompt_lookup"}
    assert {row.drafter for row in rows} == names
    assert {row.schedule for row in rows if row.drafter == "shallow+pearl_virtual"} == {
        "pearl_virtual"
    }
    assert all(row.lossless in ("equal", "ties") for row in rows)
    assert all(0 <= row.overhead < 1 for row in rows if row.schedule == "pearl_virtual")
    found = {row.drafter: row.length_rule for row in rows}
    assert found == {**dict.fromkeys(names, "predicted"), "shallow+pearl_virtual": "fastest"}
    assert set(json.loads((folder / "costs.json").read_text())) == {"shallow, T=0", "shallow, T=1"}
    assert {row.drafter: row.stopping for row in rows} == {
        **dict.fromkeys(names, "fixed"),
        "shallow": "cost_ratio",
    }


def test_rows_name_a_draft_vocabulary_and_count_its_rows(home, tmp_path):
    shallow, few = home / "shallow", tmp_path / "few"
    shutil.copytree(shallow, few)
    model = load_causal_lm(shallow, torch.float64)
    restrict_head(model, torch.arange(0, model.config.vocab_size, 2))
    model.save_pretrained(few)
    folder = run(
        config(home, "few", drafters=[{"use": str(shallow)}, {"use": str(few)}], stopping="fixed")
    )
    greedy = [row for row in read_rows(folder / "results.jsonl") if row.temperature == 0]
    rows = {row.drafter: row for row in greedy}
    drafted = len(model.lm_head.weight)
    assert rows["few"].draft_vocab_size == drafted and rows["shallow"].draft_vocab_size == 0
    assert f", {drafted} ids" in drafter_label(rows["few"])
    assert "ids" not in drafter_label(rows["shallow"])
    assert rows["few"].lossless == "equal"


def test_drafters_are_timed_alike_at_every_place_in_the_list(home, tmp_path):
    """Check that the steps of a model under two names are timed after the same work.

    So both find the same data in the processor's caches.
    """
    shallow = str(home / "shallow")
    loaded = load(
        config(
            home,
            tmp_path,
            drafters=[{"use": shallow, "name": "one"}, {"use": shallow, "name": "two"}],
        )
    )
    bench, seen, now = loaded.bench, {"one": [], "two": []}, []
    forward = bench.target.forward

    def watched(tokens_BN, *rest):
        now.append(tokens_BN.shape[1])
        return forward(tokens_BN, *rest)

    bench.target.forward = watched
    for name in seen:
        step = bench.drafters[name].time_step

        def stepped(beams, name=name, step=step):
            seen[name].append(tuple(now))
            now.clear()
            step(beams)

        bench.drafters[name].time_step = stepped
    slices = time_slice(bench, Condition(0.0, 1), "main", median_prompt(bench), (1, 2, 3), 2)
    # beside other processes, disturbed steps are timed again, so their numbers may differ
    common = slice(1, min(map(len, seen.values())))
    assert seen["one"][common] == seen["two"][common], "the first step of each follows the prefill"
    assert {*slices[0].t_target_ms} == {1, 2, 3}, (
        "control: the target is timed at every width all the same"
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"batch_sizes": [1, 64]}, "sweep_prompts is .*, expected 64 or more, as batch_sizes"),
        ({"batch_sizes": [1, 64], "sweep_prompts": 64}, "too few"),
        ({"verify": "block", "schedule": "pearl_virtual"}, "which verify=block cannot do"),
        ({"batch_sizes": [2], "schedule": "pearl_plus_virtual"}, "one prompt at a time"),
    ],
)
def test_an_impossible_run_is_refused_before_it_takes_the_folder(home, tmp_path, changed, words):
    """Check that an impossible run writes no manifest and no costs.

    So the command that the error suggests can use the same folder.
    """
    with pytest.raises(UserError, match=words):
        run(config(home, tmp_path / "run", **changed))
    assert not (tmp_path / "run" / "manifest.json").exists()
    assert not (tmp_path / "run" / "costs.json").exists()


def test_a_drafter_alone_decodes_its_own_text(home):
    """Check that with schedule=alone a drafter's row has the text of its own model.

    That text need not equal the target's.
    """
    shallow = str(home / "shallow")
    ways = [
        {"use": shallow, "stopping": "fixed"},
        {"use": shallow, "schedule": "alone", "name": "small"},
    ]
    folder = run(
        config(
            home,
            "alone",
            drafters=ways,
            prompt_lookup_control=False,
            temperatures=[0.0],
            show_texts=1,
        )
    )
    records = read_records(folder / "records.jsonl")
    model, target = (
        load_target(home / "shallow", dtype="float64"),
        load_target(home / "target", dtype="float64"),
    )
    bench = load_benchmark(
        BenchmarkConfig(path=str(home / "prompts.jsonl")),
        tiny.tokenizer(),
        max_length=200,
        max_new_tokens=12,
        limit=0,
    )
    prompt = next(p for p in bench.prompts if p.id == records[-1].prompt_id)
    ids = render_turns(prompt.turns, [], tiny.tokenizer(), "chat")
    for name, alone in (("small", model), ("autoregressive", target)):
        (own,) = decode(alone, None, [ids], Settings(max_new_tokens=12))
        assert [r.tokens for r in records if (r.drafter, r.prompt_id) == (name, prompt.id)] == [
            own.tokens
        ]
    (row,) = [row for row in read_rows(folder / "results.jsonl") if row.drafter == "small"]
    assert (row.lossless, row.part, row.num_draft_tokens, row.tau) == (
        "another model",
        "main",
        0,
        1.0,
    )
    assert (row.predicted_speedup, row.length_rule) == (None, "none")
    page = (folder / "report.html").read_text()
    assert "Who wrote what" in page
    assert 'class="drafted"' in page
    with pytest.raises(UserError, match="schedule=alone, but a PromptLookup cannot decode without"):
        run(
            config(
                home,
                "lookup",
                drafters=[{"use": "prompt_lookup", "schedule": "alone", "name": "x"}],
            )
        )


def test_samples_of_a_prompt_differ_and_count_as_one_prompt(home):
    folder = run(config(home, "samples", samples=3, temperatures=[0.0, 1.0], verify="coupled"))
    records = [record for record in read_records(folder / "records.jsonl") if record.part == "main"]
    drafted = [record for record in records if record.drafter == "shallow"]
    greedy, sampled = ([r for r in drafted if r.temperature == t] for t in (0.0, 1.0))
    assert {r.sample for r in greedy} == {0}
    assert {r.sample for r in sampled} == {0, 1, 2}
    one = [tuple(r.tokens) for r in sampled if r.prompt_id == sampled[0].prompt_id]
    assert len(set(one)) == len(one) == 3, "each sample has different noise"
    for row in read_rows(folder / "results.jsonl"):
        assert row.lossless == "equal"
        if row.part == "main":
            assert row.prompts == 3
            assert row.tokens == 12 * 3 * (3 if row.temperature else 1)

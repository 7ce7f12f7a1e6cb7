"""Verification rules and caps of single drafters in `eval.run`.

Each rule or cap gives a row of its own, which obeys the laws of the rule.
"""

import io

import pytest
from rich.console import Console

from decoding.costs.prediction import Costs, best_gamma, verdict
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.prompt_lookup import PromptLookup
from decoding.errors import UserError
from decoding.interfaces import RoundCosts
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.rounds.settings import Settings
from eval.config import BenchmarkConfig
from eval.measure.benchmarks import load_benchmark, render_turns
from eval.measure.lengths import RULES, SELF_ENDING, length_cap_of, rule_of
from eval.measure.measurement import Bench
from eval.measure.records import BASELINE, COUPLED, read_records
from eval.report import text
from eval.report.terminal import print_evaluation
from eval.run import run
from eval.statistics.comparison.entries import entries_of
from eval.statistics.comparison.evaluations import read_evaluation
from eval.statistics.comparison.panels import panels_of
from eval.statistics.schema import read_rows
from jobs.config import TargetConfig
from jobs.drafter_use import DrafterUse
from tests.support import tiny_folders as tiny
from tests.support.tiny_folders import config


# -------------------------------------------------------------------------------------------- rules
@pytest.fixture(scope="module")
def four_rules(home):
    """Evaluate one drafter under four verification rules; return the run's folder."""
    shallow, others = str(home / "shallow"), ("block", "coupled", "lossy_lenience:0.5")
    ways = [shallow, *({"use": shallow, "verify": rule} for rule in others)]
    return run(config(home, "four_rules", drafters=ways, sweep=[3], prompt_lookup_control=False))


def test_rows_of_one_drafter_under_several_rules_are_distinguished(four_rules):
    rows = [row for row in read_rows(four_rules / "results.jsonl") if row.part == "main"]
    sampled = {row.drafter: (row.verify, row.lossless) for row in rows if row.temperature}
    assert sampled == {
        "shallow": ("token", "by rule"),
        "shallow+block": ("block", "by rule"),
        "shallow+coupled": ("coupled", "equal"),
        "shallow+lossy_lenience:0.5": ("lossy_lenience:0.5", "lossy"),
    }
    assert {(row.verify, row.lossless) for row in rows if not row.temperature} == {
        ("greedy", "equal")
    }
    assert len({row.baseline_tokens_per_second for row in rows if row.temperature}) == 1, (
        "all rows have one baseline"
    )
    assert len({(text.drafter_label(row), row.condition_label) for row in rows}) == len(rows)
    console = Console(file=io.StringIO(), width=160)
    print_evaluation(rows, console)
    printed = console.file.getvalue()
    assert printed.count(": temperature 1, token verification, 3 prompts") == 1, (
        "all rows are in one table"
    )
    assert "temperature 1, block verification, 3 prompts" not in printed


def test_rows_under_different_rules_share_one_comparison(four_rules):
    panels = panels_of(entries_of([read_evaluation(four_rules, "one")], "all"), 50, 0)
    assert [[entry.row.drafter for entry in panel.entries] for panel in panels] == [
        ["shallow", "shallow+block", "shallow+coupled", "shallow+lossy_lenience:0.5"]
    ] * 2
    ranked = [{entry.row.drafter for entry in panel.fastest} for panel in panels]
    greedy, sampled = sorted(ranked, key=len, reverse=True)
    assert greedy - sampled == {"shallow+lossy_lenience:0.5"}, "lossy where it samples"


def test_a_coupled_row_equals_the_targets_coupled_text(home, four_rules):
    records = [
        record for record in read_records(four_rules / "records.jsonl") if record.temperature
    ]
    target = load_target(home / "target", dtype="float64")
    given = BenchmarkConfig(path=str(home / "prompts.jsonl"))
    bench = load_benchmark(given, tiny.tokenizer(), max_length=200, max_new_tokens=12, limit=0)
    for prompt in bench.prompts:
        ids = render_turns(prompt.turns, [], tiny.tokenizer(), "chat")
        mine = {record.drafter: record for record in records if record.prompt_id == prompt.id}
        settings = Settings(max_new_tokens=12, temperature=1.0, verify="coupled")
        request = mine["shallow+coupled"].unit * 1_000_000
        (own,) = decode(target, None, [ids], settings, request_ids=[request])
        assert mine["shallow+coupled"].tokens == mine[COUPLED.drafter].tokens == own.tokens
        assert mine["shallow+coupled"].differs_at is None
    texts = {
        name: [r.tokens for r in records if r.drafter == name]
        for name in (BASELINE.drafter, COUPLED.drafter)
    }
    assert texts[BASELINE.drafter] != texts[COUPLED.drafter], (
        "control: the baseline sampled other texts"
    )


def test_a_coupled_row_with_another_text_ends_the_run(home, monkeypatch):
    """Control: a coupled row with a seed other than the target's ends the run.

    Its text is a sample of the same distribution, but not the target's text.
    """
    real = Bench.settings_at

    def other_seed(self, condition, arm):
        settings = real(self, condition, arm)
        return (
            type(settings)(**{**vars(settings), "seed": 9})
            if arm.drafter == "shallow+coupled"
            else settings
        )

    monkeypatch.setattr(Bench, "settings_at", other_seed)
    entry = {"use": str(home / "shallow"), "verify": "coupled"}
    changes = {
        "temperatures": [1.0],
        "num_draft_tokens": [2],
        "sweep": [],
        "prompt_lookup_control": False,
    }
    with pytest.raises(UserError, match=r"shallow\+coupled differs from the target's"):
        run(config(home, "other_seed", drafters=[entry], **changes))


def test_the_coupled_baseline_is_decoded_only_where_needed(home, four_rules, capsys):
    records = read_records(four_rules / "records.jsonl")
    assert {record.temperature for record in records if record.arm == COUPLED} == {1.0}
    entry = {"use": str(home / "shallow"), "verify": "coupled"}
    changes = {
        "drafters": [entry],
        "prompt_lookup_control": False,
        "sweep": [],
        "num_draft_tokens": [2],
    }
    for verify, arms in (("token", 3), ("coupled", 2)):
        run(config(home, "planned", dry_run=True, verify=verify, temperatures=[1.0], **changes))
        assert f"would decode {5 * arms} batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("entry", "changes", "message"),
    [
        (
            {"verify": "lenient"},
            {},
            "verify 'lenient' is unknown, expected one of token, block, coupled",
        ),
        ({"verify": "greedy"}, {}, "verify 'greedy' is unknown"),
        (
            {"verify": "block", "schedule": "pearl_virtual"},
            {},
            "verify=block does not work with schedule 'pearl_virtual'",
        ),
        (
            {"verify": "block"},
            {"schedule": "pearl_virtual"},
            "verify=block does not work with schedule 'pearl_virtual'",
        ),
        (
            {"verify": "token", "schedule": "alone"},
            {},
            "verify=token has no effect with schedule=alone",
        ),
        (
            {"use": "static_tree", "folder": "SHALLOW", "verify": "block"},
            {},
            "static_tree proposes trees",
        ),
        (
            {"use": "static_tree", "folder": "SHALLOW"},
            {"verify": "block"},
            "Use verify=token or verify=coupled",
        ),
        ({"max_draft_tokens": 0}, {}, "max_draft_tokens is 0, expected a whole number from 1"),
        ({"max_draft_tokens": 2.5}, {}, "max_draft_tokens is 2.5"),
        (
            {"max_draft_tokens": 8},
            {},
            "shallow has max_draft_tokens=8, but stopping=fixed ends no draft",
        ),
        (
            {"max_draft_tokens": 8, "schedule": "pearl_virtual"},
            {"stopping": None},
            "with schedule 'pearl_virtual', whose draft length",
        ),
        (
            {"use": "static_tree", "folder": "SHALLOW", "max_draft_tokens": 8},
            {"stopping": None},
            "it drafts in one step",
        ),
        (
            {"use": "prompt_lookup", "name": "mine", "stopping": "entropy", "max_draft_tokens": 8},
            {},
            "mine has max_draft_tokens=8, but it drafts in one step",
        ),
        ({}, {"max_draft_tokens": 0}, "max_draft_tokens is 0, expected"),
    ],
)
def test_invalid_rules_and_caps_are_refused_before_the_folder_is_taken(
    home, tmp_path, entry, changes, message
):
    given = {"use": "SHALLOW", **entry}
    given = {
        key: str(home / "shallow") if value == "SHALLOW" else value for key, value in given.items()
    }
    with pytest.raises(UserError, match=message):
        run(config(home, tmp_path / "run", drafters=[given], **changes))
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_a_tree_under_block_is_refused_only_for_sampling(home, capsys):
    tree = {"use": "static_tree", "folder": str(home / "shallow")}
    run(
        config(
            home, "greedy_tree", drafters=[tree], verify="block", temperatures=[0.0], dry_run=True
        )
    )
    assert "static_tree" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------- caps
def test_stopping_rules_with_a_cap_ignore_the_sweep(home):
    """Check that stopping rules with a cap draft the same whatever lengths the sweep has.

    Control: drafts under a fixed rule change with the sweep.
    """
    shallow = str(home / "shallow")
    # rules that count rounds, read the model, and sample
    some = ("assisted", "entropy", "thompson")
    ways = [{"use": shallow, "stopping": name} for name in (*some, "fixed")]
    found = []
    for gamma in (1, 3):
        changes = {
            "drafters": ways,
            "temperatures": [0.0],
            "prompt_lookup_control": False,
            "sweep": [gamma],
        }
        folder = run(config(home, f"cap{gamma}", **changes))
        records = [
            record for record in read_records(folder / "records.jsonl") if record.prompt_id == "p0"
        ]
        found.append(
            {
                record.drafter: (record.num_draft_tokens, record.drafted, record.trace)
                for record in records
            }
        )
        rows = {
            row.drafter: row for row in read_rows(folder / "results.jsonl") if row.part == "main"
        }
        for name in some:
            row = rows[f"shallow+{name}"]
            assert (row.length_rule, row.num_draft_tokens, row.lossless) == ("cap", 16, "equal")
            assert text.gamma_label(row) == "<= 16"
            assert RULES[row.length_rule] == "stopping rule, up to max_draft_tokens"
        assert text.gamma_label(rows["shallow+fixed"]) == str(gamma)
        assert "up to 16 by the stopping rule of shallow+assisted, shallow+entropy" in (
            folder / "report.html"
        ).read_text(encoding="utf-8")
    fixed = [one.pop("shallow+fixed") for one in found]
    assert found[0] == found[1]
    assert fixed[0] != fixed[1]


def test_hugging_faces_schedule_starts_at_five_and_grows_by_two_up_to_its_cap(
    home,
):
    """Check that accepted rounds emit 6 and then 8 tokens, or 3 under a cap of 2.

    The target drafts for itself, so all drafts are accepted.
    """
    twin = {"use": str(home / "target"), "stopping": "assisted", "stopping_threshold": 0.0}
    ways = [{**twin, "name": "free"}, {**twin, "name": "capped", "max_draft_tokens": 2}]
    changes = {
        "sweep": [2],
        "temperatures": [0.0],
        "max_new_tokens": 14,
        "prompt_lookup_control": False,
    }
    folder = run(config(home, "grows", drafters=ways, **changes))
    main = [record for record in read_records(folder / "records.jsonl") if record.part == "main"]
    assert {record.rounds for record in main if record.drafter == "free"} == {2}
    assert {len(record.tested_by_depth) for record in main if record.drafter == "free"} == {7}
    assert {len(record.tested_by_depth) for record in main if record.drafter == "capped"} == {2}
    rows = {row.drafter: row for row in read_rows(folder / "results.jsonl") if row.part == "main"}
    assert {name: (row.num_draft_tokens, row.length_rule) for name, row in rows.items()} == {
        "free": (16, "cap"),
        "capped": (2, "cap"),
    }
    assert max(rows["free"].V) == 17, "the target is timed up to the cap"


def test_only_rules_that_run_after_each_token_take_a_cap(home):
    target = load_target(home / "target", dtype="float64")
    recorded = load_target(home / "target", dtype="float64", execution="graph")
    chain, lookup = ChainDrafter.capabilities, PromptLookup.capabilities
    for name in SELF_ENDING:
        assert length_cap_of("x", DrafterUse(name), chain, target, 16) == 16
        assert length_cap_of("x", DrafterUse(name, max_draft_tokens=3), chain, target, 16) == 3
        assert length_cap_of("x", DrafterUse(name), lookup, target, 16) is None
        assert length_cap_of("x", DrafterUse(name), chain, recorded, 16) is None, (
            "each width would be a recording"
        )
    for name in ("fixed", "cost_ratio"):
        assert length_cap_of("x", DrafterUse(name), chain, target, 16) is None
    assert length_cap_of("x", DrafterUse("cost_ratio", max_draft_tokens=9), chain, target, 16) == 9
    assert (
        length_cap_of("x", DrafterUse("confidence", schedule="pearl_virtual"), chain, target, 16)
        is None
    ), "a chunk is gamma"
    with pytest.raises(
        UserError, match="x has max_draft_tokens=9, but this target records one step"
    ):
        length_cap_of("x", DrafterUse("entropy", max_draft_tokens=9), chain, recorded, 16)
    with pytest.raises(UserError, match="stopping=fixed ends no draft"):
        length_cap_of("x", DrafterUse("fixed", max_draft_tokens=9), chain, target, 16)
    assert (
        rule_of("serial", given=True, length_cap=16)
        == rule_of("serial", given=False, length_cap=16)
        == "cap"
    )
    assert rule_of("alone", given=True) == "none"


def test_recorded_steps_use_the_lengths_of_the_sweep(home):
    target = TargetConfig(
        path=str(home / "target"), dtype="float64", device="cpu", execution="graph"
    )
    changes = {"temperatures": [0.0], "sweep": [2], "prompt_lookup_control": False}
    folder = run(config(home, "recorded", target=target, stopping="entropy", **changes))
    assert {
        (row.length_rule, row.num_draft_tokens) for row in read_rows(folder / "results.jsonl")
    } == {("predicted", 2)}


def test_the_formula_predicts_only_the_cap_that_ran():
    """Check that the best length for a stopping rule is the cap that ran.

    Most drafts are shorter than a cap of 16, so smaller caps would save less than in proportion.
    Control: costs that are scaled in proportion prefer a smaller cap.
    """
    free = Costs(0.3, {1: 1.0, 17: 1.8}, nodes={16: 3.0}, steps={16: 3.0}, deepest=16)
    own = Costs(
        0.3, {1: 1.0, 17: 1.8}, nodes={16: 3.0}, steps={16: 3.0}, deepest=16, policy_lengths=True
    )
    passes = [0.8, 0.7, 0.5, 0.2]
    assert best_gamma(passes, own)[0] == 16
    assert best_gamma(passes, free)[0] < 16, "control"
    assert "gamma" in verdict(passes, free).text
    assert "gamma" not in verdict(passes, own).text
    assert "gamma" not in verdict([0.1, 0.0], own).text


def test_costs_are_measured_up_to_the_drafters_cap(home, monkeypatch):
    widest = {}

    def measured(target, drafter, prompt, settings, *, widths, **rest):
        widest[drafter.name] = max(widths)
        return RoundCosts(0.3, tuple(1 + 0.05 * n for n in range(max(widths))))

    monkeypatch.setattr("eval.measure.parts.measure_costs", measured)
    shallow = str(home / "shallow")
    ways = [
        {"use": shallow, "name": "swept"},
        {"use": shallow, "name": "capped", "max_draft_tokens": 9},
    ]
    changes = {
        "stopping": "cost_ratio",
        "temperatures": [0.0],
        "sweep": [2],
        "prompt_lookup_control": False,
    }
    rows = read_rows(run(config(home, "frozen_caps", drafters=ways, **changes)) / "results.jsonl")
    assert widest == {"swept": 3, "capped": 10}
    assert {
        (row.drafter, row.num_draft_tokens, row.length_rule) for row in rows if row.part == "main"
    } == {
        ("swept", 2, "predicted"),
        ("capped", 9, "cap"),
    }

"""Rows, tests of laws, configurations, commands and drafters of an earlier version are still here.

tests/fixtures/inventory.json lists them by their names in that version.
"""

import json

import pytest

from tests.support import snapshots
from tests.support.tiers import tiered

INVENTORY = json.loads((snapshots.FIXTURES / "inventory.json").read_text())
# name in the inventory -> current name, of a row, a test function, a parameter id, an override, a
# command or a drafter; `test[id]` for the id of one test
RENAMED = {
    "test_control_without_the_constraint_nothing_goes": (
        "test_control_without_the_constraint_nothing_is_removed"
    ),
    "test_the_chat_model_keeps_law_1": "test_the_chat_model_keeps_laws_1_and_2",
    "test_the_chat_model_keeps_law_1[ranked_tree]": "chains_and_a_tree",
    "test_the_control_of_one_run_is_no_rival_of_that_of_another": (
        "test_controls_of_different_runs_are_no_rivals"
    ),
    "test_the_pareto_front_has_no_dominated_point_and_leaves_none_other_out": (
        "test_the_pareto_front_holds_exactly_the_undominated_points"
    ),
    "test_control_characters_of_a_model_are_spelled_out": (
        "test_control_characters_of_a_model_are_escaped"
    ),
    "test_control_a_target_with_a_template_is_asked_by_it": (
        "test_control_targets_with_a_template_receive_rendered_prompts"
    ),
    "draws": "children",
    "plain-drawn": "plain-sampled",
    "plain-picked": "plain-top_k",
    "hot_top_p-drawn": "hot_top_p-sampled",
    "hot_top_p-picked": "hot_top_p-top_k",
    "test_law_4_a_perfect_drafter_gains_its_closed_form": (
        "test_law_4_a_perfect_drafter_has_its_closed_form"
    ),
    "test_choosing_among_drawn_children_breaks_law_3": (
        "test_law_3_rejects_a_choice_among_sampled_children"
    ),
    "test_law_5_the_same_whatever_was_decoded_before": "test_law_5_earlier_requests_change_nothing",
    "by_what_was_drawn": "choose_by_sampled_tokens",
    "best_of_the_finished_tree": "keep_the_best_of_a_finished_tree",
    "pass_whole_tails": "accept_tails_untested",
    "draw_refused_ones_from_p": "sample_rejected_tails_from_p",
    "test_law_3_holds_for_a_drafter_with_fewer_or_more_words_than_the_target": (
        "test_law_3_holds_for_a_drafter_with_another_vocabulary_size"
    ),
    "test_law_3_of_trees_where_the_host_runs_ahead": (
        "test_law_3_holds_for_trees_if_the_host_runs_ahead"
    ),
    "test_law_3_where_rows_of_a_batch_settle_a_draft_before_the_round": (
        "test_law_3_holds_if_a_batch_decides_before_the_round"
    ),
    "test_numbers_that_a_control_broke_are_the_ones_that_are_drawn": (
        "test_numbers_of_many_rows_are_those_of_each_row"
    ),
    "test_a_perfect_drafter_gains_its_closed_form": "test_a_perfect_drafter_has_its_closed_form",
    "test_a_drafter_that_is_never_right_changes_nothing": (
        "test_an_adversarial_drafter_changes_nothing"
    ),
    "test_a_drafter_that_is_never_right_leaves_a_sample_as_it_is": (
        "test_an_adversarial_drafter_changes_no_sample"
    ),
    "test_a_perfect_model_is_right_at_least_once_a_round": (
        "test_a_perfect_model_has_an_accepted_token_a_round"
    ),
    "test_law_3_rejects_the_uniform_that_the_published_code_uses_twice": (
        "test_law_3_rejects_the_reused_uniform_of_the_published_code"
    ),
    "test_law_3_rejects_a_choice_that_drops_what_was_drafted": (
        "test_law_3_rejects_dropping_a_sampled_chunk"
    ),
    "test_law_3_of_a_target_that_drafts_for_itself": "test_law_3_holds_for_self_speculation",
    "test_law_3_rejects_changes_that_leave_the_drafted_tokens_out": (
        "test_law_3_rejects_processors_without_drafted_tokens"
    ),
    "test_law_3_rejects_an_assumed_span_that_is_left_out": (
        "test_law_3_rejects_processors_without_assumed_tokens"
    ),
}
# Tests of PEARL's schedules that run over heads too. The rows before were those of a draft model.
OVER_HEADS = (
    "test_law_1_greedy_output_is_the_targets_own",
    "test_law_2_coupled_output_is_the_targets_own_sample",
    "test_law_3_rejects_an_untested_first_token",
    "test_law_5_cache_lengths_after_every_round",
    "test_law_5_earlier_requests_change_nothing",
    "test_law_5_one_token_prompts_and_one_token_outputs",
    "test_law_5_ragged_batches_equal_single_rows",
)


def renamed(names: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the inventory's names and entries in their current forms."""
    found: dict[str, list[str]] = {}
    for name, entries in names.items():
        name_now = RENAMED.get(name, name)
        schedules = "pearl_" if name_now != OVER_HEADS[2] else ("pearl", "plus", "without")
        found.setdefault(name_now, []).extend(
            f"{entry}-chain"
            if name_now in OVER_HEADS and entry.startswith(schedules)
            else RENAMED.get(f"{name}[{entry}]", RENAMED.get(entry, entry))
            for entry in entries
        )
    return found


def test_no_row_left_a_law():
    assert not snapshots.lost(renamed(INVENTORY["law_rows"]), snapshots.law_rows())


def test_no_test_of_a_law_and_no_control_is_lost(collected_tests: list[str]):
    before = renamed(INVENTORY["law_tests"])
    assert not snapshots.lost(before, snapshots.by_function(collected_tests))
    some = next(name for name in collected_tests if name.startswith("test_law_1_rejects["))
    without = [name for name in collected_tests if name != some]
    assert snapshots.lost(before, snapshots.by_function(without)) == [some], "control: a lost test"


@pytest.mark.parametrize(
    ("job", "override"),
    tiered(
        [(job, some) for job, all_ in INVENTORY["configurations"].items() for some in all_],
        lambda job, override: not override,
    ),
)
def test_every_configuration_still_composes(job: str, override: str):
    assert snapshots.composed(job, RENAMED.get(override, override)).job == job


def test_commands_removed_from_the_readme_still_compose():
    """Check the inventory's commands that the README and docs/cli.md no longer have.

    tests/test_readme.py composes the present ones.
    """
    from tests.test_readme import composed, parts

    for command in sorted({*INVENTORY["commands"]} - {*snapshots.readme_commands()}):
        job, arguments = parts(RENAMED.get(command, command))
        assert composed(job, arguments).job == job, command


def test_no_drafter_and_no_key_of_one_is_lost():
    now = {name: one["keys"] for name, one in snapshots.named_drafters().items()}
    before = {name: one["keys"] for name, one in INVENTORY["drafters"].items()}
    assert not snapshots.lost(renamed(before), now)
    assert {RENAMED.get(name, name) for name in before} <= now.keys()


def test_fixtures_are_small_and_contain_no_paths_of_a_machine():
    files = [path for path in snapshots.FIXTURES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    for path in files:
        assert str(snapshots.ROOT).encode() not in path.read_bytes(), path
        assert b"/tmp/" not in path.read_bytes(), path

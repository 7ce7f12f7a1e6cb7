"""Invalid options of drafters raise a UserError in `decoding.load` and in the jobs."""

import math
from pathlib import Path
from typing import Any

import pytest

from decoding.drafters.build import choose_drafter, options_of
from decoding.drafters.options import OPTIONS
from decoding.drafters.registry import DRAFTERS, imported
from decoding.engine import generate, load
from decoding.errors import UserError
from jobs.config import TargetConfig
from jobs.drafters import check_entries, describe

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "target"
# arguments of classes that take a model in memory, and the target's folder
IN_MEMORY = {"model", "head", "heads", "vocabularies", "target_folder"}
NUMBERS = [True, 2.5, "4", math.nan, math.inf, -1, 10**9, [2], None]
SWITCHES = ["yes", 1, None]
LISTS = [3, "3", [2.5], [True], [-1], ["a"], [math.nan]]
BAD: dict[str, dict[str, list[Any]]] = {
    "chain": {
        "dtype": [3, "", None],
        "device": [3, "foo", None],
        "name": [3, "", ["a"]],
        "trust_remote_code": SWITCHES,
    },
    "ranked_tree": {
        "frontier": [*NUMBERS, 0],
        "max_nodes": [*NUMBERS, 0, 10**5],
        "by_cost": SWITCHES,
        "children": [3, None],
    },
    "graph": {
        "match": NUMBERS,
        "sibling_threshold": [math.nan, True, "x", 2],
        "leaf_threshold": [math.nan, None],
    },
    # the first numbers of children would make a tree of 10**12 nodes
    "multi_candidate": {"branching": [*LISTS, [10**4] * 3, [1] * 100, [0], []]},
    "static_tree": {"choices": [3, "x", [0], [[0.5]], [["a"]], [[0] * 5000], [[-1]], []]},
    "ouroboros": {
        "ngram": [*NUMBERS, 1],
        "columns": [*NUMBERS, 0],
        "candidates": [*NUMBERS, 0],
        "suffixes": NUMBERS,
    },
    "chain_with_lookup": {"min_match": [True, 2.5, "4", math.nan, 0]},
    "other_vocabulary": {"rule": ["words", "", 3, None, ["tokens"]]},
    "prompt_lookup": {"max_ngram": [*NUMBERS, 0], "min_ngram": [*NUMBERS, 0], "name": [3, ""]},
    "suffix_lookup": {"min_match": [True, 2.5, "4", math.nan, 0]},
    "lookahead": {"columns": [*NUMBERS, 0], "from_text": SWITCHES},
    "self_speculation": {"attention": LISTS, "mlp": [{"a": 1}, None]},
}
CASES = [
    (name, option, value)
    for name, options in BAD.items()
    for option, values in options.items()
    for value in values
]


def entry_of(name: str, option: str, value: Any) -> dict[str, Any]:
    needed = {DRAFTERS[name].needs: str(ASSETS)} if DRAFTERS[name].needs else {}
    return {"use": name, **needed, option: value}


@pytest.mark.parametrize(("name", "option", "value"), CASES, ids=lambda value: ascii(value)[:30])
def test_invalid_options_are_refused(name: str, option: str, value: Any) -> None:
    entry = entry_of(name, option, value)
    jobs = (
        lambda: describe([entry], TargetConfig(path=str(ASSETS), device="cpu"), control=False),
        lambda: check_entries([entry]),
    )
    # in a job's configuration, a number is a name too
    for way in (lambda: choose_drafter(entry), *(() if option == "name" else jobs)):
        with pytest.raises(UserError, match=f"{option} is .*, expected") as caught:
            way()
        assert len(str(caught.value)) < 400


def test_every_option_of_every_drafter_has_a_rule() -> None:
    for entry in DRAFTERS.values():
        assert (options_of(imported(entry.kind)) or set()) - IN_MEMORY <= OPTIONS.keys()
        for option, value in entry.options.items():
            assert OPTIONS[option].fits(value)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("ranked_tree", "frontier", 64),
        ("ranked_tree", "max_nodes", 4096),
        ("multi_candidate", "branching", (60, 60)),
        ("static_tree", "choices", [[0, 0], [1]]),
        ("graph", "sibling_threshold", 0),
        ("prompt_lookup", "max_ngram", 64),
        ("self_speculation", "skips", ASSETS),
    ],
)
def test_control_options_at_their_bounds_are_valid(name: str, option: str, value: Any) -> None:
    assert choose_drafter(entry_of(name, option, value)).options[option] == value
    check_entries([entry_of(name, option, value)])


def test_a_tree_of_the_largest_size_decodes() -> None:
    engine = load(ASSETS, entry_of("ranked_tree", "max_nodes", 4096))
    drafted = generate(engine, [4, 5], max_new_tokens=3).tokens
    assert drafted == generate(load(ASSETS), [4, 5], max_new_tokens=3).tokens

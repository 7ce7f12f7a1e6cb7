"""The recurrent drafter: closed forms of ideal and adversarial heads, every width, bad input.

The laws of all drafters are in tests/decoding, whose table ROWS includes this one.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding import devices
from decoding.costs.timing import time_parts
from decoding.errors import UserError
from decoding.interfaces import Proposal, RoundCosts
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.stopping.planner import StepPlanner
from recurrent_drafting.checkpoint import save_head
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import HeadConfig, RecurrentHead
from tests.decoding.row_kinds.recurrent import random_head, recurrent
from tests.decoding.rows import BY_NAME, Kit
from tests.support.tiers import tiered
from tests.support.tiny_targets import hf_model, native_of, random_prompts
from tests.support.toy_heads import exact_head, markov

PROMPTS = [[7], [3, 1, 4], [2, 2], [5, 9, 0, 1, 2, 3]]
GAMMA, ROUNDS = 4, 6
PEAKED = 8.0  # scale of logits that makes a Markov target nearly deterministic


def settings_of(rule: str, **fields: object) -> Settings:
    sampled = {} if rule == "greedy" else {"temperature": 1.0, "verify": rule}
    usual = {"num_draft_tokens": GAMMA, "max_new_tokens": (GAMMA + 1) * ROUNDS, "seed": 5}
    return Settings(**{**usual, **sampled, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "width", "children", "scale"),
    [
        ("greedy", 1, "top_k", 1.5),
        ("greedy", 4, "top_k", PEAKED),
        ("coupled", 1, "top_k", 1.5),
        ("token", 1, "sampled", 1.5),
        ("block", 1, "sampled", 1.5),
        ("token", 2, "sampled", 1.5),
        ("token", 5, "sampled", 1.5),
    ],
)
def test_a_perfect_head_gains_the_closed_form(
    rule: str, width: int, children: str, scale: float
) -> None:
    """Check that an exact head gains gamma + 1 tokens in every round, under every rule.

    This includes the first round of a one-token prompt.
    """
    target = markov(scale=scale)
    drafter = RecurrentDrafter(head=exact_head(target), beam_width=width, children=children)
    plain = decode(target, None, PROMPTS, settings_of(rule))
    drafted = decode(target, drafter, PROMPTS, settings_of(rule))
    assert [g.block_efficiency for g in drafted] == [GAMMA + 1] * len(PROMPTS)
    assert [g.accepted_by_depth for g in drafted] == [[ROUNDS] * GAMMA] * len(PROMPTS)
    if rule in ("greedy", "coupled"):
        assert [g.tokens for g in drafted] == [g.tokens for g in plain]


@pytest.mark.parametrize("width", [1, 4])
def test_an_adversarial_head_changes_no_output(width: int) -> None:
    target = markov()
    drafter = RecurrentDrafter(head=exact_head(target, sign=-1.0), beam_width=width)
    plain = decode(target, None, PROMPTS, settings_of("greedy"))
    drafted = decode(target, drafter, PROMPTS, settings_of("greedy"))
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert all(g.block_efficiency == 1 and g.accepted == 0 for g in drafted)


@pytest.mark.parametrize("width", tiered([1, 4, 10, 45], [10]))
def test_greedy_output_is_the_targets_at_every_width(width: int) -> None:
    target, prompts = native_of(hf_model("llama", layers=2)), random_prompts(24)
    settings = Settings(max_new_tokens=64, num_draft_tokens=4)
    plain = decode(target, None, prompts, settings)
    drafted = decode(target, recurrent(target, width), prompts, settings)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert sum(g.rounds for g in drafted) < sum(g.rounds for g in plain), (
        "no draft was ever accepted"
    )


@pytest.mark.parametrize("rule", tiered(["greedy", "coupled", "token"], ["token"]))
@pytest.mark.parametrize("width", [1, 6])
def test_recorded_drafts_equal_eager_ones(width: int, rule: str) -> None:
    target, prompts = native_of(hf_model("llama", layers=2)), random_prompts(6)
    settings = settings_of(rule, max_new_tokens=24)
    eager = decode(target, recurrent(target, width), prompts, settings)
    recorded = decode(target, recurrent(target, width, execution="graph"), prompts, settings)
    for one, other in zip(eager, recorded, strict=True):
        assert (one.tokens, one.rounds, one.trace, one.drafted) == (
            other.tokens,
            other.rounds,
            other.trace,
            other.drafted,
        )


def test_a_wider_beam_accepts_more() -> None:
    target, prompts = native_of(hf_model("llama", layers=2)), random_prompts(24)
    settings = Settings(max_new_tokens=64, num_draft_tokens=2)
    rounds = [
        sum(g.rounds for g in decode(target, recurrent(target, width), prompts, settings))
        for width in (1, 8, 40)
    ]
    assert rounds[0] > rounds[1] > rounds[2]


def shortlisted(head: RecurrentHead, ids_V: torch.Tensor) -> RecurrentHead:
    """Return a copy of the head whose shortlist is `ids_V`."""
    short = (
        RecurrentHead(replace(head.config, draft_vocab_size=len(ids_V)))
        .double()
        .requires_grad_(False)
        .eval()
    )
    output = f"lm_head.{head.config.num_draft_layers}.weight"
    short.load_state_dict({**head.state_dict(), output: head.output[ids_V], "token_ids_V": ids_V})
    return short


@pytest.mark.parametrize("children", ["top_k", "sampled"])
@pytest.mark.parametrize("rule", tiered(["greedy", "coupled", "token"], ["token"]))
def test_a_shortlist_drafts_only_its_tokens(rule: str, children: str) -> None:
    target, prompts, ids_V = (
        native_of(hf_model("llama", layers=2)),
        random_prompts(8),
        torch.arange(2, 42, 2),
    )
    observed: set[int] = set()

    class Recording(RecurrentDrafter):
        def propose(self, *arguments: Any) -> Proposal:
            proposal = super().propose(*arguments)
            for tokens, count in zip(proposal.tokens_BN.tolist(), proposal.counts_B):
                observed.update(tokens[:count])
            return proposal

    drafter = Recording(
        head=shortlisted(random_head(target, 3.0), ids_V), beam_width=5, children=children
    )
    drafted = decode(target, drafter, prompts, settings_of(rule, max_new_tokens=24))
    assert observed
    assert observed <= set(ids_V.tolist())
    if rule != "token":
        plain = decode(target, None, prompts, settings_of(rule, max_new_tokens=24))
        assert [g.tokens for g in drafted] == [g.tokens for g in plain]


def test_a_finished_row_costs_and_counts_nothing() -> None:
    """Check that the target's forward and the head's search run over unfinished rows alone."""
    target = markov()
    drafter = RecurrentDrafter(head=exact_head(target), beam_width=3)
    observed: dict[str, list[int]] = {"target": [], "head": []}

    def count_rows(owner: Any, method: str, rows: list[int]) -> None:
        call = getattr(owner, method)

        def counting(first: torch.Tensor, *rest: Any) -> Any:
            rows.append(len(first))
            return call(first, *rest)

        setattr(owner, method, counting)

    count_rows(target, "forward", observed["target"])
    count_rows(drafter.head, "context", observed["head"])
    done = decode(target, drafter, PROMPTS, settings_of("token", stop_token_ids=(3, 8)))
    unfinished = [
        sum(g.rounds > number for g in done) for number in range(max(g.rounds for g in done))
    ]
    assert len(set(unfinished)) > 1, "rows must end in different rounds"
    assert observed["target"][-len(unfinished) :] == unfinished
    assert observed["head"] == unfinished[: len(observed["head"])]


def test_steps_are_counted_and_timed() -> None:
    target = markov()
    drafter = RecurrentDrafter(head=exact_head(target), beam_width=3)
    (done,) = decode(target, drafter, [[1, 2]], settings_of("greedy", max_new_tokens=10))
    assert done.draft_steps >= done.rounds
    parts = time_parts(target, drafter, [1, 2, 3], repeats=2, warmup=1)
    assert parts.t_draft_ms is not None
    assert parts.t_draft_ms > 0


CHEAP, EXPENSIVE = RoundCosts(0.01, (1.0, 1.01, 1.02)), RoundCosts(5.0, (1.0, 4.0, 7.0))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("children", ["top_k", "sampled"])
def test_costs_set_the_size_of_drafts(
    children: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that drafts are long if drafting is cheap, and empty if it is expensive.

    The head predicts the target exactly. ahead: whether the planner knows only earlier rounds.
    """
    monkeypatch.setattr(devices, "runs_ahead", lambda device: ahead)
    target = markov(scale=PEAKED)
    drafted = {}
    for name, costs in (("cheap", CHEAP), ("expensive", EXPENSIVE)):
        drafter = RecurrentDrafter(
            head=exact_head(target), beam_width=4, children=children, by_cost=True
        )
        settings = settings_of("token", costs=costs, max_new_tokens=60)
        drafted[name] = decode(target, drafter, PROMPTS, settings)
    assert all(g.block_efficiency > 4 for g in drafted["cheap"])
    assert all(g.drafted == 0 for g in drafted["expensive"])
    fixed = RecurrentDrafter(head=exact_head(target), beam_width=4, children=children)
    all_nodes = decode(target, fixed, PROMPTS, settings_of("token", max_new_tokens=60))
    assert sum(g.verified for g in drafted["cheap"]) < sum(g.verified for g in all_nodes), (
        "a confident head needs few nodes"
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_a_wrong_head_stops_drafting_and_retries(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "runs_ahead", lambda device: ahead)
    target = markov(scale=PEAKED)
    drafter = RecurrentDrafter(head=exact_head(target, sign=-1.0), beam_width=2, by_cost=True)
    costs = RoundCosts(0.3, (1.0, 1.2, 1.4))
    (done,) = decode(
        target, drafter, [[1, 2]], settings_of("greedy", costs=costs, max_new_tokens=200)
    )
    assert done.rounds == 200
    assert 2 <= done.draft_steps < 100
    drafting = [n for n, mark in enumerate(done.trace) if mark == "0"]
    assert drafting[0] == 0
    assert drafting[-1] > 50, "it never retried"


def test_copied_tokens_do_not_change_the_trust_in_estimates() -> None:
    """Check that tokens copied by a lookup (decoding/drafters/with_lookup.py) leave trust at 1.

    Control: a draft of the head that is accepted more often than estimated raises it.
    """
    planner = StepPlanner(CHEAP)
    planner.learn(None, 4)
    assert planner.trust.value == 1.0
    planner.begin(4)
    planner.add([0.9])
    planner.learn(None, 1)
    assert planner.trust.value > 1.0, "more tokens were accepted than estimated"


def drafter_with(beam_width: int = 4, **options: object) -> RecurrentDrafter:
    return RecurrentDrafter(head=exact_head(markov()), beam_width=beam_width, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["recurrent", "multi_candidate", "recurrent_with_lookup"])
def test_block_verification_of_a_tree_is_refused_before_anything_is_decoded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = markov()
    kit = Kit(target, target, target, [], random_head(target))
    drafter = BY_NAME[kind].make(kit)
    monkeypatch.setattr(target, "open", None)
    monkeypatch.setattr(target, "forward", None)
    with pytest.raises(
        UserError, match="proposes trees, and verify=block tests chains. Use verify=token"
    ):
        decode(target, drafter, PROMPTS, Settings(temperature=1.0, verify="block"))


def test_invalid_input_is_named() -> None:
    with pytest.raises(UserError, match="beam_width is 13, expected 1 to 12"):
        drafter_with(13)
    with pytest.raises(UserError, match="beam_width is 0, expected 1 to 12"):
        drafter_with(0)
    with pytest.raises(UserError, match="children is 'guessed', expected top_k or sampled"):
        drafter_with(children="guessed")
    with pytest.raises(
        UserError, match="'fast' is unknown, expected one of eager, fused, graph, compiled"
    ):
        drafter_with(execution="fast")
    with pytest.raises(UserError, match="trained for a hidden size of 12, but 'table' has 13"):
        decode(markov(symbols=13), drafter_with(), [[1]], settings_of("greedy"))
    target = markov()
    target.vocab_size = 14
    with pytest.raises(UserError, match="trained for a vocabulary of 12, but 'table' has 14"):
        decode(target, drafter_with(), [[1]], settings_of("greedy"))
    with pytest.raises(
        UserError,
        match="4 beams of 4 tokens are 16 nodes, but 'table' holds 15 tokens. Use a smaller "
        ".*beam_length",
    ):
        decode(markov(max_length=15), drafter_with(), [[1]], settings_of("greedy"))
    with pytest.raises(UserError, match="prompt 0 has 20 tokens, but 'table' holds at most 20"):
        decode(markov(max_length=20), drafter_with(), [[1] * 20], settings_of("greedy"))
    with pytest.raises(UserError, match="prompt 0 is empty"):
        decode(markov(), drafter_with(), [[]], settings_of("greedy"))
    with pytest.raises(UserError, match="needs a chain drafter that can run"):
        decode(markov(), drafter_with(), [[1]], settings_of("greedy", schedule="pearl_virtual"))
    with pytest.raises(UserError, match="needs measured costs"):
        decode(markov(), drafter_with(by_cost=True), [[1]], settings_of("greedy"))


def test_a_folder_loads_with_its_name_and_dtype(tmp_path) -> None:  # type: ignore[no-untyped-def]
    target = markov()
    save_head(exact_head(target), tmp_path / "mine", torch.float64)
    drafter = RecurrentDrafter(tmp_path / "mine", beam_width=2, dtype="float64")
    assert (drafter.name, drafter.num_layers) == ("mine", 0)
    assert drafter.num_parameters == exact_head(target).num_parameters
    (done,) = decode(target, drafter, [[1, 2]], settings_of("greedy"))
    assert done.tokens == decode(target, None, [[1, 2]], settings_of("greedy"))[0].tokens
    with pytest.raises(UserError, match="dtype 'int3' is unknown"):
        RecurrentDrafter(tmp_path / "mine", dtype="int3")
    with pytest.raises(UserError, match="does not exist, expected a model folder"):
        RecurrentDrafter(tmp_path / "other")


def test_a_drafter_has_the_sizes_of_its_head() -> None:
    head = RecurrentHead(HeadConfig(12, 6, 12, num_draft_layers=2))
    drafter = RecurrentDrafter(head=head, beam_width=3)
    assert drafter.num_layers == 2
    assert drafter.width(5) == 15

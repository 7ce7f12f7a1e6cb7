"""The size of a row's draft: number of beams, independence of neighbors, and room for trees."""

from dataclasses import replace

import pytest
import torch

from decoding import devices
from decoding.costs.measure import measure_costs, widths_to_time
from decoding.interfaces import NO_NODE, Proposal, RoundCosts
from decoding.loop import decode
from decoding.rounds.settings import Settings
from recurrent_drafting import plans
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.recorded import RecordedBeams
from tests.decoding.row_kinds.recurrent import AllBeams, random_head
from tests.support.tiny_targets import hf_model, native_of, random_prompts
from tests.support.toy_heads import exact_head, markov

WIDTH = 8
FORWARDS = tuple(1 + 0.001 * n for n in range(40))  # nodes cost nearly nothing
FLAT, STEEP = (
    RoundCosts(0.1, FORWARDS, t_draft_by_frontier_ms=((1, 0.1), (WIDTH, most)))
    for most in (0.11, 4.0)
)


def mean_beams(costs: RoundCosts, rule: str, children: str) -> float:
    """Return the mean number of beams from which steps after the first start, on random text."""
    target = markov()
    drafter = AllBeams(head=exact_head(target), beam_width=WIDTH, children=children, by_cost=True)
    sampled = {} if rule == "greedy" else {"temperature": 1.0, "verify": rule}
    settings = Settings(max_new_tokens=80, num_draft_tokens=4, costs=costs, **sampled)  # type: ignore[arg-type]
    (done,) = decode(target, drafter, [[1, 2, 3]], settings)
    if rule != "token":
        assert done.tokens == decode(target, None, [[1, 2, 3]], settings)[0].tokens
    assert done.draft_steps > done.rounds, "a round of one step starts from the tip"
    return (done.draft_frontiers - done.rounds) / (done.draft_steps - done.rounds)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("rule", "children"), [("greedy", "top_k"), ("coupled", "top_k"), ("token", "sampled")]
)
def test_a_step_starts_from_as_many_beams_as_pay(
    rule: str, children: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that steps start from over four beams if width is free, and from under two if not.

    ahead: whether beams are planned before the round, instead of from each step's chances.
    """
    monkeypatch.setattr(devices, "runs_ahead", lambda device: ahead)
    wide, narrow = mean_beams(FLAT, rule, children), mean_beams(STEEP, rule, children)
    assert 1 <= narrow < 2 < 4 < wide <= WIDTH


@pytest.mark.parametrize("children", ["top_k", "sampled"])
def test_a_search_has_as_many_beams_as_pay_on_the_machine(children: str) -> None:
    """Check that a search has all beams if a wide forward costs no more, and one if it does.

    The output is the target's with either number of beams.
    """
    target = markov()
    dear = RoundCosts(
        0.1,
        tuple(1.0 + 0.3 * n for n in range(40)),
        t_draft_by_frontier_ms=((1, 0.1), (WIDTH, 0.11)),
    )
    for costs, most, width in (
        (FLAT, WIDTH, WIDTH),
        (STEEP, WIDTH, 1),
        (dear, WIDTH, 1),
        (dear, 1, 1),
    ):
        assert plans.best_width(costs, most) == width
        drafter = RecurrentDrafter(
            head=exact_head(target), beam_width=most, children=children, by_cost=True
        )
        settings = Settings(max_new_tokens=40, num_draft_tokens=4, costs=costs)
        (done,) = decode(target, drafter, [[1, 2, 3]], settings)
        assert done.tokens == decode(target, None, [[1, 2, 3]], settings)[0].tokens
        assert (done.draft_frontiers > done.draft_steps) == (width > 1)


def test_timed_widths_end_at_the_widest_forward() -> None:
    assert [plans.list_widths(most) for most in (1, 2, 6, 8)] == [
        (1,),
        (1, 2),
        (1, 2, 4, 6),
        (1, 2, 4, 8),
    ]


@pytest.mark.parametrize("width", [1, 6])
def test_a_recorded_draft_serves_shorter_budgets(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a recorded draft serves shorter budgets, and that a longer one is recorded once.

    Each row's beams are read at the step where its budget ends.
    """
    target = native_of(hf_model("llama", layers=2))
    head, tips, hidden_BH = (
        random_head(target, 3.0),
        [3, 9],
        torch.ones(2, target.hidden_size, dtype=torch.float64),
    )
    captured = []
    monkeypatch.setattr(
        devices, "capture", lambda body, device, memory: captured.append(body) or body
    )
    recorded = RecordedBeams(head, width, target.embed, target.device)
    with torch.inference_mode():
        for depths, records in (([4, 4], 1), ([2, 3], 1), ([1, 0], 1), ([5, 2], 2), ([4, 5], 2)):
            found = recorded(tips, hidden_BH, depths, 1.0, None)
            fresh = RecordedBeams(head, width, target.embed, target.device)(
                tips, hidden_BH, depths, 1.0, None
            )
            assert len(captured) - 1 == records, "the fresh one records always"
            captured.pop()
            assert found.counts_B == fresh.counts_B
            assert found.tokens_BN.equal(fresh.tokens_BN)
            assert found.parents_BN is fresh.parents_BN is None or found.parents_BN.equal(
                fresh.parents_BN
            )  # type: ignore[union-attr, arg-type]


def test_room_is_the_size_of_the_last_trees() -> None:
    room = plans.Room()
    assert room.nodes(40) == 40, "the first tree has no predecessor"
    room.learn(22)
    assert room.nodes(40) == 22
    room.learn(30)  # a larger tree gets its room in the next round
    assert room.nodes(40) == 30
    assert room.nodes(24) == 18, "a shorter draft gets the same share"
    assert room.nodes(0) == 0
    room.learn(0)  # nothing was drafted
    for _ in range(plans.Room.ROUNDS):
        room.nodes(40)
        room.learn(25)
    assert room.nodes(40) == 25, "old trees are forgotten"


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_tree_without_room_loses_its_last_nodes_and_no_token(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = native_of(hf_model("llama", layers=2)), random_prompts(6)
    sampled = {} if rule == "greedy" else {"temperature": 1.0, "verify": rule}
    settings = Settings(max_new_tokens=24, num_draft_tokens=4, **sampled)  # type: ignore[arg-type]
    expected = [g.tokens for g in decode(target, None, prompts, settings)]
    monkeypatch.setattr(devices, "runs_ahead", lambda device: True)
    trees: dict[int, list[list[list[int]]]] = {}

    class Recording(RecurrentDrafter):
        def propose(self, *arguments: object) -> Proposal:
            proposal = super().propose(*arguments)  # type: ignore[arg-type]
            assert proposal.parents_BN is not None or not max(proposal.counts_B)
            if proposal.parents_BN is not None:
                rows = zip(proposal.parents_BN.tolist(), proposal.counts_B, strict=True)
                trees[least].append(
                    [[parent for parent in row[:count] if parent != NO_NODE] for row, count in rows]
                )
            return proposal

    for least in (32, 5):
        trees[least] = []
        monkeypatch.setattr(plans.Room, "nodes", lambda self, most, least=least: min(most, least))
        drafted = decode(
            target, Recording(head=random_head(target, 3.0), beam_width=8), prompts, settings
        )
        assert [g.tokens for g in drafted] == expected
    full, cut = trees[32][0], trees[5][0]  # both first rounds follow the same text
    assert [row[:5] for row in full] == cut
    assert any(len(row) > 5 for row in full)


@pytest.mark.parametrize("better", [1, 4])
def test_beams_are_chosen_by_complete_rounds(better: int) -> None:
    """Check that one or four beams are chosen from the measured costs of complete rounds.

    From the costs of the parts alone, four would be chosen.
    """
    target = markov()
    drafter = RecurrentDrafter(head=exact_head(target), beam_width=4, by_cost=True)
    asked: list[int] = []

    class Planner:
        def best_frontier(self, costs: RoundCosts) -> int:
            return 4

        def expected_rate(self, costs: RoundCosts) -> float:
            assert costs.frontier is not None
            asked.append(costs.frontier)
            return (2.0 if costs.frontier == better else 1.0) / costs.target_ms(1)

    drafter.capabilities = replace(drafter.capabilities, frontier_planner=Planner())
    found = measure_costs(
        target, drafter, [1, 2, 3], Settings(num_draft_tokens=3), widths=widths_to_time(drafter, 3)
    )
    assert sorted(asked) == [1, 4] and found.frontier == better
    assert len(found.t_target_ms) == 13, "forwards as wide as the tree are timed"


def test_the_rate_of_a_width_depends_on_costs() -> None:
    """Check that a tree has a higher rate than a chain if, and only if, width is cheap."""
    for costs, wide in ((FLAT, True), (STEEP, False)):
        assert (plans.width_rate(costs, WIDTH) > plans.width_rate(costs, 1)) == wide


CHEAP = RoundCosts(0.1, (1.0, 1.05, 1.1, 1.15, 1.2))
CHAIN = RoundCosts(0.3, (1.0, 1.1, 1.2, 1.3, 1.4))
EXPENSIVE = RoundCosts(0.3, (1.0, 1.2, 1.4, 1.6, 1.8))


def lengths(costs: RoundCosts, acceptance: float, rounds: int = 300) -> list[int]:
    """Return the draft lengths of a chain with a given acceptance rate.

    The number of accepted tokens is the expected one, with fractions carried over.
    """
    plan, found, owed = plans.make_plan(costs, 1, ahead=False), [], 0.0
    for _ in range(rounds):
        depth = plan.begin(4)
        owed += sum(acceptance**step for step in range(1, depth + 1))
        accepted = min(int(owed), depth)
        owed -= accepted
        plan.learn(None, accepted)
        found.append(depth)
    return found


def test_a_chains_length_follows_its_acceptance_rate() -> None:
    """Check that the mean length comes within 0.5 of the best one for the acceptance rate.

    A chain whose tokens are never accepted is given up and later retried.
    """

    def best(costs: RoundCosts, acceptance: float) -> int:
        rates = [1 / costs.plain_ms] + [
            sum(acceptance**step for step in range(n + 1))
            / costs.drafted_ms(n * costs.t_draft_ms, n)
            for n in range(1, 5)
        ]
        return rates.index(max(rates))

    for costs, acceptance in ((CHAIN, 0.99), (CHAIN, 0.5), (EXPENSIVE, 0.99)):
        last = lengths(costs, acceptance)[-50:]
        assert abs(sum(last) / len(last) - best(costs, acceptance)) <= 0.5, (acceptance, last)
    never = lengths(EXPENSIVE, 0.0)
    assert never[0] > 0 and 0 < sum(never[50:]) < 25, "it gives up and retries later"


def test_rows_of_a_batch_retry_together() -> None:
    """Check that rows that gave up draft again in the same rounds, the multiples of 16."""
    retries = [
        round_
        for round_, depth in enumerate(lengths(replace(EXPENSIVE, rows=4), 0.0, 600))
        if depth
    ]
    given_up = next(at for at in range(len(retries)) if retries[at] != at)
    assert given_up < len(retries) and all(round_ % 16 == 0 for round_ in retries[given_up:])


def test_a_long_draft_is_timed_at_a_few_widths() -> None:
    drafter = RecurrentDrafter(head=exact_head(markov()), beam_width=1, by_cost=True)
    few = widths_to_time(drafter, 1000)
    assert few[:17] == [*range(1, 18)] and few[-1] == 1001 and len(few) < 40

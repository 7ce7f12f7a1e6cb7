"""Device versions of decisions equal their eager versions, and rows of a batch stay independent.

Shapes: B rows, N drafted tokens, V vocabulary.
"""

from itertools import product
from typing import Any

import pytest
import torch

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import NO_NODE, Proposal, RoundCosts
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.sampling import noise
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.stopping.policies import CostRatioByRound
from decoding.verification import rules
from tests.support.host_waits import WAYS, models, settings_of
from tests.support.tiers import tiered
from tests.support.tiny_targets import random_prompts

from .rows import PICKED, ROWS, Kit

ALONE = (
    "multi_candidate",
    "ranked_tree",
    "budget_tree",
    "graph",
    "recurrent",
    "recurrent_by_cost",
    "recurrent_drawn",
    "recurrent_drawn_by_cost",
)
PICKED_ALONE = ("budget_tree_picked", "graph_picked")
QUICK = ("multi_candidate", "graph", "recurrent_drawn_by_cost")


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize(
    ("name", "rule"),
    tiered(
        [*product(ALONE, ("greedy", "token")), *product(PICKED_ALONE, ("token",))],
        lambda name, rule: rule == "token" and name in QUICK,
    ),
)
def test_device_drafts_do_not_depend_on_other_rows(name: str, rule: str) -> None:
    """Check that a row's tree size depends on its rounds alone, and that padding is not counted."""
    row = next(row for row in [*ROWS, *PICKED] if row.name == name)
    target, draft_model = models()
    drafter = row.make(Kit(target, target, draft_model, ()))
    prompts, settings = random_prompts(3, seed=3), settings_of(rule)
    together = decode(target, drafter, prompts, settings)
    for request, (prompt, expected) in enumerate(zip(prompts, together, strict=True)):
        (alone,) = decode(target, drafter, [prompt], settings, request_ids=[request])
        assert (
            alone.tokens,
            alone.rounds,
            alone.drafted,
            alone.tested_by_depth,
            alone.accepted_by_depth,
        ) == (
            expected.tokens,
            expected.rounds,
            expected.drafted,
            expected.tested_by_depth,
            expected.accepted_by_depth,
        )


def paths_of(proposal: Proposal, row: int) -> set[tuple[int, ...]]:
    """Return the tokens of the path to each of a row's nodes, without padding."""
    assert proposal.parents_BN is not None
    paths: list[tuple[int, ...]] = []
    for token, parent in list(
        zip(proposal.tokens_BN[row].tolist(), proposal.parents_BN[row].tolist())
    )[: proposal.counts_B[row]]:
        paths.append((*(paths[parent] if parent >= 0 else ()), token) if parent != NO_NODE else ())
    return set(paths) - {()}


@pytest.mark.parametrize("way", WAYS[:-1], ids=lambda way: str(way.get("verify", "greedy")))
def test_running_ahead_changes_no_token(
    monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    settings = Settings(max_new_tokens=32, num_draft_tokens=3, **{"temperature": 1.0, **way})
    texts = []
    for ahead in (False, True):
        monkeypatch.setattr(devices, "runs_ahead", lambda device, ahead=ahead: ahead)
        target, draft_model = models()
        made = decode(target, ChainDrafter(model=draft_model), random_prompts(4), settings)
        texts.append([row.tokens for row in made])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["q", "point mass", "equal"])
def test_rules_on_the_device_equal_the_eager_ones(
    rule: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check equal outcomes for random rows of every draft count; p = q leaves no residual."""
    generator = torch.Generator().manual_seed(1)
    chooser = TokenChooser(Warper(1.0), rule, 5, 7, torch.device("cpu"))
    function, outcomes = getattr(rules, rule), []
    for trial in range(60):
        counts_B = [trial % 5, 4, (trial * 7) % 5]
        logits_BNV = torch.randn(3, 5, 7, generator=generator)
        q_BNV = (
            logits_BNV[:, :4] if kind == "equal" else torch.randn(3, 4, 7, generator=generator)
        ).softmax(-1)
        tokens_BN = q_BNV.flatten(0, 1).multinomial(1, generator=generator).view(3, 4)
        proposal = Proposal(tokens_BN, counts_B, None, None if kind == "point mass" else q_BNV)
        chooser.begin([noise.key(trial, b) for b in range(3)], [trial] * 3, [9, 4, 7], 5)
        host = function(logits_BNV, proposal, chooser)
        with monkeypatch.context() as context:
            context.setattr(devices, "runs_ahead", lambda device: True)
            assert function(logits_BNV, proposal, chooser) == host
        outcomes += host.accepted_B
    assert {0, 1, 2 if kind == "point mass" else 4} <= set(outcomes)


def test_cost_ratio_decides_before_the_round() -> None:
    """Check that the chosen length has the most expected tokens per millisecond."""
    policy = CostRatioByRound(RoundCosts(0.1, (1.0, 1.01, 1.02, 1.03, 1.04)))
    assert policy.reads == "nothing" and policy.more(1, None)
    for _ in range(300):
        policy.update(4, 4)
    assert policy.planner.acceptance.value > 0.95 and policy.limit(4) == 4 and policy.limit(2) == 2
    for _ in range(900):  # rounds of one test each, long outweighed by rounds of four
        policy.update(4, 0)
    assert policy.planner.acceptance.value < 0.05 and policy.limit(4) == 0
    # acceptance rate 0.5: 1 + 0.5 over 1.11 ms, 1.75 over 1.22, 1.875 over 1.33 ...
    for _ in range(600):
        policy.update(4, 1)
    assert policy.planner.acceptance.value == pytest.approx(0.5, abs=0.02)
    assert policy.limit(4) == 2


def test_read_packs_tensors_of_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "runs_ahead", lambda device: True)
    assert devices.read(
        torch.tensor([[1, 2], [3, 31999]]),
        torch.tensor([0.1], dtype=torch.float64),
        torch.zeros(2, 0),
    ) == [
        [[1, 2], [3, 31999]],
        [0.1],
        [[], []],
    ]

"""Lenience: exact at 1, of its closed form below 1, and never without its name.

Shapes: V = 5 symbols, P two previous tokens.
"""

import pytest
import torch

from decoding import UserError
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.trees.static import StaticTree
from decoding.interfaces import Proposal
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.verification import device_chain
from decoding.verification.rules import RULES
from decoding.verification.token import token
from eval.statistics.joint_law import joint, p_value
from jobs.drafter_use import DrafterUse
from tests.support.tiny_targets import TableTarget, random_prompts

from .law_3 import PROMPT, count_triples, exact_row, target_table
from .rows import draft_table
from .test_laws import models

DRAWS = 20_000
P_LIMIT = 1e-6


def closed_form(p_V: list[float], q_V: list[float], lenience: float) -> list[float]:
    """Return the distribution of a token that is drafted from q and tested with this lenience."""
    kept_V = [min(q, p / lenience) for p, q in zip(p_V, q_V)]
    surplus_V = [max(p - q, 0.0) for p, q in zip(p_V, q_V)]
    rejected = 1 - sum(kept_V)
    return [kept + rejected * surplus / sum(surplus_V) for kept, surplus in zip(kept_V, surplus_V)]


def p_of(lenience: float, tested_for: float) -> float:
    """Return the p-value of drawn triples at one lenience under the closed form for another."""

    def row_of(model: TableTarget, text: list[int]) -> list[float]:
        model.open(1, 16)
        return exact_row(model.forward(torch.tensor([text]))[0][0, -1].tolist(), 1.0)

    def next_row(text: list[int]) -> list[float]:
        p_V, q_V = row_of(target_table(), text), row_of(draft_table(), text)
        return closed_form(p_V, q_V, tested_for)

    settings = Settings(
        max_new_tokens=5,
        num_draft_tokens=4,
        temperature=1.0,
        stopping="fixed",
        verify=f"lossy_lenience:{lenience}",
    )
    drafter = ChainDrafter(model=draft_table())
    counts = count_triples(target_table(), drafter, PROMPT, settings, DRAWS)
    return p_value(counts, joint(next_row, PROMPT))


def test_the_distribution_is_the_closed_form() -> None:
    assert p_of(0.4, tested_for=0.4) > P_LIMIT


def test_control_neither_the_target_nor_another_lenience_has_that_distribution() -> None:
    """Check that the law rejects a lenient decoder, and one of another lenience."""
    assert p_of(0.4, tested_for=1.0) < P_LIMIT
    assert p_of(0.4, tested_for=0.6) < P_LIMIT


def test_no_token_is_more_than_its_share_over_the_lenience() -> None:
    torch.manual_seed(0)
    for p_V, q_V in torch.randn(50, 2, 5).mul(2).softmax(-1).tolist():
        mixed_V = closed_form(p_V, q_V, 0.3)
        assert sum(mixed_V) == pytest.approx(1.0)
        assert all(mixed <= p / 0.3 + 1e-9 for mixed, p in zip(mixed_V, p_V))
        assert closed_form(p_V, q_V, 1.0) == pytest.approx(p_V)


@pytest.mark.parametrize("rows", [3, 12])  # the host's loop, and operations for all rows at once
def test_lenience_1_is_token_verification_draw_for_draw(rows: int) -> None:
    target, _, draft_model = models()
    prompts = random_prompts(rows)

    def texts(verify: str) -> list[list[int]]:
        settings = Settings(max_new_tokens=16, temperature=1.0, seed=2, verify=verify)
        drafter = ChainDrafter(model=draft_model)
        return [g.tokens for g in decode(target, drafter, prompts, settings)]

    assert texts("lossy_lenience:1") == texts("token")
    assert texts("lossy_lenience:0.2") != texts("token"), "control"


def test_the_device_version_decides_alike() -> None:
    torch.manual_seed(2)
    probs_BNV = torch.randn(6, 4, 5, dtype=torch.float64).mul(2).softmax(-1)
    q_BNV = torch.randn(6, 3, 5, dtype=torch.float64).mul(2).softmax(-1)
    proposal = Proposal(torch.randint(0, 5, (6, 3)), [3, 3, 2, 3, 1, 3], q_BNV=q_BNV)
    found = []
    for verify in ("lossy_lenience:0.1", "token"):
        chooser = TokenChooser(Warper(1.0), verify, 3, 5, torch.device("cpu"))
        chooser.begin(list(range(6)), [0] * 6, [5] * 6, 4)
        found.append(token(probs_BNV.log(), proposal, chooser))
        on_device = device_chain.token(
            probs_BNV, proposal, chooser, lambda *read: [one.tolist() for one in read]
        )
        assert on_device.tokens_B == found[-1].tokens_B
    assert sum(found[0].accepted_B) > sum(found[1].accepted_B), "control: lenience accepts more"


def test_greedy_decoding_is_never_lossy() -> None:
    target, _, draft_model = models()
    prompts = random_prompts(3)
    greedy = Settings(max_new_tokens=12, verify="lossy_lenience:0.01")
    plain = decode(target, None, prompts, greedy)
    drafted = decode(target, ChainDrafter(model=draft_model), prompts, greedy)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]


@pytest.mark.parametrize("verify", ["lenience:0.5", "token:0.5", "lossy", "lenient"])
def test_only_its_name_makes_a_rule_lossy(verify: str) -> None:
    with pytest.raises(UserError, match=r"is unknown, expected one of .*typical, lossy_lenience:L"):
        Settings(temperature=1.0, verify=verify)


@pytest.mark.parametrize("value", ["", ":", ":0", ":1.5", ":nan", ":half", ":-1"])
def test_a_lenience_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"expected a lenience above 0 and at most 1"):
        Settings(temperature=1.0, verify=f"lossy_lenience{value}")
    with pytest.raises(UserError, match=r"expected a lenience above 0 and at most 1"):
        DrafterUse(verify=f"lossy_lenience{value}")


def test_trees_and_overlapped_schedules_refuse_it() -> None:
    target, _, draft_model = models()
    settings = Settings(temperature=1.0, verify="lossy_lenience:0.5")
    with pytest.raises(UserError, match=r"verify=lossy_lenience:0.5 tests chains"):
        decode(target, StaticTree(model=draft_model), random_prompts(1), settings)
    with pytest.raises(UserError, match=r"verify=lossy_lenience:0.5 does not work with schedule"):
        DrafterUse(verify="lossy_lenience:0.5", schedule="pearl_virtual")
    tree = Proposal(torch.tensor([[1, 2]]), [2], torch.tensor([[-1, -1]]))
    chooser = TokenChooser(Warper(1.0), "lossy_lenience:0.5", 3, 5, torch.device("cpu"))
    with pytest.raises(ValueError, match="found a tree"):
        RULES[chooser.rule](torch.zeros(1, 3, 5), tree, chooser)  # type: ignore[call-arg]

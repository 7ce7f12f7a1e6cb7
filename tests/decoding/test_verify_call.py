"""Chains that a fused target verifies in one call: the outcomes of the rules, and law 3.

Shapes: B rows, N drafted tokens, V vocabulary.
"""

from collections.abc import Iterator

import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.interfaces import Chooser, Outcome, Proposal, VerifyCall
from decoding.loop import decode
from decoding.models.native.chains import verifies, verify_chains
from decoding.rounds.settings import Settings
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.verification.rules import RULES
from tests.support.tiny_targets import TableTarget, hf_model, native_of, random_prompts

from .law_3 import FEW_DRAWS, P_LIMIT, drafter_of, law_holds

B, N, V = 3, 4, 300
COUNTS = ([4, 4, 4], [0, 4, 2], [3, 1, 0])
CPU = torch.device("cpu")


def rounds(
    verify: str, dtype: torch.dtype, has_q: bool, temperature: float
) -> Iterator[tuple[torch.Tensor, Proposal, TokenChooser]]:
    """Yield random rounds of a target and a similar drafter: logits, chains and the chooser."""
    generator = torch.Generator().manual_seed(4)
    chooser = TokenChooser(Warper(temperature), verify, 0, V, CPU)
    for number in range(60):
        chooser.begin([5, 6, 7], [number, 2, number], [11, 4, 80 + number], N + 1)
        logits_BNV = 2 * torch.randn(B, N + 1, V, generator=generator)
        other_BNV = logits_BNV[:, :N] + 0.7 * torch.randn(B, N, V, generator=generator)
        q_BNV = (other_BNV / (temperature or 0.3)).softmax(-1)
        tokens_BN = q_BNV.flatten(0, 1).multinomial(1, generator=generator).view(B, N)
        q_BNV = q_BNV.double() if dtype == torch.float64 else q_BNV
        proposal = Proposal(tokens_BN, COUNTS[number % 3], q_BNV=q_BNV if has_q else None)
        yield logits_BNV.to(dtype), proposal, chooser


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("verify", "has_q", "temperature"),
    [
        ("greedy", False, 0.0),
        ("token", True, 1.0),
        ("token", True, 0.6),
        ("token", False, 1.0),
        ("lossy_lenience:0.4", True, 1.0),
        ("coupled", False, 1.0),
        ("coupled", False, 0.6),
    ],
)
def test_a_call_verifies_as_the_rule_does(
    verify: str, has_q: bool, temperature: float, dtype: torch.dtype
) -> None:
    accepted, rejected = 0, 0
    for logits_BNV, proposal, chooser in rounds(verify, dtype, has_q, temperature):
        assert verifies(chooser)
        outcome, (largest, _) = verify_chains(logits_BNV, proposal, chooser)
        assert outcome == RULES[chooser.rule](logits_BNV, proposal, chooser)
        assert largest <= logits_BNV.max()
        accepted += sum(outcome.accepted_B)
        rejected += sum(outcome.tested_B) - sum(outcome.accepted_B)
        plain = logits_BNV[:, :1]
        outcome, _ = verify_chains(plain, None, chooser)
        assert outcome == RULES[chooser.rule](plain, None, chooser)
    assert accepted > 5 and rejected > 5  # the control: rounds of both kinds occur


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("excluded", [float("-inf"), -1.0], ids=["excluded", "unlikely"])
def test_an_excluded_token_has_probability_zero(excluded: float, dtype: torch.dtype) -> None:
    """Reject one that the drafter samples almost never, when the residual is zero all over.

    In the control the other tokens are only unlikely, and the residual is theirs.
    """
    chooser = TokenChooser(Warper(1.0), "token", 0, V, CPU)
    logits_BNV = torch.full((1, 2, V), excluded, dtype=dtype).index_fill_(2, torch.tensor(7), 2.0)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    q_BNV = torch.zeros(1, 1, V, dtype=sums)
    q_BNV[..., 7] = 1.0
    proposal = Proposal(torch.tensor([[250]]), [1], q_BNV=q_BNV)
    emitted = set()
    for number in range(20):
        chooser.begin([5], [number], [11], 2)
        q_BNV[..., 250] = (2e-38, 1e-30)[number % 2]
        outcome, _ = verify_chains(logits_BNV, proposal, chooser)
        assert outcome == RULES["token"](logits_BNV, proposal, chooser)
        emitted |= set(outcome.tokens_B[0])
    assert (emitted == {7}) == (excluded != -1.0)


def test_rules_that_it_does_not_know_are_left_to_python() -> None:
    assert not verifies(TokenChooser(Warper(1.0), "block", 0, V, CPU))
    for rule in ("token", "coupled"):
        assert not verifies(TokenChooser(Warper(1.0, top_k=3), rule, 0, V, CPU))


class Calling(TableTarget):
    """The 5-symbol target of law 3, verified in one call where it can be."""

    calls = 0

    def verify_call(self, chooser: Chooser) -> VerifyCall | None:
        return self._verify if verifies(chooser) else None

    def _verify(
        self, logits_BNV: torch.Tensor, proposal: Proposal | None, chooser: Chooser
    ) -> tuple[Outcome, tuple[float, float]]:
        Calling.calls += 1
        return verify_chains(logits_BNV, proposal, chooser)


@pytest.mark.parametrize("rule", ["token", "coupled"])
@pytest.mark.parametrize("name", ["chain", "prompt_lookup"])
def test_law_3_holds_in_a_call(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Calling, "calls", 0)
    monkeypatch.setattr("tests.decoding.law_3.TableTarget", Calling)
    assert law_holds(drafter_of(name), rule, "plain", draws=FEW_DRAWS) > P_LIMIT
    assert Calling.calls > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_call_uses_the_shared_noise_of_each_row_and_depth(dtype: torch.dtype) -> None:
    """Draw the tokens of the eager race, over as many tokens as fill vectors and a rest."""
    for vocab_size in (1, 31, 257, 4096):
        chooser = TokenChooser(Warper(0.9), "coupled", 0, vocab_size, CPU)
        logits_BNV = torch.randn(
            2, 3, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        ).to(dtype)
        made = []
        for position in (11, 12):  # the control: other noise, other tokens
            chooser.begin([5, 6], [0, 0], [position, 40], 3)
            drafted_BN = chooser.race(logits_BNV)
            proposal = Proposal(drafted_BN[:, :2], [2, 2])
            outcome, _ = verify_chains(logits_BNV, proposal, chooser)
            assert outcome.tokens_B == drafted_BN.tolist()
            made.append(outcome.tokens_B[0])
        assert (made[0] != made[1]) == (vocab_size > 1)


def test_law_3_rejects_lenience_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.decoding.law_3.TableTarget", Calling)
    assert law_holds(drafter_of("chain"), "lossy_lenience:0.5", "plain") < P_LIMIT


def test_law_3_holds_for_drafts_of_a_call() -> None:
    model = native_of(
        hf_model("llama", layers=1, vocab_size=5, hidden_size=16, intermediate_size=24),
        execution="fused",
    )
    assert model.chain_call(1) is not None
    drafter = ChainDrafter(model=model)
    for rule in ("token", "block"):
        assert law_holds(drafter, rule, "plain", draws=FEW_DRAWS) > P_LIMIT


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nonfinite_logits_are_found_in_a_call(value: float, temperature: float) -> None:
    model = hf_model()
    model.state_dict()["model.norm.weight"].view(-1)[0] = value
    target = native_of(model, name="spoiled", execution="fused")
    settings = Settings(temperature=temperature)
    for drafter in (None, ChainDrafter(model=native_of(hf_model(), execution="fused"))):
        with pytest.raises(UserError, match="target 'spoiled' computes non-finite logits"):
            decode(target, drafter, random_prompts(2), settings)

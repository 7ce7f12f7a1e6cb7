"""Law 3 with a repetition penalty, allowed tokens and min-p, also for overlapped schedules.

Penalty and allowed tokens depend on the complete text, so testing a position with another text
changes the distribution.
"""

from collections.abc import Sequence

import pytest
import torch

from decoding.drafters.self_speculation import SelfSpeculation
from decoding.interfaces import Drafter, Target
from decoding.rounds.settings import Settings
from decoding.sampling.logits_processors import Processors
from tests.support.tiers import tiered
from tests.support.tiny_targets import hf_model, native_of

from .law_3 import (
    DRAWS,
    FEW_DRAWS,
    P_LIMIT,
    count_triples,
    drafter_of,
    exact_row,
    joint,
    p_value,
    target_table,
)
from .rows import COSTS
from .test_law_of_overlap import SCHEDULES

PROMPT = [2, 4, 1, 2, 4]
PENALTY = 3.0
WARPER = {"temperature": 1.2, "min_p": 0.1}
OTHERS = ("multi_candidate", "static_tree", "budget_tree", "graph", "lookahead", "ouroboros")
OTHERS += ("prompt_lookup", "chain_with_lookup")
ROWS = [("chain", "token"), ("chain", "block"), ("ranked_tree", "token")]
ROWS += [(name, "token") for name in OTHERS]

ALLOWED = [[symbol for symbol in range(5) if symbol != banned] for banned in range(5)]


def four_of_five(text: Sequence[int]) -> list[int]:
    """Allow all symbols but one, which depends on the complete text."""
    return ALLOWED[sum(text) % 5]


def some_of_many(text: Sequence[int]) -> list[int]:
    """Allow five tokens of a larger vocabulary, which depend on the complete text."""
    return [(sum(text) + 9 * i) % 48 for i in range(5)]


def changed(logits: Sequence[float], text: Sequence[int], allowed: Sequence[int]) -> list[float]:
    """Return one row of logits after both processors, from their definitions."""
    penalised = [
        (x / PENALTY if x > 0 else x * PENALTY) if i in text else x for i, x in enumerate(logits)
    ]
    return [x if i in allowed else float("-inf") for i, x in enumerate(penalised)]


def law_of(
    target: Target,
    drafter: Drafter | None,
    prompt: list[int],
    rule: str = "token",
    draws: int = DRAWS,
    **more: object,
) -> float:
    """Return the p-value of law 3 with both processors.

    Forwards over each prefix give the exact distribution. more: further fields of `Settings`.
    """
    allowed = four_of_five if target.vocab_size == 5 else some_of_many

    def next_row(text: list[int]) -> list[float]:
        target.open(1, 16)
        logits_V = target.forward(torch.tensor([text]))[0][0, -1]
        return exact_row(changed(logits_V.tolist(), text, allowed(text)), **WARPER)

    law = joint(next_row, prompt)
    fields = {
        "max_new_tokens": 5,
        "num_draft_tokens": 4,
        "verify": rule,
        "costs": COSTS,
        **WARPER,
        **more,
    }
    settings = Settings(repetition_penalty=PENALTY, allowed=allowed, **fields)  # type: ignore[arg-type]
    return p_value(count_triples(target, drafter, prompt, settings, draws), law)


@pytest.mark.parametrize(("row", "rule"), tiered(ROWS, [ROWS[0], ROWS[2]]))
def test_law_3(row: str, rule: str) -> None:
    assert law_of(target_table(), drafter_of(row), PROMPT, rule, FEW_DRAWS) > P_LIMIT


@pytest.mark.parametrize("name", tiered(["pearl", "without_pre", "plus_eager"], ["pearl"]))
def test_law_3_under_overlapped_schedules(name: str) -> None:
    assert law_of(target_table(), drafter_of("chain"), PROMPT, **SCHEDULES[name]) > P_LIMIT


@pytest.mark.parametrize("rule", tiered(["token", "block"], ["token"]))
def test_law_3_holds_for_self_speculation(rule: str) -> None:
    target, drafter = (
        native_of(hf_model("llama", layers=2)),
        SelfSpeculation(attention=(1,), mlp=(0,)),
    )
    assert law_of(target, drafter, [7, 9, 5], rule, num_draft_tokens=3, max_new_tokens=4) > P_LIMIT


@pytest.mark.parametrize("row", tiered(["chain", "static_tree", "lookahead"], ["static_tree"]))
def test_law_3_rejects_processors_without_drafted_tokens(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Processors.__call__
    monkeypatch.setattr(
        Processors,
        "__call__",
        lambda self, logits, sequences, *path: original(self, logits, sequences),
    )
    assert law_of(target_table(), drafter_of(row), PROMPT) < P_LIMIT


def test_law_3_rejects_processors_without_assumed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Processors.__call__
    monkeypatch.setattr(
        Processors,
        "__call__",
        lambda self, logits, sequences, *path: original(self, logits, sequences),
    )
    assert law_of(target_table(), drafter_of("chain"), PROMPT, **SCHEDULES["pearl"]) < P_LIMIT

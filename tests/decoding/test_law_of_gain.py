"""Law 4: a perfect drafter has the closed form of its row, and an adversarial one changes no token.

Drafters are perfect in two ways. On random models, q = p for every row that drafts with the
target's twin. On a deterministic target (tests/support/bigram_targets.py) all rows are perfect if
their models and heads predict its text and the prompt contains it. With models and heads that
predict the opposite, and a misleading prompt, no row has an accepted token.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import pytest

from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.stats import Generation
from decoding.sampling import noise
from tests.support import bigram_targets as last_word
from tests.support.tiny_targets import random_prompts

from .rows import ADDED, BY_NAME, ROWS, DrafterRow, Kit
from .test_laws import Settings, models, name, with_rule

PAIRS = [(row, rule) for row in ROWS for rule in row.rules]
PERFECT = [
    (row, rule)
    for row, rule in PAIRS
    if row.perfect is not None and rule in (row.perfect_rules or row.rules)
]
GAMMA = 6
# Tokens a round by draft length gamma, gamma + 1 by default. Costs do not shorten drafts: with
# `rows.COSTS` the rate of n certain tokens, (1 + n) / (0.2 n + 1 + 0.05 n), increases up to n = 6.
FORMS: dict[str, Callable[[int], int]] = {
    "static_tree": lambda gamma: min(gamma, 4) + 1,  # the deepest path of its fixed shape
    # the tokens of a pooled phrase after its first one: ngram - 1
    "lookahead": lambda gamma: min(gamma, 3) + 1,
}
UNSURE_PROMPTS = [[3], [4, 5], [9, 9, 1], [30]]
# Of 32 tokens, the likeliest twelve of a model and of its opposite are disjoint.
UNSURE = {"temperature": 1.0, "top_k": 12}


def full_chain(gamma: int) -> int:
    """Return the tokens of a round in which gamma tokens are accepted."""
    return gamma + 1


@lru_cache
def model(sure: bool, sign: int, copy: int) -> NativeTarget:
    """Return a model of `sign` times a table; copies have separate caches."""
    return last_word.model_of(sign * (last_word.sure_table() if sure else last_word.unsure_table()))


def kit_of(sure: bool, predictive: bool, answers: Sequence[Sequence[int]] = ()) -> Kit:
    """Return a target with models and a head that predict its text, or the opposite."""
    sign = 1 if predictive else -1
    table_VV = last_word.sure_table() if sure else last_word.unsure_table()
    return Kit(
        model(sure, 1, 0),
        model(sure, 1, 1),
        model(sure, sign, 2),
        answers,
        last_word.head_of(sign * table_VV),
    )


@lru_cache
def sure_texts(
    misleading: bool, rule: str, new_tokens: int
) -> tuple[list[list[int]], list[Generation]]:
    """Return prompts and the deterministic target's continuations."""
    prompts = last_word.misleading_prompts(4) if misleading else last_word.telling_prompts(4)
    return prompts, decode(
        model(True, 1, 0), None, prompts, with_rule(rule, max_new_tokens=new_tokens)
    )


@pytest.mark.parametrize(("row", "rule"), PERFECT, ids=name)
def test_a_perfect_drafter_has_its_closed_form(row: DrafterRow, rule: str) -> None:
    assert row.perfect is not None
    gamma, rounds = 4, 6
    settings = with_rule(rule, num_draft_tokens=gamma, max_new_tokens=(gamma + 1) * rounds)
    target, twin, draft_model = models()
    prompts = random_prompts(16)
    answers = [g.tokens for g in decode(target, None, prompts, settings)]
    drafted = decode(
        target, row.perfect(Kit(target, twin, draft_model, answers)), prompts, settings
    )
    assert [g.block_efficiency for g in drafted] == [gamma + 1] * len(prompts)
    assert [g.accepted_by_depth for g in drafted] == [[rounds] * gamma] * len(prompts)


@pytest.mark.parametrize(("row", "rule"), PAIRS, ids=name)
def test_a_drafter_that_predicts_the_text_has_its_closed_form(row: DrafterRow, rule: str) -> None:
    tau, rounds = FORMS.get(row.name, full_chain)(GAMMA), 3
    prompts, plain = sure_texts(False, rule, tau * rounds)
    settings = with_rule(rule, num_draft_tokens=GAMMA, max_new_tokens=tau * rounds)
    kit = kit_of(True, True, [g.tokens for g in plain])
    drafted = decode(kit.target, row.make(kit), prompts, settings)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert [g.block_efficiency for g in drafted] == [tau] * len(prompts)
    assert [g.accepted_by_depth for g in drafted] == [[rounds] * (tau - 1)] * len(prompts)


@pytest.mark.parametrize("rule", ["greedy", "token"])
@pytest.mark.parametrize("row", [row for row in ADDED if row.gamma is None], ids=name)
def test_without_a_match_the_drafter_after_a_lookup_has_its_closed_form(
    row: DrafterRow, rule: str
) -> None:
    """The text is too short to repeat itself.

    Ouroboros, the row with a `gamma`, is left out: it has no phrases to attach.
    """
    tau, rounds = FORMS.get(row.name.removesuffix("_with_lookup"), full_chain)(GAMMA), 3
    settings = with_rule(rule, num_draft_tokens=GAMMA, max_new_tokens=tau * rounds)
    kit = kit_of(True, True)
    drafted = decode(kit.target, row.make(kit), [[3], [4]], settings)
    assert [g.accepted_by_depth for g in drafted] == [[rounds] * (tau - 1)] * 2


@pytest.mark.parametrize(("row", "rule"), PAIRS, ids=name)
def test_an_adversarial_drafter_changes_nothing(row: DrafterRow, rule: str) -> None:
    """The deterministic target has the same text under every rule."""
    prompts, plain = sure_texts(True, rule, 24)
    kit = kit_of(True, False, [g.tokens for g in plain])
    drafter = (row.adversarial or row.make)(kit)
    drafted = decode(kit.target, drafter, prompts, with_rule(rule, max_new_tokens=24))
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert all(g.block_efficiency == 1 and g.accepted == 0 for g in drafted)
    assert all(0 < g.tested <= 23 for g in drafted), "nothing was proposed"
    # a drafter that decides by costs pauses
    if not drafter.capabilities.needs_costs:
        assert all(g.tested == 23 for g in drafted), "a round before the last proposed nothing"


# With an uncertain target, drafters that copy or learn from it are sometimes right, and so are
# Medusa's heads, which do not read the token before theirs.
SOMETIMES_RIGHT = ("look", "oracle", "medusa")
MODELS_AND_HEADS = [row for row in ROWS if not any(word in row.name for word in SOMETIMES_RIGHT)]
QUICK = ("chain", "multi_candidate", "recurrent_drawn")


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        pytest.param(
            row, rule, id=f"{row.name}-{rule}", marks=[pytest.mark.long] * (row.name not in QUICK)
        )
        for row in MODELS_AND_HEADS
        for rule in row.rules
    ],
)
def test_an_adversarial_drafter_changes_no_sample(
    row: DrafterRow, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rejection the residual of p is p.

    `token` and `block` sample it with the noise of residuals, which the rounds without a draft use
    here too, so the texts can be compared.
    """
    monkeypatch.setattr(noise, "BONUS", noise.RESIDUAL)
    fields = {} if rule == "greedy" else {**UNSURE, "verify": rule}
    settings = Settings(max_new_tokens=24, num_draft_tokens=3, seed=5, **fields)
    kit = kit_of(False, False)
    plain = decode(kit.target, None, UNSURE_PROMPTS, settings)
    drafted = decode(kit.target, (row.adversarial or row.make)(kit), UNSURE_PROMPTS, settings)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert all(g.accepted == 0 and g.tested > 0 for g in drafted)
    assert len({token for g in plain for token in g.tokens}) > 10 or rule == "greedy"


@pytest.mark.parametrize("rule", BY_NAME["self_speculation"].rules)
def test_self_speculation_without_effect_of_skipped_layers_is_perfect(rule: str) -> None:
    """The skipped layers add nothing, so q = p.

    tests/recurrent_drafting tests perfect heads by the number of beams.
    """
    gamma, rounds = 4, 6
    kit = kit_of(False, True)
    settings = with_rule(rule, num_draft_tokens=gamma, max_new_tokens=(gamma + 1) * rounds)
    drafted = decode(kit.target, BY_NAME["self_speculation"].make(kit), UNSURE_PROMPTS, settings)
    assert [g.block_efficiency for g in drafted] == [gamma + 1] * len(UNSURE_PROMPTS)
    assert [g.accepted_by_depth for g in drafted] == [[rounds] * gamma] * len(UNSURE_PROMPTS)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("row", ["budget_tree", "ouroboros", "recurrent_by_cost"])
def test_a_perfect_model_has_an_accepted_token_a_round(row: str, rule: str) -> None:
    """Rows without a closed form always propose the likeliest next token.

    The model's confidence decides the size of a tree by cost, and Ouroboros attaches phrases of a
    pool of guesses.
    """
    kit = kit_of(False, True)
    settings = with_rule(rule, num_draft_tokens=4, max_new_tokens=40)
    for done in decode(kit.target, BY_NAME[row].make(kit), UNSURE_PROMPTS, settings):
        assert done.accepted_by_depth[0] >= done.rounds - 1, (
            "the last round may have no room for a draft"
        )
        assert 2 <= done.block_efficiency <= 5

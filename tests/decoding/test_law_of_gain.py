"""Law 4: a perfect drafter gains its row's closed form; one that is never right changes nothing.

On random models q = p for every row that can draft with a copy of the target. On a target with
one-hot distributions (bigram_targets.py) every row is perfect, given models and a head of the same
table and a prompt to copy from. With models and a head of the negative table and a misleading
prompt, every row is always wrong.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import pytest

from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.stats import Generation
from decoding.sampling import noise
from tests.support import bigram_targets as last_word
from tests.support.tiers import tiered
from tests.support.tiny_targets import random_prompts

from .rows import ADDED, BY_NAME, ROWS, DrafterRow, Kit
from .test_laws import PAIRS, Settings, by_rule, is_quick, models, name, with_rule

PERFECT = [
    (row, rule)
    for row, rule in PAIRS
    if row.perfect is not None and rule in (row.perfect_rules or row.rules)
]
GAMMA = 6
# Tokens per round with draft length gamma. A chain, a tree of that depth and a copied text gain the
# whole draft and the target's own token. Costs do not shorten drafts: under `rows.COSTS` the rate
# of n certain tokens is (1 + n) / (0.2 n + 1 + 0.05 n), which rises with n up to 6, so cost-based
# trees and beams draft all of them.
FORMS: dict[str, Callable[[int], int]] = {
    "static_tree": lambda gamma: min(gamma, 4) + 1,  # the deepest path of its fixed shape
    # the tokens of a pooled phrase after its first one: ngram - 1
    "lookahead": lambda gamma: min(gamma, 3) + 1,
}
UNSURE_PROMPTS = [[3], [4, 5], [9, 9, 1], [30]]
# Of 32 tokens, a model's likeliest twelve and those of its opposite are disjoint.
UNSURE = {"temperature": 1.0, "top_k": 12}


def whole(gamma: int) -> int:
    return gamma + 1


@lru_cache
def model(sure: bool, sign: int, copy: int) -> NativeTarget:
    """Return the model of `sign` times the sure or the unsure table.

    copy: number of the copy; copies have separate caches.
    """
    return last_word.model_of(sign * (last_word.sure_table() if sure else last_word.unsure_table()))


def kit_of(sure: bool, knowing: bool, answers: Sequence[Sequence[int]] = ()) -> Kit:
    """Return a kit whose target has the sure or the unsure table.

    The draft model and the head have the same table if `knowing`, else its negative.
    """
    sign = 1 if knowing else -1
    table_VV = last_word.sure_table() if sure else last_word.unsure_table()
    return Kit(
        model(sure, 1, 0),
        model(sure, 1, 1),
        model(sure, sign, 2),
        answers,
        last_word.head_of(sign * table_VV),
        eagle=last_word.eagle_of(sign * table_VV),
    )


@lru_cache
def sure_texts(
    misleading: bool, rule: str, new_tokens: int
) -> tuple[list[list[int]], list[Generation]]:
    """Return four prompts, and the generations of the sure table's target after them."""
    prompts = last_word.misleading_prompts(4) if misleading else last_word.repeating_prompts(4)
    return prompts, decode(
        model(True, 1, 0), None, prompts, with_rule(rule, max_new_tokens=new_tokens)
    )


@pytest.mark.parametrize(("row", "rule"), tiered(PERFECT, is_quick), ids=name)
def test_a_perfect_drafter_has_its_closed_form(row: DrafterRow, rule: str) -> None:
    assert row.perfect is not None
    gamma, rounds = 4, 6
    new_tokens = (gamma + 1) * rounds + row.late
    settings = with_rule(rule, num_draft_tokens=gamma, max_new_tokens=new_tokens)
    target, twin, draft_model = models()
    prompts = random_prompts(16)
    answers = [g.tokens for g in decode(target, None, prompts, settings)]
    drafted = decode(
        target, row.perfect(Kit(target, twin, draft_model, answers)), prompts, settings
    )
    assert [g.block_efficiency for g in drafted] == [new_tokens / (rounds + row.late)] * len(
        prompts
    )
    assert [g.accepted_by_depth for g in drafted] == [[rounds] * gamma] * len(prompts)


@by_rule
def test_a_drafter_that_knows_the_text_gains_its_closed_form(row: DrafterRow, rule: str) -> None:
    tau, rounds = FORMS.get(row.name, whole)(GAMMA), 3
    new_tokens = tau * rounds + row.late
    prompts, plain = sure_texts(False, rule, new_tokens)
    settings = with_rule(rule, num_draft_tokens=GAMMA, max_new_tokens=new_tokens)
    kit = kit_of(True, True, [g.tokens for g in plain])
    drafted = decode(kit.target, row.make(kit), prompts, settings)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert [g.block_efficiency for g in drafted] == [new_tokens / (rounds + row.late)] * len(
        prompts
    )
    assert [g.accepted_by_depth for g in drafted] == [[rounds] * (tau - 1)] * len(prompts)


@pytest.mark.parametrize("rule", ["greedy", "token"])
@pytest.mark.parametrize(
    "row",
    tiered([row for row in ADDED if row.gamma is None], lambda row: not row.slow),
    ids=name,
)
def test_without_a_match_the_drafter_behind_a_lookup_gains_its_own_form(
    row: DrafterRow, rule: str
) -> None:
    """Check on a short text without repetition, in which lookup never matches.

    Rows with `gamma` (Ouroboros) are left out, since their pools hold no phrase here.
    """
    behind = BY_NAME[row.name.removesuffix("_with_lookup")]
    tau, rounds = FORMS.get(behind.name, whole)(GAMMA), 3
    new_tokens = tau * rounds + behind.late
    settings = with_rule(rule, num_draft_tokens=GAMMA, max_new_tokens=new_tokens)
    kit = kit_of(True, True)
    drafted = decode(kit.target, row.make(kit), [[3], [4]], settings)
    assert [g.accepted_by_depth for g in drafted] == [[rounds] * (tau - 1)] * 2


@by_rule
def test_an_adversarial_drafter_changes_nothing(row: DrafterRow, rule: str) -> None:
    """Check every rule on a target with a single possible text."""
    prompts, plain = sure_texts(True, rule, 24)
    kit = kit_of(True, False, [g.tokens for g in plain])
    drafter = (row.adversarial or row.make)(kit)
    drafted = decode(kit.target, drafter, prompts, with_rule(rule, max_new_tokens=24))
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert all(g.block_efficiency == 1 and g.accepted == 0 for g in drafted)
    assert all(0 < g.tested <= 23 for g in drafted), "no token was tested"
    if (
        not drafter.capabilities.needs_costs
    ):  # drafters that weigh costs pause, except for a retry now and then
        assert all(g.tested == 23 - row.late for g in drafted), (
            "all rounds but the first `late` and the last test a token"
        )


# On an unsure text, drafters that copy or learn from the target are right now and then, and so are
# heads that do not see the token before theirs (domino: before its first one).
SOMETIMES_RIGHT = ("look", "oracle", "medusa", "dflash", "specdiff", "block_tree", "p_eagle")
SOMETIMES_RIGHT += ("one_forward", "parallelspec", "domino")
MODELS_AND_HEADS = [row for row in ROWS if not any(word in row.name for word in SOMETIMES_RIGHT)]
QUICK = ("chain", "multi_candidate", "recurrent_drawn")


@pytest.mark.parametrize(
    ("row", "rule"),
    tiered(
        [(row, rule) for row in MODELS_AND_HEADS for rule in row.rules],
        lambda row, rule: row.name in QUICK,
    ),
    ids=name,
)
def test_an_adversarial_drafter_changes_no_sample(
    row: DrafterRow, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check sampled text: drafted tokens have p = 0, so the residual after a rejection is p.

    After a rejection `token` and `block` use another uniform than in a round without a draft. Both
    use the same one here, so that the texts can be compared.
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
def test_layers_that_add_nothing_may_be_skipped(rule: str) -> None:
    """Check the closed form of self-speculation, which cannot draft with a copy of the target.

    The skipped layers add nothing, so q = p. Recurrent heads with q = p are tested in
    tests/recurrent_drafting, for each number of beams.
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
    """Check rows whose gain on an unsure text has no closed form.

    The likeliest next token is always among their proposals.
    """
    kit = kit_of(False, True)
    settings = with_rule(rule, num_draft_tokens=4, max_new_tokens=40)
    for done in decode(kit.target, BY_NAME[row].make(kit), UNSURE_PROMPTS, settings):
        assert done.accepted_by_depth[0] >= done.rounds - 1, (
            "the last round may have no room for a draft"
        )
        assert 2 <= done.block_efficiency <= 5

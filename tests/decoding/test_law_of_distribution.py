"""Law 3: the joint distribution of the first three sampled tokens is the target's.

Warpers are included. The same test rejects decoders with known errors, so that passing it is
evidence. Overlapped schedules are in test_law_of_overlap.py, and logits that depend on the text in
test_law_of_processors.py.

Shapes: V = 5 symbols.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.trees.multi_candidate import MultiCandidate
from decoding.drafters.trees.ranked import RankedTree
from decoding.interfaces import Drafter, Proposal
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.sampling import noise
from decoding.sampling.token_chooser import TokenChooser
from decoding.stopping.policies import NAMES
from decoding.verification import device_chain, token_tree
from heads.block import drafter as block_drafter
from heads.block.drafter import BlockDrafter
from jobs.malloc import without_collector
from tests.support.block_heads import unsure_block
from tests.support.many_requests import first_tokens, replace_uniform
from tests.support.tiers import tiered
from tests.support.tiny_targets import TableTarget

from .law_3 import DRAWS, FEW_DRAWS, P_LIMIT, PROMPT, WARPERS, drafter_of, law_holds, target_table
from .rows import COSTS, PICKED, ROWS, draft_table

SAMPLED = [
    (row, rule) for row in ROWS if row.table is not None for rule in row.rules if rule != "greedy"
]
# Every rule has every warper on these rows, and one warper on rows that differ only in the drafts.
RULE_ROWS = ("chain", "prompt_lookup")
CASES = [
    (row.name, rule, warper)
    for row, rule in SAMPLED
    for warper in (WARPERS if row.name in RULE_ROWS and rule != "coupled" else ["hot_top_p"])
]
CASES += [("autoregressive", *case) for case in (("token", "cold_top_k"), ("coupled", "plain"))]
CASES += [(row.name, "token", "hot_top_p") for row in PICKED]
# Trees with sampled children use the recursive rule, so they have every warper.
CASES += [
    (name, "token", warper)
    for name in ("multi_candidate", "ranked_tree", "recurrent_drawn")
    for warper in WARPERS
    if warper != "hot_top_p"
]
SLOW = {row.name for row in ROWS if row.slow} | {row.name for row in PICKED[:-1]}


def is_quick(name: str, rule: str, warper: str) -> bool:
    """Return whether the short suite has a case: a rule on a chain, or token verification of a row.

    Coupled rows have the distribution of autoregressive decoding by law 2.
    """
    of_chain = name in ("chain", "autoregressive") and (rule == "token" or warper != "min_p")
    return of_chain or (rule == "token" and warper == "hot_top_p" and name not in SLOW)


@pytest.mark.parametrize("rule", tiered(["token", "block"], ["token"]))
@pytest.mark.parametrize("stopping", NAMES)
def test_law_3_holds_under_every_stopping_policy(stopping: str, rule: str) -> None:
    more = {"stopping": stopping, "costs": COSTS, "draws": FEW_DRAWS}
    assert law_holds(drafter_of("chain"), rule, "plain", **more) > P_LIMIT


@pytest.mark.parametrize(("name", "rule", "warper"), tiered(CASES, is_quick))
def test_law_3(name: str, rule: str, warper: str) -> None:
    # coupled tokens are by law 2 those of autoregressive decoding, which is drawn in full
    repeats = rule == "coupled" or warper != "hot_top_p"
    draws = FEW_DRAWS if repeats and name != "autoregressive" else DRAWS
    drafter = drafter_of(name)
    # whatever pays, a draft of one pass is tested at all depths
    in_one_pass = drafter is not None and drafter.capabilities.steps == "round"
    more: dict[str, Any] = {"stopping": "fixed"} if in_one_pass else {}
    assert law_holds(drafter, rule, warper, draws=draws, **more) > P_LIMIT


@pytest.mark.parametrize(
    ("kind", "rule", "words"),
    tiered(
        [
            (ChainDrafter, "token", 4),
            (ChainDrafter, "block", 6),
            (MultiCandidate, "token", 4),
            (RankedTree, "token", 4),
            (RankedTree, "token", 6),
        ],
        lambda kind, rule, words: kind is ChainDrafter,
    ),
)
def test_law_3_holds_for_a_drafter_with_another_vocabulary_size(
    kind: type[ChainDrafter], rule: str, words: int
) -> None:
    table = torch.randn(words, words, words, generator=torch.Generator().manual_seed(7)) * 1.5
    drafter = kind(model=TableTarget(table))
    assert law_holds(drafter, rule, "hot_top_p", draws=FEW_DRAWS) > P_LIMIT


# If the host runs ahead of the device, other code grows, sizes and verifies trees: a row for each.
AHEAD = (
    "multi_candidate",
    "budget_tree",
    "graph",
    "recurrent_drawn_by_cost",
    "multi_candidate_with_lookup",
    "ranked_tree",
    "recurrent",
    "recurrent_drawn",
    "recurrent_by_cost",
)
AHEAD += ("static_tree", "budget_tree_picked", "graph_picked")


@pytest.mark.parametrize("name", tiered(AHEAD, ["budget_tree", "recurrent_drawn_by_cost"]))
def test_law_3_holds_for_trees_if_the_host_runs_ahead(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "runs_ahead", lambda device: True)
    assert law_holds(drafter_of(name), "token", "hot_top_p", seed=2, draws=FEW_DRAWS) > P_LIMIT


# lengths are chosen before the round for a single row too
ONE_PASS = ("parallel", "medusa_chain", "p_eagle", "dspark_by_cost", "sdsat_one_forward")


@pytest.mark.parametrize(
    "name", tiered(["chain", *ONE_PASS, "budget_tree", "recurrent_drawn_by_cost"], ["chain"])
)
def test_law_3_holds_if_a_batch_decides_before_the_round(name: str) -> None:
    more: dict[str, Any] = {"costs": replace(COSTS, rows=4), "draws": FEW_DRAWS}
    if name in ("chain", *ONE_PASS):
        more["stopping"] = "cost_ratio"
    assert law_holds(drafter_of(name), "token", "plain", **more) > P_LIMIT


def reuse_uniform(monkeypatch: pytest.MonkeyPatch) -> Drafter:
    """Share a uniform between adjacent tests, as the published PEARL code does."""
    original = TokenChooser.uniform

    def reused(self: TokenChooser, row: int, depth: int, purpose: int) -> float:
        return original(self, row, depth // 2 * 2 if purpose == noise.ACCEPT else depth, purpose)

    replace_uniform(monkeypatch, reused)
    return ChainDrafter(model=draft_table())


def drop_unlikely(monkeypatch: pytest.MonkeyPatch) -> Drafter:
    """Drop each sampled token with q <= 0.3, and the tokens after it."""

    class Dropping(ChainDrafter):
        def propose(self, *args: object) -> Proposal:
            proposal = super().propose(*args)  # type: ignore[arg-type]
            assert proposal.q_BNV is not None
            q_BN = proposal.q_BNV.gather(-1, proposal.tokens_BN[:, :, None]).squeeze(-1)
            sure_B = (q_BN > 0.3).long().cumprod(1).sum(1).tolist()
            proposal.counts_B = [min(count, sure) for count, sure in zip(proposal.counts_B, sure_B)]
            return proposal

    return Dropping(model=draft_table())


def keep_residual(monkeypatch: pytest.MonkeyPatch) -> Drafter:
    """Sample the token after a rejection from p instead of the residual."""
    monkeypatch.setattr(device_chain, "residual_or_p", lambda residual_BV, p_BV: p_BV)
    return ChainDrafter(model=draft_table())


def share_purposes(monkeypatch: pytest.MonkeyPatch) -> Drafter:
    """Use one uniform per position for draft, test and residual."""
    original = TokenChooser.uniform
    replace_uniform(monkeypatch, lambda self, row, depth, purpose: original(self, row, depth, 0))
    return ChainDrafter(model=draft_table())


def read_the_next_confidence(monkeypatch: pytest.MonkeyPatch) -> Drafter:
    """Keep a token by the confidence of the next one, which has seen it."""
    right = block_drafter.count_kept
    monkeypatch.setattr(
        block_drafter, "count_kept", lambda chances, *more: right([*chances[1:], 1.0], *more)
    )
    return BlockDrafter(head=unsure_block(), stop_below=0.4)


CONTROLS = [
    reuse_uniform,
    drop_unlikely,
    keep_residual,
    share_purposes,
    read_the_next_confidence,
]


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_law_3_rejects(
    control: Callable[[pytest.MonkeyPatch], Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert law_holds(control(monkeypatch), "token", "plain") < P_LIMIT


def test_law_3_rejects_a_lookup_without_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_residual(monkeypatch)
    assert law_holds(drafter_of("prompt_lookup"), "token", "plain") < P_LIMIT


@pytest.mark.parametrize(
    ("rule", "exact"), tiered([("block", False), ("token", True)], [("block", False)])
)
def test_block_verification_needs_fresh_noise_every_round(
    rule: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that noise keyed by position alone breaks block verification, not token verification.

    A redrafted position is then tested with its old uniform. The drafter is overconfident and ranks
    tokens as the target does, so it is rejected late in a block and few samples show the error.
    """
    original = TokenChooser.begin

    def same_every_round(self: TokenChooser, request_keys_B, rounds_B, positions_B, depths) -> None:  # type: ignore[no-untyped-def]
        original(self, request_keys_B, [0] * len(rounds_B), positions_B, depths)

    monkeypatch.setattr(TokenChooser, "begin", same_every_round)
    too_sure = ChainDrafter(model=TableTarget(2.5 * target_table().table_VVV))
    assert (law_holds(too_sure, rule, "plain") > P_LIMIT) == exact


def test_block_verification_accepts_more_than_token_verification() -> None:
    settings = Settings(max_new_tokens=64, num_draft_tokens=6, temperature=1.0)
    rates = {}
    for rule in ("token", "block"):
        with without_collector():
            done = decode(
                target_table(), drafter_of("chain"), [PROMPT] * 500, replace(settings, verify=rule)
            )
        rates[rule] = sum(len(g.tokens) for g in done) / sum(g.rounds for g in done)
    assert rates["block"] > rates["token"] * 1.02


@pytest.mark.parametrize(
    "row", tiered(["multi_candidate", "static_tree_picked", "ranked_tree"], ["multi_candidate"])
)
def test_law_3_rejects_siblings_without_residual_update(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a rule that tests each sibling against p, as if no earlier one had been rejected."""
    monkeypatch.setattr(token_tree, "residual_after_rejection", lambda p_V, q_V, token: (p_V, q_V))
    assert law_holds(drafter_of(row), "token", "plain") < P_LIMIT


@pytest.mark.parametrize(
    ("name", "rule"),
    tiered(
        [
            ("chain", "token"),
            ("chain", "block"),
            ("multi_candidate", "token"),
            ("recurrent_drawn", "token"),
            ("graph", "coupled"),
        ],
        [("chain", "block"), ("multi_candidate", "token")],
    ),
)
def test_batched_requests_equal_single_ones(name: str, rule: str) -> None:
    """Check that law 3's batches of requests (many_requests.py) give the tokens of `decode`."""
    drafter, ids = drafter_of(name), range(100, 140)
    settings = Settings(max_new_tokens=8, verify=rule, costs=COSTS, **WARPERS["hot_top_p"])  # type: ignore[arg-type]
    together = first_tokens(target_table(), drafter, PROMPT, settings, ids, 6)
    alone = [
        decode(target_table(), drafter, [PROMPT], settings, request_ids=[i])[0].tokens[:6]
        for i in ids
    ]
    assert together == alone

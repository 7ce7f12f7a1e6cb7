"""Negative controls: each law's test must fail on a decoder that is broken on purpose.

The controls of law 3 are in its files.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Outcome, Proposal, Readback
from decoding.models.native.model import NativeTarget
from decoding.sampling import noise
from decoding.sampling.token_chooser import TokenChooser
from decoding.verification import follow, nodes, rules
from tests.support import bigram_targets as last_word

from . import test_law_of_gain as gains
from . import test_laws as laws
from .rows import BY_NAME, DrafterRow

CHAIN, TREE = BY_NAME["chain"], BY_NAME["oracle_tree"]
Breaker = Callable[[pytest.MonkeyPatch], None]


def accept_the_second_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept a drafted token among the target's two best, scored with noise if coupled."""

    def lenient(
        logits_BNV: Tensor, proposal: Proposal | None, chooser: TokenChooser, read: Readback
    ) -> Outcome:
        scores_BNV = logits_BNV
        if chooser.rule == "coupled":
            scores_BNV = chooser.race_scores(
                logits_BNV, torch.arange(logits_BNV.shape[1]).expand(len(logits_BNV), -1)
            )
        choices_BN = scores_BNV.argmax(-1)
        if proposal is not None:
            best_BN2, drafted_BN = scores_BNV[:, :-1].topk(2).indices, proposal.tokens_BN
            among_BN = (best_BN2 == drafted_BN[:, :, None]).any(-1)
            choices_BN[:, :-1] = drafted_BN.where(among_BN, choices_BN[:, :-1])
        return follow.follow(choices_BN, proposal, read)

    monkeypatch.setitem(rules.RULES, "greedy", lenient)
    monkeypatch.setitem(rules.RULES, "coupled", lenient)


def accept_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept every drafted token."""

    def blind(
        logits_BNV: Tensor, proposal: Proposal | None, chooser: TokenChooser, read: Readback
    ) -> Outcome:
        choices_BN = logits_BNV.argmax(-1)
        if proposal is not None:
            choices_BN[:, :-1] = proposal.tokens_BN
        return follow.follow(choices_BN, proposal, read)

    for rule in ("greedy", "token", "block", "coupled"):
        monkeypatch.setitem(rules.RULES, rule, blind)


def draw_from_the_next_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample the next token from the target's distribution after the rejected token."""
    monkeypatch.setattr(
        nodes,
        "final_weights",
        lambda probs_BNV, _, accepted_B, counts_B: nodes.at_nodes(
            probs_BNV, [a + 1 for a in accepted_B]
        ),
    )


def keep_the_first_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit the first nodes of a tree instead of the accepted path."""
    original = NativeTarget.commit
    monkeypatch.setattr(
        NativeTarget, "commit", lambda self, paths_BL, kept_B: original(self, None, kept_B)
    )


def keep_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit one more token than was accepted."""
    original = NativeTarget.commit

    def longer(self: NativeTarget, paths_BL: list[list[int]] | None, kept_B: Sequence[int]) -> None:
        original(self, paths_BL, [kept + 1 for kept in kept_B])

    monkeypatch.setattr(NativeTarget, "commit", longer)


def key_noise_by_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key noise by the depth in the draft instead of the position in the text."""
    original = TokenChooser.begin

    def begin(
        self: TokenChooser,
        keys_B: Sequence[int],
        rounds_B: Sequence[int],
        positions_B: Sequence[int],
        n: int,
    ) -> None:
        original(self, keys_B, rounds_B, [0] * len(positions_B), n)

    monkeypatch.setattr(TokenChooser, "begin", begin)


def key_noise_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key noise by the row of the batch instead of the request."""
    original = TokenChooser.begin

    def begin(
        self: TokenChooser,
        keys_B: Sequence[int],
        rounds_B: Sequence[int],
        positions_B: Sequence[int],
        n: int,
    ) -> None:
        original(
            self, [noise.key(5, place) for place in range(len(keys_B))], rounds_B, positions_B, n
        )

    monkeypatch.setattr(TokenChooser, "begin", begin)


@pytest.mark.parametrize(
    ("broken", "row"), [(accept_the_second_best, CHAIN), (keep_the_first_branch, TREE)]
)
def test_law_1_rejects(broken: Breaker, row: DrafterRow, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        laws.test_law_1_greedy_output_is_the_targets_own(row)


@pytest.mark.parametrize(
    ("broken", "row"),
    [(accept_the_second_best, CHAIN), (key_noise_by_depth, CHAIN), (keep_the_first_branch, TREE)],
)
def test_law_2_rejects(broken: Breaker, row: DrafterRow, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        laws.test_law_2_coupled_output_is_the_targets_own_sample(row, "temperature")


@pytest.mark.parametrize("rule", ["greedy", "token", "coupled"])
def test_law_4_rejects_a_drafter_that_is_not_perfect(rule: str) -> None:
    flawed = replace(CHAIN, perfect=lambda kit: ChainDrafter(model=kit.draft_model))
    with pytest.raises(AssertionError):
        gains.test_a_perfect_drafter_has_its_closed_form(flawed, rule)


@pytest.mark.parametrize("rule", ["greedy", "token", "block", "coupled"])
def test_law_4_rejects_a_drafter_that_knows_half_of_the_text(rule: str) -> None:
    """Check a drafter whose first two tokens are always right and whose third never is."""

    class Half(ChainDrafter):
        def propose(self, *given: Any) -> Proposal:
            proposal = super().propose(*given)
            proposal.tokens_BN[:, 2:] = (proposal.tokens_BN[:, 2:] + 1) % last_word.WORDS
            return proposal

    flawed = replace(CHAIN, make=lambda kit: Half(model=kit.draft_model))
    with pytest.raises(AssertionError):
        gains.test_a_drafter_that_knows_the_text_gains_its_closed_form(flawed, rule)


@pytest.mark.parametrize("form", [lambda gamma: gamma, lambda gamma: gamma + 2])
def test_law_4_rejects_another_closed_form(
    form: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gains.FORMS, "chain", form)
    with pytest.raises(AssertionError):
        gains.test_a_drafter_that_knows_the_text_gains_its_closed_form(CHAIN, "greedy")


@pytest.mark.parametrize("rule", ["greedy", "token", "block", "coupled"])
@pytest.mark.parametrize("row", ["chain", "prompt_lookup", "recurrent_chain"])
def test_law_4_rejects_a_blind_rule(row: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_everything(monkeypatch)
    with pytest.raises(AssertionError):
        gains.test_an_adversarial_drafter_changes_nothing(BY_NAME[row], rule)


def test_law_4_rejects_a_sample_that_a_failed_draft_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw_from_the_next_node(monkeypatch)
    with pytest.raises(AssertionError):
        gains.test_an_adversarial_drafter_changes_no_sample(CHAIN, "token", monkeypatch)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_law_5_rejects_noise_of_the_place(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key_noise_by_place(monkeypatch)
    with pytest.raises(AssertionError):
        laws.test_law_5_ragged_batches_equal_single_rows(CHAIN, rule)


def test_law_5_rejects_a_cache_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_too_many(monkeypatch)
    with pytest.raises(AssertionError):
        laws.test_law_5_cache_lengths_after_every_round(CHAIN, monkeypatch)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_law_5_rejects_tokens_behind_a_stop(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a batch that has no stop tokens."""
    original = laws.Batch.__init__

    def init(self: laws.Batch, *args: object) -> None:
        original(self, *args)  # type: ignore[arg-type]
        self.stops = frozenset()

    monkeypatch.setattr(laws.Batch, "__init__", init)
    with pytest.raises(AssertionError):
        laws.test_law_5_a_stop_token_inside_the_accepted_span_ends_the_row(rule)

"""Tree verification on the device accepts the eager nodes and keeps the next token's law."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decoding.interfaces import NO_NODE, Outcome, Proposal, TopRows
from decoding.sampling import noise
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper, draw_at
from decoding.verification import batched_tree, device_tree, token_tree
from tests.support.many_requests import replace_uniform

from .law_3 import P_LIMIT, p_value

V, ROWS = 9, 40
WARPERS = {"plain": Warper(1.0), "cold": Warper(0.6, top_k=6), "nucleus": Warper(1.3, top_p=0.8)}


def random_tree(seed: int) -> tuple[torch.Tensor, Proposal, TokenChooser]:
    """Return logits and a two-level tree with distinct siblings; the last rows have fewer nodes."""
    generator = torch.Generator().manual_seed(seed)
    warper = list(WARPERS.values())[seed % len(WARPERS)]
    parents_N = torch.tensor([-1, -1, -1, 0, 0, 2, 2, 2])
    siblings = [[0, 1, 2], [3, 4], [5, 6, 7]]
    N = len(parents_N)
    tokens_BN = torch.empty(ROWS, N, dtype=torch.long)
    for nodes in siblings:
        order = torch.stack(
            [torch.randperm(V, generator=generator)[: len(nodes)] for _ in range(ROWS)]
        )
        tokens_BN[:, nodes] = order
    logits_BNV = 2 * torch.randn(ROWS, N + 1, V, generator=generator, dtype=torch.float64)
    counts_B = [N] * (ROWS - 6) + [0, 1, 3, 4, 5, 7]
    chooser = TokenChooser(warper, "token", seed, V, torch.device("cpu"))
    chooser.begin(list(range(ROWS)), [seed] * ROWS, [3] * ROWS, 3)
    return logits_BNV, Proposal(tokens_BN, counts_B, parents_N.expand(ROWS, N)), chooser


def with_q(proposal: Proposal, seed: int) -> Proposal:
    """Return the tree with q over six candidates per node, its children's tokens among them."""
    generator = torch.Generator().manual_seed(seed)
    ids_BPK = torch.stack(
        [
            torch.stack([torch.randperm(V, generator=generator) for _ in range(4)])
            for _ in range(ROWS)
        ]
    )
    order_BPK = torch.rand(ROWS, 4, V, generator=generator)
    assert proposal.parents_BN is not None
    for node in range(proposal.tokens_BN.shape[1]):
        at_BK = (
            ids_BPK[torch.arange(ROWS), proposal.parents_BN[:, node] + 1]
            == proposal.tokens_BN[:, node, None]
        )
        order_BPK[torch.arange(ROWS), proposal.parents_BN[:, node] + 1] += at_BK
    scores_BPK = torch.randn(ROWS, 4, 6, generator=generator, dtype=torch.float64)
    q_top = TopRows(ids_BPK.gather(2, order_BPK.topk(6, dim=-1).indices), scores_BPK.softmax(-1))
    return Proposal(proposal.tokens_BN, proposal.counts_B, proposal.parents_BN, None, 0, q_top)


def with_tail(proposal: Proposal, seed: int) -> Proposal:
    """Return the tree with q over five candidates and a tail; some children come from the tail."""
    generator = torch.Generator().manual_seed(seed + 100)
    few = with_q(proposal, seed)
    rows = few.q_top
    assert rows is not None
    order_BP6 = torch.rand(ROWS, 4, 6, generator=generator).argsort(-1)
    ids_BP6, probs_BP6 = rows.ids_BPK.gather(2, order_BP6), rows.probs_BPK.gather(2, order_BP6)
    tail_BPV = 1 + torch.rand(ROWS, 4, V, generator=generator, dtype=torch.float64)
    few.q_top = TopRows(ids_BP6, probs_BP6, tail_BPV.scatter_(2, ids_BP6[:, :, :-1], 0.0))
    return few


def dense(proposal: Proposal) -> Proposal:
    """Return the tree with its candidates' probabilities over the full vocabulary."""
    rows = proposal.q_top
    assert rows is not None and rows.tail_BPV is None and proposal.parents_BN is not None
    q_BPV = torch.zeros(*rows.ids_BPK.shape[:2], V, dtype=torch.float64).scatter_(
        2, rows.ids_BPK, rows.probs_BPK
    )
    q_BNV = q_BPV.gather(1, (proposal.parents_BN + 1)[:, :, None].expand(-1, -1, V))
    return Proposal(proposal.tokens_BN, proposal.counts_B, proposal.parents_BN, q_BNV, siblings=3)


def padded(proposal: Proposal) -> Proposal:
    """Return the tree with two more nodes of padding, and counts that include all padding.

    Only NO_NODE among the parents, on the device, marks padding.
    """
    assert proposal.parents_BN is not None
    N, counts_B1 = proposal.tokens_BN.shape[1], torch.tensor(proposal.counts_B)[:, None]
    parents_BN = proposal.parents_BN.masked_fill(torch.arange(N) >= counts_B1, NO_NODE)
    room = (torch.zeros(ROWS, 2, dtype=torch.long), torch.full((ROWS, 2), NO_NODE))
    tokens_BN, parents_BN = (
        torch.cat(pair, 1) for pair in zip((proposal.tokens_BN, parents_BN), room, strict=True)
    )
    q_BNV = (
        None if proposal.q_BNV is None else torch.cat((proposal.q_BNV, torch.zeros(ROWS, 2, V)), 1)
    )
    return Proposal(tokens_BN, [N + 2] * ROWS, parents_BN, q_BNV, 0, proposal.q_top, siblings=3)


KINDS: dict[str, Callable[[Proposal, int], Proposal]] = {
    "point masses": lambda proposal, seed: proposal,
    "few candidates": with_q,
    "candidates and a tail": with_tail,
    "whole vocabulary": lambda proposal, seed: dense(with_q(proposal, seed)),
}
by_kind = pytest.mark.parametrize("kind", KINDS)


def paths(outcome: Outcome) -> tuple[list[list[int]] | None, list[int], list[int]]:
    """Return the parts of an outcome that concern drafted tokens."""
    return outcome.paths_B, outcome.accepted_B, outcome.tested_B


@by_kind
def test_both_versions_accept_the_same_nodes(kind: str) -> None:
    accepted: set[int] = set()
    for seed in range(30):
        logits_BNV, proposal, chooser = random_tree(seed)
        proposal = KINDS[kind](proposal, seed)
        eager = token_tree.token(logits_BNV, proposal, chooser)
        at_once = device_tree.token(logits_BNV, proposal, chooser)
        assert paths(at_once) == paths(eager)
        assert [tokens[:-1] for tokens in at_once.tokens_B] == [
            tokens[:-1] for tokens in eager.tokens_B
        ]
        assert at_once.drafted_B == proposal.counts_B
        accepted |= set(eager.accepted_B)
    assert accepted == {0, 1, 2}


@pytest.mark.parametrize("kind", ["point masses", "whole vocabulary"])
def test_both_versions_sample_the_same_next_token(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that both versions sample the same next token from the same uniform."""
    original = TokenChooser.uniform

    def uniform(
        self: TokenChooser, row: int, depth: int, purpose: int, node: int | None = None
    ) -> float:
        return original(
            self,
            row,
            *((depth, purpose, node) if purpose == noise.ACCEPT else (0, noise.BONUS, None)),
        )

    replace_uniform(monkeypatch, uniform)
    for seed in range(12):
        logits_BNV, proposal, chooser = random_tree(seed)
        proposal = KINDS[kind](proposal, seed)
        eager = token_tree.token(logits_BNV, proposal, chooser)
        assert device_tree.token(logits_BNV, proposal, chooser).tokens_B == eager.tokens_B


@by_kind
def test_padding_changes_nothing(kind: str) -> None:
    for seed in range(6):
        logits_BNV, proposal, chooser = random_tree(seed)
        proposal = KINDS[kind](proposal, seed)
        wide_BNV = torch.cat((logits_BNV, torch.randn(ROWS, 2, V, dtype=torch.float64)), 1)
        without, within = (
            device_tree.token(logits_BNV, proposal, chooser),
            device_tree.token(wide_BNV, padded(proposal), chooser),
        )
        assert (within.tokens_B, paths(within), within.drafted_B) == (
            without.tokens_B,
            paths(without),
            without.drafted_B,
        )


@pytest.mark.parametrize(
    ("kind", "stand"),
    [
        ("point masses", "PointMassNode"),
        ("few candidates", "CandidateNode"),
        ("candidates and a tail", "CandidateNode"),
    ],
)
def test_control_a_walk_without_residual_update_is_detected(
    kind: str, stand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_BNV, proposal, chooser = random_tree(0)
    proposal = KINDS[kind](proposal, 0)
    eager = token_tree.token(logits_BNV, proposal, chooser)
    monkeypatch.setattr(getattr(device_tree, stand), "reject", lambda self, child, uniform: True)
    assert paths(device_tree.token(logits_BNV, proposal, chooser)) != paths(eager)


@pytest.mark.parametrize("kind", ["point masses", "few candidates", "whole vocabulary"])
def test_the_token_behind_the_path_has_the_law_of_what_is_left(kind: str) -> None:
    """Check that after rejection of all children the next token has the eager rule's residual.

    Tails, whose children may be accepted in part, are tested by law 3 in tests/recurrent_drafting.
    """
    logits_BNV, proposal, chooser = random_tree(0)
    draws, row, drawn = 6_000, 0, with_q(proposal, 0)
    rows, q_BNV = drawn.q_top, dense(drawn).q_BNV
    assert rows is not None and q_BNV is not None
    proposal = KINDS[kind](proposal, 0)
    logits_BNV[row, 0, rows.ids_BPK[row, 0]] -= 2.0  # so that they are often rejected
    one = Proposal(
        proposal.tokens_BN[row : row + 1].expand(draws, -1),
        [3] * draws,  # the tip's children alone
        torch.full((draws, 8), -1),
        None if proposal.q_BNV is None else proposal.q_BNV[row : row + 1].expand(draws, -1, -1),
        0,
        None
        if proposal.q_top is None
        else TopRows(
            proposal.q_top.ids_BPK[row : row + 1].expand(draws, -1, -1),
            proposal.q_top.probs_BPK[row : row + 1].expand(draws, -1, -1),
        ),
        siblings=3,
    )
    chooser.begin(list(range(draws)), [0] * draws, [3] * draws, 3)
    outcome = device_tree.token(logits_BNV[row : row + 1].expand(draws, -1, -1), one, chooser)
    p_1V = chooser.warper.probs(logits_BNV[row, :1])
    q_1V = None if kind == "point masses" else q_BNV[row, :1]
    for child in one.tokens_BN[0, :3]:
        p_1V, q_1V = token_tree.residual_after_rejection(p_1V, q_1V, child[None])
    p_V = p_1V[0]
    last = Counter(tuple(tokens) for tokens in outcome.tokens_B if len(tokens) == 1)
    assert last.total() > 1_000
    law = {(token,): p for token, p in enumerate((p_V / p_V.sum()).tolist()) if p}
    assert p_value(last, law) > P_LIMIT


NEARLY_ONE = 1 - 2.0**-53  # a uniform that rejects every child that can be rejected
ENDS = (2.0**-53, 0.3, NEARLY_ONE)  # uniforms that sample the token after the path


def nearly_equal(kind: str, seed: int) -> tuple[torch.Tensor, Proposal, torch.Tensor, list[int]]:
    """Return float32 logits, a tree, p and the numbers of allowed tokens, where p is nearly q.

    Each node allows two to four tokens, and one to all of these are children. q differs from p in
    the last digits, so the residual is rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    allowed_BV = torch.rand(ROWS, V, generator=generator).argsort(-1)
    sizes_B = torch.randint(2, 5, (ROWS,), generator=generator)
    ranks_V = torch.arange(V)
    forbidden_BV = torch.ones(ROWS, V, dtype=torch.bool).scatter(
        1, allowed_BV, ranks_V >= sizes_B[:, None]
    )
    logits_BV = (4 * torch.randn(ROWS, V, generator=generator)).masked_fill(
        forbidden_BV, float("-inf")
    )
    p_BV = Warper(1.0).probs(logits_BV)
    bent_BV = torch.where(torch.rand(ROWS, V, generator=generator) < 0.5, 0.0, 1.0)
    q_BV = torch.nextafter(p_BV, bent_BV).masked_fill(forbidden_BV, 0.0)
    children_B = torch.minimum(torch.randint(1, 5, (ROWS,), generator=generator), sizes_B)
    proposal = Proposal(
        allowed_BV[:, :4], children_B.tolist(), torch.full((ROWS, 4), -1), siblings=4
    )
    if kind == "few candidates":
        proposal.q_top = TopRows(
            allowed_BV[:, None, :4], q_BV.gather(1, allowed_BV[:, :4])[:, None]
        )
    elif kind == "candidates and a tail":
        tail_BV = q_BV.scatter(1, allowed_BV[:, :3], 0.0)
        probs_BK = torch.cat((q_BV.gather(1, allowed_BV[:, :3]), tail_BV.sum(1, keepdim=True)), 1)
        proposal.q_top = TopRows(allowed_BV[:, None, :4], probs_BK[:, None], tail_BV[:, None])
    elif kind == "whole vocabulary":
        proposal.q_BNV = q_BV[:, None].expand(-1, 4, -1)
    return logits_BV[:, None].expand(-1, 5, -1), proposal, p_BV, sizes_B.tolist()


@by_kind
def test_rounding_never_emits_an_impossible_token(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that every next token has p > 0, if p and q differ only by rounding.

    If point masses cover all of p, one of them is accepted.
    """
    failed = 0
    for seed in range(60):
        logits_BNV, proposal, p_BV, sizes_B = nearly_equal(kind, seed)
        numbers = {noise.ACCEPT: NEARLY_ONE}
        replace_uniform(
            monkeypatch, lambda *given, end=ENDS[seed % 3], own=numbers: own.get(given[3], end)
        )
        chooser = TokenChooser(Warper(1.0), "token", seed, V, torch.device("cpu"))
        for rule in (token_tree.token, device_tree.token):
            outcome = rule(logits_BNV, proposal, chooser)
            for row, tokens in enumerate(outcome.tokens_B):
                assert all(p_BV[row, token] > 0 for token in tokens)
                if kind == "point masses" and proposal.counts_B[row] == sizes_B[row]:
                    assert outcome.accepted_B[row] == 1
            failed += outcome.accepted_B.count(0)
    assert failed > 600


def leave_a_residue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a rounding error to the residual weight of every token."""
    monkeypatch.setattr(
        device_tree, "draw_at", lambda weights, uniforms: draw_at(weights + 1e-7, uniforms)
    )


def draw_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always sample the next token outside the candidates, even if none there has weight."""
    monkeypatch.setattr(device_tree.CandidateNode, "next_token", lambda self, uniform: self.other)


def take_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a rounding error to the probability that is left after rejected point masses."""
    chance = device_tree.PointMassNode.acceptance_probability
    monkeypatch.setattr(
        device_tree.PointMassNode,
        "acceptance_probability",
        lambda self, child: chance(replace(self, rest=self.rest + 1e-7), child),
    )


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("point masses", leave_a_residue),
        ("point masses", take_from_one),
        ("few candidates", draw_from_the_others),
        ("whole vocabulary", leave_a_residue),
    ],
)
def test_rounding_that_counts_as_a_share_is_seen(
    kind: str, broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        test_rounding_never_emits_an_impossible_token(kind, monkeypatch)


@pytest.mark.parametrize("kind", ["point masses", "whole vocabulary"])
def test_many_rows_have_the_outcomes_of_few(kind: str) -> None:
    """Check the batched version against the eager one, also where a sibling repeats a token."""
    for seed in range(12):
        logits_BNV, proposal, chooser = random_tree(seed)
        if seed % 2:
            proposal.tokens_BN[:, 2] = proposal.tokens_BN[:, 1]
        proposal = KINDS[kind](proposal, seed)
        eager = token_tree.token(logits_BNV, proposal, chooser)
        assert batched_tree.token(logits_BNV, proposal, chooser) == eager


def test_dense_and_sparse_q_give_equal_outcomes() -> None:
    for seed in range(6):
        logits_BNV, proposal, chooser = random_tree(seed)
        sparse = with_q(proposal, seed)
        whole = token_tree.token(logits_BNV, dense(sparse), chooser)
        assert token_tree.token(logits_BNV, sparse, chooser) == whole


def test_the_noise_of_a_depth_does_not_depend_on_the_number_of_nodes() -> None:
    chooser = TokenChooser(Warper(1.0), "coupled", 3, V, torch.device("cpu"))
    chooser.begin([1, 2], [0, 0], [4, 6], 3)
    depths_BN = torch.tensor([[0, 1, 1, 2, 2, 0], [2, 2, 0, 1, 1, 1]])
    logits_BNV = torch.randn(2, 6, V, dtype=torch.float64)
    many = chooser.race_scores(logits_BNV, depths_BN)
    for node in range(6):
        one = chooser.race_scores(logits_BNV[:, node : node + 1], depths_BN[:, node : node + 1])
        assert torch.equal(many[:, node : node + 1], one)

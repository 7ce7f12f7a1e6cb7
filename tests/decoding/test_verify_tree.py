"""`token` on trees read at once decides as its eager twin does, node for node."""

import pytest
import torch

from decoding import verify, verify_tree
from decoding.chooser import Chooser
from decoding.drafter import Outcome, Proposal, TopRows
from decoding.sampling import Warper

V, ROWS = 9, 40
WARPERS = {"plain": Warper(1.0), "cold": Warper(0.6, top_k=6), "nucleus": Warper(1.3, top_p=0.8)}


def random_tree(seed: int) -> tuple[torch.Tensor, Proposal, Chooser]:
    """Logits and a tree of two levels for each row, whose siblings differ; the last rows count fewer nodes."""
    generator = torch.Generator().manual_seed(seed)
    warper = list(WARPERS.values())[seed % len(WARPERS)]
    parents_N = torch.tensor([-1, -1, -1, 0, 0, 2, 2, 2])
    siblings = [[0, 1, 2], [3, 4], [5, 6, 7]]
    N = len(parents_N)
    tokens_BN = torch.empty(ROWS, N, dtype=torch.long)
    for nodes in siblings:
        order = torch.stack([torch.randperm(V, generator=generator)[: len(nodes)] for _ in range(ROWS)])
        tokens_BN[:, nodes] = order
    logits_BNV = 2 * torch.randn(ROWS, N + 1, V, generator=generator, dtype=torch.float64)
    counts_B = [N] * (ROWS - 6) + [0, 1, 3, 4, 5, 7]
    chooser = Chooser(warper, "token", seed, V, torch.device("cpu"))
    chooser.begin(list(range(ROWS)), [seed] * ROWS, [3] * ROWS, 3)
    return logits_BNV, Proposal(tokens_BN, counts_B, parents_N.expand(ROWS, N)), chooser


def with_q(proposal: Proposal, seed: int) -> Proposal:
    """The same tree, drawn from six candidates a node with the siblings' tokens among them."""
    generator = torch.Generator().manual_seed(seed)
    ids_BPK = torch.stack(
        [torch.stack([torch.randperm(V, generator=generator) for _ in range(4)]) for _ in range(ROWS)]
    )
    order_BPK = torch.rand(ROWS, 4, V, generator=generator)
    assert proposal.parents_BN is not None
    for node in range(proposal.tokens_BN.shape[1]):
        at_BK = ids_BPK[torch.arange(ROWS), proposal.parents_BN[:, node] + 1] == proposal.tokens_BN[:, node, None]
        order_BPK[torch.arange(ROWS), proposal.parents_BN[:, node] + 1] += at_BK
    scores_BPK = torch.randn(ROWS, 4, 6, generator=generator, dtype=torch.float64)
    q_top = TopRows(ids_BPK.gather(2, order_BPK.topk(6, dim=-1).indices), scores_BPK.softmax(-1))
    return Proposal(proposal.tokens_BN, proposal.counts_B, proposal.parents_BN, None, 0, q_top)


def same(left: Outcome, right: Outcome) -> bool:
    return (left.tokens_B, left.paths_B, left.accepted_B, left.tested_B) == (
        right.tokens_B,
        right.paths_B,
        right.accepted_B,
        right.tested_B,
    )


@pytest.mark.parametrize("drawn", [False, True], ids=["point masses", "drawn"])
def test_twins_decide_alike(drawn: bool) -> None:
    accepted: set[int] = set()
    for seed in range(30):
        logits_BNV, proposal, chooser = random_tree(seed)
        if drawn:
            proposal = with_q(proposal, seed)
        eager = verify._recursive(logits_BNV, proposal, chooser)
        assert same(verify_tree.token(logits_BNV, proposal, chooser), eager)
        accepted |= set(eager.accepted_B)
    assert accepted == {0, 1, 2}


def test_a_residual_that_forgets_its_failures_decides_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BNV, proposal, chooser = random_tree(0)
    proposal = with_q(proposal, 0)
    eager = verify._recursive(logits_BNV, proposal, chooser)
    monkeypatch.setattr(verify_tree.Residual, "fail", lambda self, token, q: None)
    assert not same(verify_tree.token(logits_BNV, proposal, chooser), eager)


def test_dense_and_sparse_q_are_one() -> None:
    for seed in range(6):
        logits_BNV, proposal, chooser = random_tree(seed)
        sparse = with_q(proposal, seed)
        assert sparse.q_top is not None and sparse.parents_BN is not None
        parents = sparse.parents_BN.tolist()
        rows = [torch.stack([sparse.q_top.dense(b, parent, V) for parent in parents[b]]) for b in range(ROWS)]
        dense = Proposal(sparse.tokens_BN, sparse.counts_B, sparse.parents_BN, torch.stack(rows))
        assert same(verify._recursive(logits_BNV, sparse, chooser), verify._recursive(logits_BNV, dense, chooser))


def test_noise_of_a_depth_is_the_same_however_many_nodes_ask() -> None:
    chooser = Chooser(Warper(1.0), "coupled", 3, V, torch.device("cpu"))
    chooser.begin([1, 2], [0, 0], [4, 6], 3)
    depths_BN = torch.tensor([[0, 1, 1, 2, 2, 0], [2, 2, 0, 1, 1, 1]])
    logits_BNV = torch.randn(2, 6, V, dtype=torch.float64)
    many = chooser.race_scores(logits_BNV, depths_BN)
    for node in range(6):
        one = chooser.race_scores(logits_BNV[:, node : node + 1], depths_BN[:, node : node + 1])
        assert torch.equal(many[:, node : node + 1], one)

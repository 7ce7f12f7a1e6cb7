"""Heads with one output layer per depth: objective and evaluation against plain loops.

The head is the simplest one: a linear map of the target's last state per depth, as in Medusa
without blocks.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS, HeadRow
from tests.support import tiny_heads as tiny
from training.data.packing import PackedBatch, Sample, collate
from training.features.states import TargetStates
from training.heads import positions as module
from training.heads.evaluation import HeadAccuracy, HeldOutRows
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.heads.positions import Positions, positions
from training.heads.predicting import DraftStarts, PredictingHead
from training.objectives import hidden_states

K, H, V = tiny.HEADS, tiny.HIDDEN, tiny.VOCABULARY


class LinearHeads(nn.Module):
    """One linear map per depth."""

    token_ids_V: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(H, V, bias=False) for _ in range(K))


class LinearPredictions(PredictingHead):
    label, reads_context = "linear", False

    def outputs(self, head: LinearHeads, states: TargetStates) -> list[Tensor]:
        return [layer.weight for layer in head.maps]

    def layer_per_depth(self, head: LinearHeads) -> bool:
        return True

    def features(
        self,
        head: LinearHeads,
        states: TargetStates,
        batch: PackedBatch,
        where: Positions,
        states_PC: Tensor,
    ) -> Tensor:
        return states_PC[where.drafts_M[where.draft_N]]

    def draft(
        self, head: LinearHeads, states: TargetStates, tips: DraftStarts, count: int
    ) -> Tensor:
        return torch.stack([layer(tips.states_MC).argmax(-1) for layer in head.maps[:count]], 1)


KIND = LinearPredictions()


@pytest.mark.parametrize("row", HEAD_ROWS, ids=lambda row: row.name)
def test_kinds_know_whether_they_have_a_layer_for_each_depth(row: HeadRow):
    model = law_6.target()
    head = law_6.head_of(row, model)
    outputs = row.kind.outputs(head, law_6.states_of(row, model))
    assert row.kind.layer_per_depth(head) == (len(outputs) > 1)


def linear_heads() -> LinearHeads:
    torch.manual_seed(2)
    return LinearHeads().double()


def predict_plainly(
    head: LinearHeads, target: Any, documents: list[Sample]
) -> list[dict[str, Any]]:
    """Return each prediction's depth, logits, label and target logits, computed by a plain loop."""
    found = []
    for one in documents:
        hidden = hidden_states(target, collate([one], [[0]], len(one.ids)))[0]
        for t in range(len(one.ids)):
            for depth, layer in enumerate(head.maps):
                if t + 2 + depth < len(one.ids) and one.mask[t + 2 + depth]:
                    found.append(
                        {
                            "depth": depth,
                            "logits": layer(hidden[t]),
                            "label": int(one.ids[t + 2 + depth]),
                            "target": hidden[t + 1 + depth] @ target.lm_head.weight.T,
                        }
                    )
    return found


@pytest.mark.parametrize("chunk", [8, 1024])
@pytest.mark.parametrize("name", ["cross_entropy", "forward_kl"])
def test_the_loss_and_its_gradient_equal_a_plain_loops(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
):
    """Check that the loss, its sums by depth and its gradient equal a plain loop's.

    chunk: number of rows that are grouped together; the loss may process more at once.
    """
    monkeypatch.setattr(module, "CHUNK", chunk)
    target, head, documents = tiny.target(), linear_heads(), tiny.samples()
    loss_config = HeadLossConfig(name, predict_n_tokens=K, decay=0.8)
    objective = HeadObjective(KIND, head, TargetStates(target), loss_config)
    loss, sums = objective(tiny.packed(documents))
    expected, by_depth = torch.zeros((), dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
    for one in predict_plainly(head, target, documents):
        log_q = F.log_softmax(one["logits"], dim=-1)
        each = -log_q[one["label"]]
        if name == "forward_kl":
            each = F.kl_div(
                log_q, F.log_softmax(one["target"], -1), log_target=True, reduction="sum"
            )
        expected = expected + 0.8 ** one["depth"] * each
        by_depth[one["depth"]] += each.detach()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(sums[K:], by_depth)
    weights = list(head.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights)
    ):
        torch.testing.assert_close(ours, theirs)
        assert ours.abs().sum() > 0


def test_predictions_of_a_depth_are_contiguous_in_every_chunk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHUNK", 16)
    batch = tiny.packed(tiny.samples())
    plain, grouped = (positions(batch, K, uses_teacher=True, grouped=one) for one in (False, True))
    assert sorted(grouped.heads.tolist()) == sorted(plain.heads.tolist())
    assert grouped.heads.tolist() == grouped.head_N.tolist()
    changes = {False: 0, True: 0}
    for start in range(0, len(plain.heads), 16):
        for kind, where in ((False, plain), (True, grouped)):
            part = where.heads[start : start + 16]
            changes[kind] += int((np.diff(part) != 0).sum())
        assert set(grouped.targets[start : start + 16]) == set(plain.targets[start : start + 16])
        assert (np.diff(grouped.heads[start : start + 16]) >= 0).all()
    assert changes[True] < changes[False] / 2, "the control: without grouping they are not"


def test_accuracies_are_ranks_among_all_logits():
    target, head, documents = tiny.target(), linear_heads(), tiny.samples()
    rows = HeldOutRows(TargetStates(target), documents, tiny.ROW, torch.device("cpu"))
    look = HeadAccuracy(KIND, head, rows, K, 4)
    right, counts = np.zeros((K, 4)), np.zeros(K)
    for one in predict_plainly(head, target, documents):
        order = one["logits"].argsort(descending=True).tolist()
        counts[one["depth"]] += 1
        right[one["depth"], order.index(one["label"]) :] += 1
    figures = look()
    for depth in range(K):
        for k in range(4):
            assert figures[f"accuracy/linear{depth}_top{k + 1}"] == pytest.approx(
                right[depth, k] / counts[depth]
            )

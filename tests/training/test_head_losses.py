"""Losses of several heads and against a teacher equal their eager twins, in bounded memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.bench.peak_memory import peak_bytes
from tests.support.tiers import tiered
from training.losses.chunked import (
    Outputs,
    RowLoss,
    SplitWeight,
    Weight,
    at_temperature,
    cross_entropy_rows,
    listed_cross_entropy_rows,
)
from training.losses.config import LossConfig
from training.losses.eager import d_pace, row_losses
from training.losses.heads import (
    chunked_argmax,
    chunked_by_head,
    chunked_sample,
    d_pace_weights,
    decay_weights,
)
from training.losses.soft import SOFT_LOSSES, soft_rows
from training.losses.teacher import Teacher, TeacherRows

N, E, G, V, K = 37, 6, 5, 23, 3
SOFT: dict[str, RowLoss] = {
    name: soft_rows(SOFT_LOSSES[name](LossConfig())) for name in ("forward_kl", "lk", "lk_hybrid")
}
LISTED = torch.tensor([0, 2, 3, 7, 8, 11, 19, 22])
# up to three rows share a position of the teacher; some positions have no row
JUDGES = torch.arange(N) // 3 + torch.arange(N) // 11


def shared(teacher: Teacher) -> Callable[[int, int], TeacherRows]:
    return teacher.shared(JUDGES, JUDGES.numpy())


def decayed(head: Tensor, decay: float = 0.8) -> Tensor:
    return decay_weights(head, decay, torch.float64)


def inputs(outputs: int = V) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    features = torch.randn(N, E, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(outputs, E, dtype=torch.float64, requires_grad=True)
    teacher, teacher_weight = (
        torch.randn(N, G, dtype=torch.float64),
        torch.randn(V, G, dtype=torch.float64),
    )
    return features, weight, teacher, teacher_weight, torch.randint(0, K, (N,))


@pytest.mark.parametrize("name", SOFT)
@pytest.mark.parametrize("shortlist", [None, LISTED])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_soft_losses_by_head_equal_their_eager_twins(
    name: str, shortlist: Tensor | None, temperature: float
):
    features, weight, teacher, teacher_weight, head = inputs(
        V if shortlist is None else len(LISTED)
    )
    against = shared(Teacher(teacher, teacher_weight, temperature, shortlist))
    rows = at_temperature(SOFT[name], temperature)
    loss, sums = chunked_by_head(
        features, Outputs([weight]), rows, against, head, K, decayed(head), chunk=10
    )
    targets = teacher[JUDGES] @ teacher_weight.T
    each = row_losses(
        LossConfig(name, temperature=temperature), features @ weight.T, targets, None, shortlist
    )
    twin = (each * 0.8**head).sum()
    torch.testing.assert_close(loss, twin)
    for chunked, theirs in zip(
        torch.autograd.grad(loss * 0.3, (features, weight)),
        torch.autograd.grad(twin * 0.3, (features, weight)),
    ):
        torch.testing.assert_close(chunked, theirs)
    q = torch.softmax(features @ weight.T / temperature, dim=-1)
    p = torch.softmax(targets / temperature, dim=-1)
    p = p if shortlist is None else p[:, shortlist]
    alpha = torch.minimum(p, q).sum(dim=-1).detach()
    for i in range(K):
        torch.testing.assert_close(sums[i], alpha[head == i].sum())
        torch.testing.assert_close(sums[K + i], each[head == i].sum().detach())


@pytest.mark.parametrize("name", tiered(SOFT, [*SOFT][-1:]))
def test_gradients_against_finite_differences(name: str):
    features, weight, teacher, teacher_weight, head = inputs()
    against = shared(Teacher(teacher, teacher_weight))
    # lambda gets no gradient, so the result is not the value's gradient; eta 0 is KL
    rows = soft_rows(SOFT_LOSSES[name](LossConfig(lk_eta=0.0)))
    weights = decayed(head)
    assert torch.autograd.gradcheck(
        lambda f, w: chunked_by_head(f, Outputs([w]), rows, against, head, K, weights, 8)[0],
        (features, weight),
    )


def test_gradcheck_rejects_a_wrong_gradient():
    features, weight, teacher, teacher_weight, head = inputs()
    against = shared(Teacher(teacher, teacher_weight))

    def forgetful(logits: Tensor, judgement: TeacherRows) -> tuple[Tensor, Tensor, Tensor]:
        loss, gradient, metric = SOFT["lk"](logits, judgement)
        return loss, gradient * metric, metric  # the control: TV's gradient for -log alpha

    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(
            lambda f, w: chunked_by_head(
                f, Outputs([w]), forgetful, against, head, K, decayed(head), 8
            )[0],
            (features, weight),
        )


def test_a_drafter_equal_to_its_teacher_has_zero_loss():
    teacher, weight = torch.randn(N, G, dtype=torch.float64), torch.randn(V, G, dtype=torch.float64)
    head = torch.zeros(N, dtype=torch.long)
    for rows in SOFT.values():
        loss, sums = chunked_by_head(
            teacher, Outputs([weight]), rows, Teacher(teacher, weight).at, head, 1, decayed(head)
        )
        assert abs(float(loss)) < 1e-9
        assert abs(float(sums[0]) - N) < 1e-9


def test_labels_outside_the_shortlist_have_no_loss_and_count_as_wrong():
    features, weight, *_, head = inputs()
    labels = torch.randint(0, V, (N,))
    outside = labels % 3 == 0
    loss, sums = chunked_by_head(
        features,
        Outputs([weight]),
        listed_cross_entropy_rows,
        lambda a, b: labels.where(~outside, -1)[a:b],
        head,
        K,
        decayed(head, 1.0),
        chunk=10,
    )
    kept = ~outside
    twin = F.cross_entropy(features[kept] @ weight.T, labels[kept], reduction="sum")
    torch.testing.assert_close(loss, twin)
    for chunked, theirs in zip(
        torch.autograd.grad(loss, (features, weight)), torch.autograd.grad(twin, (features, weight))
    ):
        torch.testing.assert_close(chunked, theirs)
    right = (features @ weight.T).argmax(dim=-1) == labels
    assert float(sums[:K].sum()) == float((right & kept).sum())


def test_the_teacher_computes_each_position_once():
    """Check that the teacher computes logits once per position of a chunk, not once per row."""
    *_, teacher, teacher_weight, _ = inputs()
    made: list[int] = []

    class Counted(Teacher):
        def at(self, start: int, end: int) -> TeacherRows:
            made.append(end - start)
            return super().at(start, end)

    rows = shared(Counted(teacher, teacher_weight))
    eager = Teacher(teacher, teacher_weight).at(0, N)
    for start in range(0, N, 10):
        for found, expected in zip(rows(start, min(N, start + 10)), eager):
            torch.testing.assert_close(found, expected[JUDGES[start : start + 10]])
    assert sum(made) < N / 1.5


def test_no_rows_give_zeros_and_gradients_of_zero():
    features = torch.zeros(0, E, requires_grad=True)
    weight = torch.randn(V, E, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.long)
    loss, sums = chunked_by_head(
        features, Outputs([weight]), cross_entropy_rows, lambda a, b: empty[a:b], empty, K, empty
    )
    loss.backward()
    assert (loss.item(), sums.tolist()) == (0.0, [0.0] * 2 * K)
    assert weight.grad is not None and not weight.grad.any()
    assert chunked_argmax(features, weight).tolist() == []


def test_chunked_argmax_equals_the_argmax():
    features, weight, *_ = inputs()
    assert torch.equal(
        chunked_argmax(features, weight, chunk=10), (features @ weight.T).argmax(dim=-1)
    )


def test_memory_of_all_heads_is_a_chunks():
    """Check that the peak memory is below a quarter of all logits.

    Control: an eager loss over the same rows holds all of them.
    """
    rows, vocabulary, heads = 2048, 4096, 5
    features = torch.randn(rows, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    labels, head = torch.randint(0, vocabulary, (rows,)), torch.arange(rows) % heads

    def chunked() -> Tensor:
        return chunked_by_head(
            features,
            Outputs([weight]),
            cross_entropy_rows,
            lambda a, b: labels[a:b],
            head,
            heads,
            torch.ones(rows),
            chunk=64,
        )[0]

    def eager() -> Tensor:
        return F.cross_entropy(features @ weight.T, labels, reduction="sum")

    size = rows * vocabulary * 4
    assert peak_bytes(lambda: chunked().backward()) < size / 4
    assert peak_bytes(lambda: eager().backward()) > size  # the control


@pytest.mark.parametrize("name", ["cross_entropy", *SOFT])
def test_a_layer_in_two_parts_equals_the_joined_one(name: str):
    """Check losses, gradients and chosen tokens of a `SplitWeight` in float64."""
    features, frozen, teacher, teacher_weight, head = inputs()
    features = torch.cat((features, features[:, :3].cos()), 1).detach().requires_grad_(True)
    trained = torch.randn(V, 3, dtype=torch.float64, requires_grad=True)
    against: Callable[[int, int], Any] = shared(Teacher(teacher, teacher_weight))
    if name == "cross_entropy":
        labels = torch.randint(0, V, (N,))
        against = lambda start, end: labels[start:end]  # noqa: E731
    rows = {**SOFT, "cross_entropy": cross_entropy_rows}[name]

    def run(weight: Weight) -> tuple[Tensor, ...]:
        loss, sums = chunked_by_head(
            features, Outputs([weight]), rows, against, head, K, decayed(head), chunk=10
        )
        return loss, sums, *torch.autograd.grad(loss * 0.3, (features, trained))

    split, joined = SplitWeight(frozen, trained), torch.cat((frozen, trained), 1)
    found = run(split)
    torch.testing.assert_close(found, run(joined))
    other = run(torch.cat((frozen, trained * 1.01), 1))
    assert not any(torch.allclose(*pair) for pair in zip(found, other)), "the control"
    uniforms = torch.rand(N, dtype=torch.float64)
    for weight in (split, joined.detach()):
        assert torch.equal(chunked_argmax(features, weight, 10), (features @ joined.T).argmax(-1))
        sampled = chunked_sample(features, weight, 0.7, uniforms, 10)
        assert torch.equal(sampled, chunked_sample(features, joined.detach(), 0.7, uniforms))


def grouped(chunk: int) -> tuple[Tensor, Outputs, Tensor]:
    """Return the features, the K output layers, and each row's head.

    The rows of one layer are contiguous in every chunk.
    """
    features, *_, head = inputs()
    order = np.lexsort((head.numpy(), np.arange(N) // chunk))
    weights = [
        torch.randn(V, E, dtype=torch.float64).requires_grad_(layer > 0) for layer in range(K)
    ]
    head = head[torch.from_numpy(order)]
    return features, Outputs(weights, head.numpy()), head


@pytest.mark.parametrize("name", SOFT)
@pytest.mark.parametrize("chunk", [10, 1000])
def test_every_head_can_have_an_output_layer(name: str, chunk: int):
    features, outputs, head = grouped(chunk)
    *_, teacher, teacher_weight, _ = inputs()
    against = shared(Teacher(teacher, teacher_weight))
    loss, sums = chunked_by_head(
        features, outputs, SOFT[name], against, head, K, decayed(head), chunk
    )
    weights = torch.stack(list(outputs.weights))
    logits = torch.einsum("ne,nve->nv", features, weights[head])
    each = row_losses(LossConfig(name), logits, teacher[JUDGES] @ teacher_weight.T)
    twin = (each * 0.8**head).sum()
    torch.testing.assert_close(loss, twin)
    trained = (features, *outputs.weights[1:])  # the first layer is frozen
    for chunked, theirs in zip(
        torch.autograd.grad(loss, trained), torch.autograd.grad(twin, trained)
    ):
        torch.testing.assert_close(chunked, theirs)
    for i in range(K):
        torch.testing.assert_close(sums[K + i], each[head == i].sum().detach())
    # the control: all rows through one layer
    alone = Outputs(outputs.weights[:1])
    other, _ = chunked_by_head(features, alone, SOFT[name], against, head, K, decayed(head), chunk)
    assert not torch.allclose(loss, other)


def test_the_teacher_serves_positions_that_rise_from_chunk_to_chunk():
    *_, teacher, teacher_weight, head = inputs()
    order = torch.from_numpy(np.lexsort((head.numpy(), np.arange(N) // 10)))
    judges = JUDGES[order]
    rows = Teacher(teacher, teacher_weight).shared(judges, judges.numpy())
    eager = Teacher(teacher, teacher_weight).at(0, N)
    for start in range(0, N, 10):
        for found, expected in zip(rows(start, min(N, start + 10)), eager):
            torch.testing.assert_close(found, expected[judges[start : start + 10]])


def test_memory_of_several_output_layers_is_a_chunks_and_their_gradients():
    rows, vocabulary, heads = 2048, 4096, 4
    features = torch.randn(rows, 8, requires_grad=True)
    weights = [torch.randn(vocabulary, 8, requires_grad=True) for _ in range(heads)]
    layers = np.sort(np.arange(rows).reshape(-1, 64) % heads, axis=1).ravel()
    labels, head = torch.randint(0, vocabulary, (rows,)), torch.from_numpy(layers)

    def chunked() -> Tensor:
        outputs = Outputs(weights, layers)
        return chunked_by_head(
            features,
            outputs,
            cross_entropy_rows,
            lambda a, b: labels[a:b],
            head,
            heads,
            torch.ones(rows),
            chunk=64,
        )[0]

    def eager() -> Tensor:
        return sum(
            (
                F.cross_entropy(features[head == i] @ weights[i].T, labels[head == i])
                for i in range(heads)
            ),
            torch.zeros(()),
        )

    size = rows * vocabulary * 4
    assert peak_bytes(lambda: chunked().backward()) < size / 3
    assert peak_bytes(lambda: eager().backward()) > size  # the control


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_d_pace_weights_equal_their_eager_twin(alpha: float):
    """Check the weights of drafts of which some depths have no prediction.

    They are derivatives of the expected accepted length with respect to log a.
    """
    torch.manual_seed(3)
    chances, present = torch.rand(7, 4, dtype=torch.float64), torch.rand(7, 4) > 0.3
    draft, head = present.nonzero(as_tuple=True)
    order = torch.randperm(len(draft))
    found = d_pace_weights(chances[present][order], draft[order], head[order], 7, 4, alpha)
    expected = d_pace(chances, present, alpha)[draft, head][order]
    torch.testing.assert_close(found, expected)

    log_a = ((1 - alpha) * chances + alpha).log().requires_grad_(True)
    reached = torch.where(present, log_a, 0).cumsum(dim=1).exp() * present
    (slopes,) = torch.autograd.grad(reached.sum(), log_a)
    torch.testing.assert_close(found, slopes[draft, head][order])
    other = d_pace_weights(chances[present][order], draft[order], head[order], 7, 4, 1.0)
    assert not torch.allclose(found, other), "the control: chances of 1"

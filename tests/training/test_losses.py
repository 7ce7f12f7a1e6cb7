"""Test chunks of losses, the acceptance that they count, and their peak memory.

The losses' formulas are in test_loss_family.py.
"""

import pytest
import torch

from scripts.bench.peak_memory import peak_bytes
from training.losses.chunked import CHUNK, CHUNK_BYTES, chunk_rows, chunked_cross_entropy
from training.losses.config import LossConfig
from training.losses.eager import row_losses
from training.losses.family import chunked_forward_kl

N, H, G, V = 37, 6, 5, 23
ALL_OR_NONE = (torch.arange(V), None)  # drafted tokens


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden = torch.randn(N, H, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, dtype=dtype, requires_grad=True)
    return (
        hidden,
        weight,
        torch.randn(N, G, dtype=dtype),
        torch.randn(V, G, dtype=dtype),
        torch.randint(0, V, (N,)),
    )


def eager_forward_kl(
    hidden: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor
) -> torch.Tensor:
    """Return the sum of KL(teacher || student), computed with autograd from full logits."""
    return row_losses(LossConfig(), hidden @ weight.T, teacher @ teacher_weight.T).sum()


@pytest.mark.parametrize("chunk", [1, 10, 64])
def test_chunks_change_no_loss_and_no_gradient(chunk: int):
    """Compare with autograd on full logits; the other losses have chunks of one size."""
    hidden, weight, teacher, teacher_weight, labels = inputs()
    kl, _ = chunked_forward_kl(hidden, weight, teacher, teacher_weight, chunk)
    nll, correct = chunked_cross_entropy(hidden, weight, labels, chunk)
    twins = (
        eager_forward_kl(hidden, weight, teacher, teacher_weight),
        torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum"),
    )
    for loss, twin in zip((kl, nll), twins, strict=True):
        torch.testing.assert_close(loss, twin)
        ours, theirs = (torch.autograd.grad(one, (hidden, weight)) for one in (loss, twin))
        torch.testing.assert_close(ours, theirs)
    assert int(correct) == int((torch.argmax(hidden @ weight.T, -1) == labels).sum())


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("drafted", [None, torch.tensor([0, 3, 4, 11, 17, 22])], ids=["all", "few"])
def test_acceptance_is_the_overlap_with_the_complete_distribution(
    drafted: torch.Tensor | None, temperature: float
):
    hidden, weight, *teacher, _ = inputs()
    ids = torch.arange(V) if drafted is None else drafted
    overlap = chunked_forward_kl(hidden, weight[ids], *teacher, 10, temperature, drafted)[1]
    p = torch.softmax(teacher[0] @ teacher[1].T / temperature, -1)
    q = torch.softmax(hidden @ weight[ids].T / temperature, -1).detach()
    torch.testing.assert_close(overlap[0], torch.minimum(p[:, ids], q).sum())
    inside = p[:, ids] / p[:, ids].sum(-1, keepdim=True)
    control = torch.minimum(inside, q).sum()
    assert (control > 1.05 * overlap[0]) == (drafted is not None)


def test_a_shortlist_of_all_tokens_is_none():
    hidden, weight, *teacher, _ = inputs()
    both = [chunked_forward_kl(hidden, weight, *teacher, 8, 1.0, ids) for ids in ALL_OR_NONE]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(loss, (hidden, weight)) for loss, _ in both))


def test_gradients_against_finite_differences_in_float64():
    hidden, weight, teacher, teacher_weight, labels = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_forward_kl(h, w, teacher, teacher_weight, 8)[0], (hidden, weight)
    )
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_cross_entropy(h, w, labels, 8)[0], (hidden, weight)
    )


def test_gradcheck_rejects_a_wrong_gradient():
    hidden, weight, teacher, teacher_weight, _ = inputs()

    def wrong(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return chunked_forward_kl(h, w, teacher, teacher_weight, 8)[0] + 0.1 * h.detach().sum()

    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(wrong, (hidden, weight))


def test_a_model_has_kl_zero_and_full_acceptance_with_itself():
    hidden, weight, _, _, _ = inputs()
    loss, overlap = chunked_forward_kl(hidden, weight, hidden.detach(), weight.detach(), 8)
    assert abs(loss.item()) < 1e-9
    assert abs(float(overlap) - N) < 1e-9


def test_bfloat16_losses_are_close_to_float32():
    hidden, weight, teacher, teacher_weight, _ = inputs(torch.float32)
    exact = chunked_forward_kl(hidden, weight, teacher, teacher_weight, 8)[0]
    rough = chunked_forward_kl(
        *(x.detach().bfloat16() for x in (hidden, weight, teacher, teacher_weight)), 8
    )[0]
    assert rough.dtype == torch.float32
    assert abs((rough / exact).item() - 1) < 0.05


def test_no_tensor_of_tokens_by_vocabulary_is_kept():
    """Check that the peak memory is below half of the full logits [N, V].

    Control: an eager loss needs more than twice their size.
    """
    count, vocabulary, width = 2048, 4096, 8
    hidden = torch.randn(count, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    teacher = torch.randn(count, width)
    teacher_weight = torch.randn(vocabulary, width)
    full = count * vocabulary * 4

    assert (
        peak_bytes(
            lambda: chunked_forward_kl(hidden, weight, teacher, teacher_weight, 64)[0].backward()
        )
        < full / 2
    )
    # the control
    assert (
        peak_bytes(lambda: eager_forward_kl(hidden, weight, teacher, teacher_weight).backward())
        > 2 * full
    )


def test_a_draft_vocabulary_keeps_no_tensor_of_tokens_by_vocabulary():
    """Check that the peak memory is below half of the teacher's full logits [N, V]."""
    count, vocabulary, width, drafted = 2048, 4096, 8, torch.arange(0, 4096, 8)
    hidden = torch.randn(count, width, requires_grad=True)
    weight = torch.randn(len(drafted), width, requires_grad=True)
    teacher, teacher_weight = torch.randn(count, width), torch.randn(vocabulary, width)
    full = count * vocabulary * 4

    def run(chunk: int) -> None:
        loss, _ = chunked_forward_kl(hidden, weight, teacher, teacher_weight, chunk, 1.0, drafted)
        loss.backward()

    assert peak_bytes(lambda: run(64)) < full / 2
    assert peak_bytes(lambda: run(count)) > full, "the control has one chunk"


@pytest.mark.parametrize("vocabulary", [1, 32_000, 65_536, 128_256, 262_144, 10**9])
def test_a_chunk_is_the_largest_whose_logits_fit(vocabulary: int):
    rows = chunk_rows(vocabulary)
    assert rows * vocabulary * 4 <= CHUNK_BYTES or rows == 1
    assert rows == CHUNK or 2 * rows * vocabulary * 4 > CHUNK_BYTES


def test_slabs_of_the_vocabulary_lower_the_peak_and_change_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
):
    """Compare float64 gradients of a product in slabs with those of one product, the control."""
    width = 1024
    hidden = torch.randn(N, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, width, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, V, (N,))

    def loss(slab: int) -> torch.Tensor:
        monkeypatch.setattr("training.losses.chunked.CHUNK_BYTES", slab * width * 8)
        return chunked_cross_entropy(hidden, weight, labels, 8)[0]

    slabs, whole = (torch.autograd.grad(loss(slab), (hidden, weight)) for slab in (2, V))
    torch.testing.assert_close(slabs, whole)
    saved = peak_bytes(lambda: loss(V)) - peak_bytes(lambda: loss(2))
    assert saved > V * width * 8 / 2

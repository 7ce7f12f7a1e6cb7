"""Test chunked losses against eager twins and float64 gradients, and their peak memory."""

import pytest
import torch

from scripts.bench.peak_memory import peak_bytes
from training.draft_vocabulary import index_tokens
from training.losses.chunked import (
    CHUNK,
    CHUNK_BYTES,
    chunk_rows,
    chunked_cross_entropy,
    listed_cross_entropy_rows,
)
from training.losses.config import LossConfig
from training.losses.eager import row_losses
from training.losses.family import chunked_forward_kl

N, H, G, V = 37, 6, 5, 23


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
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor,
    teacher_weight: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return the sum of KL(teacher || student), computed with autograd from full logits."""
    loss = LossConfig(temperature=temperature)
    return row_losses(loss, hidden @ weight.T, teacher @ teacher_weight.T).sum()


def chunked_kl_on_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor,
    teacher_weight: torch.Tensor,
    shortlist: torch.Tensor,
    chunk: int,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    return chunked_forward_kl(
        hidden, weight, teacher, teacher_weight, chunk, temperature, shortlist
    )


@pytest.mark.parametrize("chunk", [1, 10, 64])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_forward_kl_equals_its_eager_twin(chunk: int, temperature: float):
    hidden, weight, teacher, teacher_weight, _ = inputs()
    loss, overlap = chunked_forward_kl(hidden, weight, teacher, teacher_weight, chunk, temperature)
    grads = torch.autograd.grad(loss * 0.37, (hidden, weight))
    twin = eager_forward_kl(hidden, weight, teacher, teacher_weight, temperature)
    expected = torch.autograd.grad(twin * 0.37, (hidden, weight))
    torch.testing.assert_close(loss, twin)
    for a, b in zip(grads, expected):
        torch.testing.assert_close(a, b)
    p, q = (
        torch.softmax(x @ w.T / temperature, -1)
        for x, w in ((teacher, teacher_weight), (hidden, weight))
    )
    torch.testing.assert_close(overlap[0], torch.minimum(p, q).sum().detach())


@pytest.mark.parametrize("chunk", [1, 10, 64])
def test_cross_entropy_equals_its_eager_twin(chunk: int):
    hidden, weight, _, _, labels = inputs()
    loss, correct = chunked_cross_entropy(hidden, weight, labels, chunk)
    grads = torch.autograd.grad(loss, (hidden, weight))
    twin = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    expected = torch.autograd.grad(twin, (hidden, weight))
    torch.testing.assert_close(loss, twin)
    for a, b in zip(grads, expected):
        torch.testing.assert_close(a, b)
    assert int(correct) == int((torch.argmax(hidden @ weight.T, -1) == labels).sum())


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


# ------------------------------------------------------------------------------ draft vocabularies
LISTED = torch.tensor([0, 3, 4, 11, 17, 22])


def eager_on_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: torch.Tensor,
    teacher_weight: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return the sum of mass x KL(p / mass || q) over LISTED, with autograd from full logits."""
    p = torch.softmax(teacher @ teacher_weight.T / temperature, dim=-1)[:, LISTED]
    mass = p.sum(dim=-1, keepdim=True)
    log_q = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return (p * ((p / mass).log() - log_q)).sum()


@pytest.mark.parametrize("chunk", [1, 10, 64])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_kl_on_a_draft_vocabulary_equals_its_eager_twin(chunk: int, temperature: float):
    hidden, weight, *teacher, _ = inputs()
    weight = weight[LISTED].detach().requires_grad_(True)
    loss, overlap = chunked_kl_on_tokens(hidden, weight, *teacher, LISTED, chunk, temperature)
    grads = torch.autograd.grad(loss * 0.37, (hidden, weight))
    twin = eager_on_tokens(hidden, weight, *teacher, temperature)
    expected = torch.autograd.grad(twin * 0.37, (hidden, weight))
    torch.testing.assert_close(loss, twin)
    for a, b in zip(grads, expected):
        torch.testing.assert_close(a, b)
    p = torch.softmax(teacher[0] @ teacher[1].T / temperature, -1)
    q = torch.zeros_like(p).index_copy(
        1, LISTED, torch.softmax(hidden @ weight.T / temperature, -1).detach()
    )
    torch.testing.assert_close(overlap[0], torch.minimum(p, q).sum())
    renormalised = p[:, LISTED] / p[:, LISTED].sum(-1, keepdim=True)
    control = torch.minimum(renormalised, q[:, LISTED]).sum()
    assert control > 1.05 * overlap[0], "acceptance is measured with the complete p"


def test_kl_on_all_tokens_is_forward_kl():
    hidden, weight, teacher, teacher_weight, _ = inputs()
    both = [
        chunked_kl_on_tokens(hidden, weight, teacher, teacher_weight, torch.arange(V), 8),
        chunked_forward_kl(hidden, weight, teacher, teacher_weight, 8),
    ]
    torch.testing.assert_close(*both)
    grads = [torch.autograd.grad(loss, (hidden, weight)) for loss, _ in both]
    torch.testing.assert_close(*grads)


def test_gradients_on_a_draft_vocabulary_against_finite_differences():
    hidden, weight, *teacher, labels = inputs()
    weight = weight[LISTED].detach().requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_kl_on_tokens(h, w, *teacher, LISTED, 8)[0], (hidden, weight)
    )
    indices = index_tokens(LISTED, V)[labels]
    rows = listed_cross_entropy_rows
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_cross_entropy(h, w, indices, 8, rows)[0], (hidden, weight)
    )
    loss, correct = chunked_cross_entropy(hidden, weight, indices, 8, rows)
    listed = indices >= 0
    twin = torch.nn.functional.cross_entropy(
        (hidden @ weight.T)[listed], indices[listed], reduction="sum"
    )
    torch.testing.assert_close(loss, twin)
    assert 0 < int(listed.sum()) < N and int(correct) <= int(listed.sum())


def test_a_draft_vocabulary_keeps_no_tensor_of_tokens_by_vocabulary():
    """Check that the peak memory is below half of the teacher's full logits [N, V]."""
    count, vocabulary, width, drafted = 2048, 4096, 8, torch.arange(0, 4096, 8)
    hidden = torch.randn(count, width, requires_grad=True)
    weight = torch.randn(len(drafted), width, requires_grad=True)
    teacher, teacher_weight = torch.randn(count, width), torch.randn(vocabulary, width)
    full = count * vocabulary * 4

    def run(chunk: int) -> None:
        loss, _ = chunked_kl_on_tokens(hidden, weight, teacher, teacher_weight, drafted, chunk)
        loss.backward()

    assert peak_bytes(lambda: run(64)) < full / 2
    assert peak_bytes(lambda: run(count)) > full, "the control has one chunk"


@pytest.mark.parametrize("vocabulary", [1, 32_000, 65_536, 128_256, 262_144, 10**9])
def test_a_chunk_is_the_largest_whose_logits_fit(vocabulary: int):
    rows = chunk_rows(vocabulary)
    assert rows * vocabulary * 4 <= CHUNK_BYTES or rows == 1
    assert rows == CHUNK or 2 * rows * vocabulary * 4 > CHUNK_BYTES

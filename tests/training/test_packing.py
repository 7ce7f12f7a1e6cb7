"""Test packing: every sample is kept, and packed and separate documents are equivalent."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from decoding import devices
from decoding.errors import UserError
from tests.support.host_waits import Waits
from training.config import StudentConfig
from training.data.packing import (
    PackedData,
    Sample,
    best_fit,
    collate,
    micro_batches,
    split_documents,
)
from training.models.attention import (
    document_mask,
    document_starts,
    inside_documents,
    packed_attention,
)
from training.models.build import build_llama
from training.objectives import Distillation, LanguageModelling, TeacherStates, freeze

TINY = StudentConfig(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
)


def tiny(seed: int, dtype: torch.dtype = torch.float64, layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(seed)
    shape = StudentConfig(**{**vars(TINY), "num_hidden_layers": layers})
    return build_llama(
        shape, dtype, vocab_size=61, max_position_embeddings=64, initializer_range=0.2
    )


def chats(count: int, seed: int = 0, longest: int = 30) -> list[Sample]:
    random = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        length = int(random.integers(2, longest))
        mask = random.random(length) < 0.6
        mask[0], mask[-1] = False, True
        samples.append(Sample(random.integers(0, 61, length).astype(np.int32), mask))
    return samples


def test_every_sample_is_in_one_row_and_rows_are_well_filled():
    lengths = np.random.default_rng(1).integers(1, 100, 500).tolist()
    rows = best_fit(lengths, 128)
    assert sorted(index for row in rows for index in row) == list(range(500))
    loads = [sum(lengths[index] for index in row) for row in rows]
    assert max(loads) <= 128
    # best fit decreasing: at most 11/9 of the optimum and a constant
    assert len(rows) <= 1.25 * sum(lengths) / 128 + 1
    emptiest, next_emptiest = sorted(loads)[:2]
    assert emptiest + next_emptiest > 128, "two rows that fit into one were left apart"


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(UserError, match="has 200 tokens, but a packed row holds 128"):
        best_fit([5, 200], 128)


def test_split_documents_supervise_every_token_but_the_first_once():
    ids = list(range(100, 177))
    pieces = split_documents(ids, 16)
    supervised = [int(token) for piece in pieces for token, on in zip(piece.ids, piece.mask) if on]
    assert supervised == ids[1:]
    assert all(len(piece.ids) <= 16 for piece in pieces)


def test_an_epoch_reads_every_row_once_in_an_order_set_by_the_seed():
    samples = chats(200)
    data = PackedData(samples, 64, rows_per_step=1, seed=3)
    epochs = len(data.rows)
    seen = [tuple(data.step_rows(step)[0]) for step in range(2 * epochs)]
    assert sorted(seen[:epochs]) == sorted(map(tuple, data.rows)) == sorted(seen[epochs:])
    assert seen[:epochs] != seen[epochs:], "epochs must be shuffled differently"
    again = PackedData(samples, 64, rows_per_step=1, seed=3)
    assert tuple(again.step_rows(epochs + 5)[0]) == seen[epochs + 5]


def test_ranks_divide_a_step_without_overlap():
    rows = [[index] for index in range(13)]
    parts = [list(micro_batches(rows, rank, 3, 2)) for rank in range(3)]
    assert sorted(row[0] for part in parts for batch in part for row in batch) == list(range(13))
    assert len({len(part) for part in parts}) == 1, "ranks must make the same number of forwards"


@pytest.mark.parametrize("kind", ["pretrain", "distil"])
def test_packed_and_separate_documents_give_equal_losses_and_gradients(kind: str):
    samples = chats(9)
    results = []
    for rows, capacity in (
        (best_fit([len(sample.ids) for sample in samples], 64), 64),
        ([[index] for index in range(9)], 32),
    ):
        model = tiny(0)
        module = (
            LanguageModelling(model) if kind == "pretrain" else Distillation(model, freeze(tiny(1)))
        )
        loss, metric = module(collate(samples, rows, capacity))
        loss.backward()
        results.append(
            (loss.detach(), metric, [parameter.grad for parameter in model.parameters()])
        )
    (loss_a, metric_a, grads_a), (loss_b, metric_b, grads_b) = results
    torch.testing.assert_close(loss_a, loss_b, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(metric_a, metric_b, rtol=1e-12, atol=1e-10)
    for a, b in zip(grads_a, grads_b):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_packed_losses_differ_without_the_document_mask():
    samples = chats(9)
    rows = best_fit([len(sample.ids) for sample in samples], 64)
    right = LanguageModelling(tiny(0))(collate(samples, rows, 64))[0]
    batch = collate(samples, rows, 64)
    batch.host.documents_RT[:] = 1  # the control: one document per row, so attention crosses them
    assert abs((right - LanguageModelling(tiny(0))(batch)[0]).item()) > 1e-3


@pytest.mark.parametrize("kind", ["pretrain", "distil", "distil, cached"])
def test_a_micro_batch_never_waits_for_the_device(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Check that a micro-batch is copied once and never waits, from samples to gradients.

    Control: indexing with a mask waits for the number of its true values.
    """
    samples, model, teacher = chats(9), tiny(0), freeze(tiny(1))
    rows, sent, copies = (
        best_fit([len(sample.ids) for sample in samples], 64),
        devices.copy_to_device,
        [],
    )
    states = TeacherStates(teacher, 10**6 if "cached" in kind else 0)
    module = (
        LanguageModelling(model)
        if kind == "pretrain"
        else Distillation(model, teacher, states=states)
    )

    def counted(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        copies.append(host.numel())
        return sent(host, device)

    monkeypatch.setattr(devices, "copy_to_device", counted)
    waits = Waits()
    with waits.counting(monkeypatch):
        module(collate(samples, rows, 64))[0].backward()
    assert (waits.stray, waits.meant, len(copies)) == ([], 0, 1)
    batch = collate(samples, rows, 64)
    mask_RT = batch.documents_RT == 1
    with waits.counting(monkeypatch):
        assert len(batch.ids_RT[mask_RT])
    assert waits.stray == ["__getitem__"]


def test_a_row_of_a_batch_equals_the_collated_row():
    samples = chats(9)
    rows = best_fit([len(sample.ids) for sample in samples], 64)
    batch = collate(samples, rows, 64)
    for index, row in enumerate(rows):
        alone, cut = collate(samples, [row], 64), batch.row(index)
        for name in ("ids_RT", "positions_RT", "documents_RT", "next_RT"):
            assert torch.equal(getattr(cut, name), getattr(alone, name))
        assert torch.equal(cut.at_supervised(cut.next_RT), alone.at_supervised(alone.next_RT))
        assert (cut.rows, cut.tokens, cut.supervised) == (
            alone.rows,
            alone.tokens,
            alone.supervised,
        )


def test_starts_of_documents_part_the_tokens_that_the_mask_parts():
    samples = chats(9)
    batch = collate(samples, best_fit([len(sample.ids) for sample in samples], 64), 64)
    starts, longest = document_starts(batch.host.documents_RT)
    segments = torch.from_numpy(np.repeat(np.arange(len(starts) - 1), np.diff(starts)))
    seen = document_mask(batch.documents_RT, torch.float32)[:, 0] == 0
    inside = batch.documents_RT > 0
    same = (segments[:, None] == segments[None]).tril()
    for row, per_row in enumerate(same.split(64)):
        mine = per_row[:, 64 * row : 64 * (row + 1)]
        assert torch.equal(mine[inside[row]], seen[row][inside[row]])
        assert per_row.sum() == mine.sum(), "no row sees another"
    assert longest == np.diff(starts).max()


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float64),
        ("cpu", torch.bfloat16),
        ("cuda", torch.bfloat16),
        ("cuda", torch.float16),
    ],
)
def test_attention_by_documents_equals_the_mask(device: str, dtype: torch.dtype):
    """Check outputs and gradients against the mask; two joined documents are the control."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    torch.manual_seed(0)
    samples = chats(9)
    batch = collate(samples, best_fit([len(sample.ids) for sample in samples], 64), 64, device)
    rows, inside = len(batch.rows), (batch.documents_RT > 0)[:, :, None, None]
    inputs = [torch.randn(rows, heads, 64, 64, device=device, dtype=dtype) for heads in (4, 2, 2)]

    def run(tensors: list[torch.Tensor], **given: Any) -> list[torch.Tensor]:
        leaves = [each.clone().requires_grad_() for each in tensors]
        mixed, _ = packed_attention(torch.nn.Identity(), *leaves, None, **given)
        mixed = torch.where(inside, mixed, 0)
        return [mixed, *torch.autograd.grad(mixed.double().square().sum(), leaves)]

    def distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
        return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())

    given = inside_documents(SimpleNamespace(dtype=dtype), batch)
    assert "attention_bias" not in given
    found = run(inputs, **given)
    mask = document_mask(batch.documents_RT, torch.float64)
    exact = run([each.double() for each in inputs], attention_bias=mask)
    bound = 1e-12 if dtype == torch.float64 else 0.01
    assert all(map(lambda ours, wide: distance(ours, wide) < bound, found, exact))
    if device == "cpu":
        first, second, *others = given["document_lengths"]
        joined = {"document_lengths": [first + second, *others]}
    else:
        ends = given["cu_seq_lens_q"]
        joined = {"cu_seq_lens_q": torch.cat((ends[:1], ends[2:])), "max_length_q": 128}
    assert distance(run(inputs, **joined)[0], exact[0]) > 0.1


def test_supervised_counts_are_conserved():
    samples = chats(50)
    data = PackedData(samples, 64, rows_per_step=4, seed=0)
    batch = collate(samples, data.rows, 64)
    assert batch.supervised == data.supervised == data.supervised_in(data.rows)
    assert batch.tokens == data.tokens


def test_zero_supervised_tokens_is_an_error():
    with pytest.raises(UserError, match="zero supervised tokens"):
        PackedData([Sample(np.arange(5, dtype=np.int32), np.zeros(5, dtype=bool))], 8, 1, 0)


@pytest.mark.parametrize("cache_bytes", [10**6, 400])
def test_cached_teacher_states_change_no_loss(cache_bytes: int):
    """Check that cached teacher states give the fresh loss, in other orders and groups of rows.

    If all states fit into the cache, another student's loss reads no row again.
    """
    samples = chats(9)
    rows = best_fit([len(sample.ids) for sample in samples], 64)
    student, teacher = tiny(0), freeze(tiny(1))
    states = TeacherStates(teacher, cache_bytes)
    fresh, cached = Distillation(student, teacher), Distillation(student, teacher, states=states)
    for part in (rows, rows[::-1], rows[1:2]):
        batch = collate(samples, part, 64)
        torch.testing.assert_close(cached(batch), fresh(batch), rtol=1e-12, atol=1e-10)
    other, read = tiny(2), states.tokens_read
    batch = collate(samples, rows, 64)
    torch.testing.assert_close(
        Distillation(other, teacher, states=states)(batch),
        Distillation(other, teacher)(batch),
        rtol=1e-12,
        atol=1e-10,
    )
    assert (states.tokens_read == read) == (cache_bytes == 10**6), (
        "another student reads no row again that has room"
    )

"""Law: attention over parts of a cache equals attention over the whole cache."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.models.native.attention import (
    HIDDEN,
    attend_in_parts,
    count_parts,
    memory_efficient,
)

H, D, T = 3, 16, 128


def cpu_kernel(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Run PyTorch's flash attention for CPUs, which also returns the logarithms of the sums."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, 0.0, False, attn_mask=mask
    )


def inputs(rows: int, queries: int, masks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, a cache that is longer than what is read of it, and a mask.

    Each query sees slots chosen at random in the first 40, as in a tree, so later parts are hidden.
    """
    made = torch.Generator().manual_seed(7)
    q = torch.randn(rows, H, queries, D, generator=made, dtype=torch.float64)
    cache = torch.randn(2, rows, H, T + 64, D, generator=made, dtype=torch.float64)
    visible = torch.rand(masks, 1, queries, T, generator=made) < 0.5
    visible[..., 40:] = False
    visible[..., 0] = True
    mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, float("-inf"))
    keys, values = cache[..., :T, :]
    return q, keys, values, mask


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize(("rows", "masks"), [(1, 1), (2, 1), (3, 3)])
@pytest.mark.parametrize("queries", [1, 5])
def test_parts_equal_the_whole(rows: int, masks: int, queries: int, parts: int) -> None:
    q, keys, values, mask = inputs(rows, queries, masks)
    found = attend_in_parts(q, keys, values, mask, parts, cpu_kernel)
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_control_parts_of_equal_weight_differ() -> None:
    q, keys, values, mask = inputs(1, 5, 1)

    def unweighted(*given: Tensor) -> tuple[Tensor, Tensor]:
        out, sums = cpu_kernel(*given)
        return out, torch.zeros_like(sums)

    found = attend_in_parts(q, keys, values, mask, 4, unweighted)
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    assert (found - expected).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_hidden_slots_have_no_weight_in_any_dtype(dtype: torch.dtype) -> None:
    assert torch.isfinite(torch.tensor(HIDDEN, dtype=dtype))
    assert torch.tensor([HIDDEN, -100.0], dtype=torch.float32).softmax(0)[0] == 0


def test_the_cache_is_cut_where_heads_alone_leave_a_gpu_idle() -> None:
    assert count_parts(32, 5, 32768) == 8
    assert count_parts(8, 4, 8192) == 32  # the four queries of a key head
    assert count_parts(256, 5, 32768) == 1, "heads enough"
    assert count_parts(32, 1, 32768) == 1, "one query"
    assert count_parts(32, 5, 2048) == 8
    assert count_parts(32, 5, 1920) == 1, "too few slots"
    assert count_parts(128, 5, 8192) == 1, "two parts save nothing"
    assert count_parts(32, 5, 32769) == 1, "not even parts"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_parts_equal_the_whole_on_a_gpu(dtype: torch.dtype, error: float) -> None:
    q, keys, values, mask = (
        each.repeat_interleave(4, -1).cuda() if each.shape[-1] == D else each.cuda()
        for each in inputs(2, 5, 2)
    )
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    given = (each.to(dtype) for each in (q, keys, values, mask))
    found = attend_in_parts(*given, 4, memory_efficient)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=error, atol=error)

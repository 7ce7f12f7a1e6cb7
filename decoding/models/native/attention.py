"""Attention of a few new tokens over a long cache, for GPUs.

PyTorch's masked kernel gives each head one block of threads, which reads all of its keys. With one
row of 32 heads most of a GPU is idle, and a forward of two tokens takes three times as long as one
of a single token after 32,768 tokens. So the cache is cut into parts, which the kernel treats as
rows of a batch, and their outputs are joined by the logarithms of their sums (Flash-Decoding, Dao
et al. 2023).

Shapes: B rows, N new tokens, Q query heads, H key/value heads, G = Q / H, M = G N queries of a key
head, D head size, T cache slots, P parts.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCKS = 256  # blocks of threads that keep a GPU busy: about two for each multiprocessor
# Below 2,048 slots, joining the parts takes longer than cutting saves, and two parts never save
# anything (NVIDIA H100, heads 128 wide).
LEAST_SLOTS, LEAST_SLOTS_OF_A_PART, LEAST_PARTS = 2048, 256, 4
EVEN = 8  # slots of a part are a multiple of it, as the kernel's mask must be aligned
# Instead of minus infinity: a part without a visible slot has finite sums, of which none remains.
HIDDEN = -3e4

# (queries, keys, values, mask) -> outputs and the logarithm of each query's sum (B, H, M)
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def attention(
    q_BHMD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, mask: Tensor | None
) -> Tensor:
    """Return softmax(q k^T / sqrt(D) + mask) v, of shape (B, H, M, D).

    mask: additive, (1 or B, 1, M, T).
    """
    if mask is not None and q_BHMD.is_cuda and q_BHMD.dtype != torch.float64:
        parts = count_parts(len(q_BHMD) * keys_BHTD.shape[1], q_BHMD.shape[2], mask.shape[-1])
        if parts > 1:
            return attend_in_parts(q_BHMD, keys_BHTD, values_BHTD, mask, parts, memory_efficient)
    return F.scaled_dot_product_attention(q_BHMD, keys_BHTD, values_BHTD, attn_mask=mask)


def grouped_attention(
    q_BNQD: Tensor,
    keys_BHTD: Tensor,
    values_BHTD: Tensor,
    mask: Tensor | None,
    attend: Callable[..., Tensor] = attention,
) -> Tensor:
    """Return the attention of query heads that share key heads, (B, N, Q, D).

    The G queries that share a key head become more rows of it, so no key is copied. mask: (1 or B,
    1, G * N, T), of the kind that `attend` takes.
    """
    B, N, Q, D = q_BNQD.shape
    H = keys_BHTD.shape[1]
    q_BHMD = q_BNQD.view(B, N, H, Q // H, D).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out_BHMD = attend(q_BHMD, keys_BHTD, values_BHTD, mask)
    return out_BHMD.view(B, H, Q // H, N, D).permute(0, 3, 1, 2, 4).reshape(B, N, Q, D)


def count_parts(heads: int, queries: int, slots: int) -> int:
    """Return the number of parts of the cache; 1 if cutting it would not help.

    heads: B * H. A single query has a kernel of its own, which is as fast as memory.
    """
    if queries == 1 or slots < LEAST_SLOTS:
        return 1
    parts = 1
    while (
        parts * heads < BLOCKS
        and slots % (2 * parts * EVEN) == 0
        and slots // (2 * parts) >= LEAST_SLOTS_OF_A_PART
    ):
        parts *= 2
    return parts if parts >= LEAST_PARTS else 1


def attend_in_parts(
    q_BHMD: Tensor,
    keys_BHTD: Tensor,
    values_BHTD: Tensor,
    mask: Tensor,
    parts: int,
    kernel: Kernel,
) -> Tensor:
    """Return `attention`, computed by the kernel for each of `parts` equal parts of the cache."""
    B, H, M, D = q_BHMD.shape
    T = mask.shape[-1] // parts
    mask = mask.clamp(min=HIDDEN)
    found = []
    for row in range(B):  # the rows of a cache are not adjacent, so no view holds all parts
        keys, values = (
            each[row].unflatten(1, (parts, T)).transpose(0, 1) for each in (keys_BHTD, values_BHTD)
        )
        mask_P1MT = mask[row if len(mask) > 1 else 0].unflatten(2, (parts, T)).permute(2, 0, 1, 3)
        out_PHMD, sums_PHM = kernel(
            q_BHMD[row].expand(parts, H, M, D), keys, values, mask_P1MT.expand(parts, H, M, T)
        )
        shares_PHM = sums_PHM[..., :M].softmax(0)
        found.append((out_PHMD * shares_PHM[..., None]).sum(0))
    return torch.stack(found).to(q_BHMD.dtype)


def memory_efficient(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Run PyTorch's memory-efficient kernel for GPUs."""
    found = torch.ops.aten._scaled_dot_product_efficient_attention(q, keys, values, mask, True)
    return found[0], found[1]

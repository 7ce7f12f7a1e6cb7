"""Attention that stays inside a document of a packed row, for any Hugging Face model.

`PACKED` is registered with transformers' attention interface: a model built with
`attn_implementation=PACKED` takes the arguments of `inside_documents` in its forward call. They
are the documents' ends for a GPU in half precision, whose kernel for documents of different lengths
(FlashAttention, in PyTorch) skips all pairs of tokens that cannot see each other, and otherwise a
mask. With a mask, on a CPU in bfloat16, the plain product is 2-3x faster forward and backward than
the fused kernel at rows of up to 1,024 tokens. Longer rows, other dtypes on CUDA, and models
without gradient (a teacher's forward is 3-4x faster with it) use torch's
scaled_dot_product_attention.

Shapes: R rows, T tokens, Q query heads, K key/value heads, D head width, N tokens of all
rows, S starts of documents.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from decoding import devices
from training.data.packing import PackedBatch

PACKED = "packed"
_PLAIN_MAX_TOKENS = 1024
_CAUSAL = (-1, 0)  # window of a token: everything before it, nothing behind it


def inside_documents(model: Any, batch: PackedBatch) -> dict[str, Any]:
    """Return the arguments that keep a forward of `model` inside the documents of the batch.

    They are the mask `attention_bias`, or `cu_seq_lens_q` and `max_length_q` (transformers' names)
    where `varlen_attn` runs: on a GPU, in bfloat16 or float16.
    """
    if batch.device.type != "cuda" or model.dtype not in (torch.bfloat16, torch.float16):
        return {"attention_bias": document_mask(batch.documents_RT, model.dtype)}
    starts_S, longest = document_starts(batch.host.documents_RT)
    (on_device_S,) = devices.copy_arrays_to_device([starts_S], batch.device)
    return {"cu_seq_lens_q": on_device_S.int(), "max_length_q": longest}


def document_starts(documents_RT: np.ndarray) -> tuple[np.ndarray, int]:
    """Return where documents start in the flattened rows, and the tokens of the longest.

    The last entry is the number of all positions. Positions outside of documents (0) count as a
    document in each row.
    """
    changes_RT = np.ones(documents_RT.shape, dtype=bool)
    changes_RT[:, 1:] = documents_RT[:, 1:] != documents_RT[:, :-1]
    starts_S = np.append(np.flatnonzero(changes_RT), documents_RT.size)
    return starts_S, int(np.diff(starts_S).max())


def document_mask(documents_RT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [R, 1, T, T] of causal attention within documents.

    It is 0 from a token to itself and to earlier tokens of its document, else -inf. A position
    outside of documents attends to itself, as a softmax over no position is undefined.
    """
    rows, length = documents_RT.shape
    same = documents_RT[:, :, None] == documents_RT[:, None, :]
    same &= (documents_RT > 0)[:, :, None] | torch.eye(
        length, dtype=torch.bool, device=documents_RT.device
    )
    allowed = same.tril_()
    bias = torch.zeros(rows, 1, length, length, dtype=dtype, device=documents_RT.device)
    return bias.masked_fill_(~allowed[:, None], float("-inf"))


def plain_attention(
    q_RQTD: Tensor, k_RQTD: Tensor, v_RQTD: Tensor, bias: Tensor, scaling: float
) -> Tensor:
    """Compute softmax(q k^T scaling + bias) v step by step.

    It equals the fused kernel up to rounding. `packed_attention` uses it where it is faster.
    """
    scores_RQTT = torch.matmul(q_RQTD * scaling, k_RQTD.transpose(-1, -2)) + bias
    return torch.matmul(torch.softmax(scores_RQTT, dim=-1), v_RQTD)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **_: object,
) -> tuple[Tensor, None]:
    """Return attention [R, T, Q, D] in the form of transformers' attention interface.

    query: [R, Q, T, D]. key, value: [R, K, T, D]. attention_bias, cu_seq_lens_q, max_length_q: the
    arguments of `inside_documents`. scaling: factor of the scores, by default D^-0.5. Raises
    ValueError without one of them.
    """
    scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if cu_seq_lens_q is not None:
        q_NQD, k_NQD, v_NQD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        ends = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        mixed_NQD: Any = varlen_attn(q_NQD, k_NQD, v_NQD, *ends, scale=scaling, window_size=_CAUSAL)
        return mixed_NQD.unflatten(0, (len(query), -1)), None
    if attention_bias is None:
        raise ValueError(
            "packed attention needs **inside_documents(model, batch) in the model's forward call"
        )
    small = (
        query.device.type == "cpu"
        and query.dtype == torch.bfloat16
        and query.shape[2] <= _PLAIN_MAX_TOKENS
    )
    if small and query.requires_grad:
        mixed = plain_attention(query, key, value, attention_bias, scaling)
    else:
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_bias, scale=scaling
        )
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED, packed_attention)

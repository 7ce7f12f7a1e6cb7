"""Attention that stays inside a document of a packed row, for any Hugging Face model.

`PACKED` is registered with transformers' attention interface: a model built with
`attn_implementation=PACKED` takes the arguments of `inside_documents` in its forward call. Pairs of
tokens that cannot see each other are skipped: on a GPU in half precision by PyTorch's kernel for
documents of different lengths (FlashAttention), on a CPU by one causal attention a document. A GPU
in other dtypes takes a mask.

Shapes: R rows, T tokens, Q query heads, K key/value heads, D head width, N tokens of all
rows, S starts of documents.
"""

from collections.abc import Callable
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
# (queries, keys and values [N, Q, D], factor of the scores) -> attention [N, Q, D]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
_CAUSAL = (-1, 0)  # window of a token: everything before it, nothing behind it


def inside_documents(model: Any, batch: PackedBatch) -> dict[str, Any]:
    """Return the arguments that keep a forward of `model` inside the documents of the batch.

    They are `document_lengths` on a CPU, `cu_seq_lens_q` and `max_length_q` (transformers' names)
    on a GPU in bfloat16 or float16, and otherwise the mask `attention_bias`.
    """
    on_cpu, half = batch.device.type == "cpu", model.dtype in (torch.bfloat16, torch.float16)
    if not on_cpu and not (batch.device.type == "cuda" and half):
        return {"attention_bias": document_mask(batch.documents_RT, model.dtype)}
    starts_S, longest = document_starts(batch.host.documents_RT)
    if on_cpu:
        return {"document_lengths": np.diff(starts_S).tolist()}
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


@torch.compiler.disable  # code for each list of lengths would be compiled anew
def attend_by_document(
    q_NQD: Tensor, k_NQD: Tensor, v_NQD: Tensor, lengths: list[int], scaling: float
) -> Tensor:
    """Return causal attention [N, Q, D] inside consecutive documents of these lengths."""
    by_document = (
        [part.transpose(0, 1)[None] for part in each.split(lengths)]
        for each in (q_NQD, k_NQD, v_NQD)
    )
    mixed = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        for q, k, v in zip(*by_document, strict=True)
    ]
    return torch.cat([each[0].transpose(0, 1) for each in mixed])


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
    document_lengths: list[int] | None = None,
    attend: Attend | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Return attention [R, T, Q, D] in the form of transformers' attention interface.

    query: [R, Q, T, D]. key, value: [R, K, T, D]. attention_bias, cu_seq_lens_q, max_length_q,
    document_lengths: the arguments of `inside_documents`. attend: computes the attention in their
    place, on keys and values of Q heads. scaling: factor of the scores, by default D^-0.5. Raises
    ValueError without one of them.
    """
    scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if attention_bias is not None:
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_bias, scale=scaling
        )
        return mixed.transpose(1, 2).contiguous(), None
    q_NQD, k_NQD, v_NQD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    mixed_NQD: Any
    if attend is not None:
        mixed_NQD = attend(q_NQD, k_NQD, v_NQD, scaling)
    elif document_lengths is not None:
        mixed_NQD = attend_by_document(q_NQD, k_NQD, v_NQD, document_lengths, scaling)
    elif cu_seq_lens_q is not None:
        ends = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        mixed_NQD = varlen_attn(q_NQD, k_NQD, v_NQD, *ends, scale=scaling, window_size=_CAUSAL)
    else:
        raise ValueError(
            "packed attention needs **inside_documents(model, batch) in the model's forward call"
        )
    return mixed_NQD.unflatten(0, (len(query), -1)), None


AttentionInterface.register(PACKED, packed_attention)

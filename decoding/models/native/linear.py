"""Matrix products and norms of the native backend: oneDNN's packed weights on CPU, and the plain
product as their eager twin.

On CPU, `F.linear` over 5 rows of float32 takes about three times as long as over one row (76
against 24 microseconds for 384 x 1152 on two AVX-512 cores of AMD), which eats what speculation
gains. oneDNN with a weight packed once takes 23 for both, and in bfloat16 half of `F.linear`. The
op is the one that torch.compile uses when it freezes a model on CPU.

On Intel's processors `F.linear` is MKL's own product, and for small float32 weights it is ahead: a
whole forward of the embedded target takes 1.9 against 3.3 milliseconds over one token and 2.6
against 4.1 over four, one of a 24 M model 5.7 against 7.4, level over four and a tenth behind over
sixteen. For weights of 25 MB and more it is a tenth ahead over one row and half as fast from four
rows on: those are packed.

Shapes: N rows, I input size, O output size.
"""

from functools import cache
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices

# the row count oneDNN lays the weight out for: a round's; other counts give the same result
PACK_ROWS = 4
SMALL_BYTES = 4 << 20  # of a float32 weight for which MKL is ahead over one row and level over four


class Linear(Protocol):
    """x_NI -> x_NI @ weight_OI^T + bias_O."""

    def __call__(self, x_NI: Tensor) -> Tensor: ...


class PlainLinear:
    """The eager twin: any device, any dtype."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self.weight_OI, self.bias_O)


class PackedLinear:
    """oneDNN with a prepacked weight: CPU, float32 and (where the processor has it) bfloat16."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI, PACK_ROWS)
        self.bias_O = bias_O
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._product(x_NI, self.weight, self.bias_O, "none", [], "")


@cache
def _cpuinfo() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.is_file() else ""


def mkl_is_fast() -> bool:
    """Whether `F.linear` is MKL's product on one of Intel's processors. Asked by name, not by the
    clock: each run must round alike.
    """
    return torch.backends.mkl.is_available() and "GenuineIntel" in _cpuinfo()


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch and this processor have packed products for the dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def draft_dtype(dtype: str, device: torch.device) -> str:
    """In what a head drafts for a target in `dtype`: bfloat16 in place of float32, half a step's
    bytes, where the device multiplies it natively.
    """
    if dtype != "float32":
        return dtype
    if device.type == "cuda":
        native = devices.multiplies_bfloat16()
    else:  # elsewhere oneDNN converts, which costs more than it saves; asked by name as well
        native = not {"avx512_bf16", "amx_bf16"}.isdisjoint(_cpuinfo().split()) and can_pack(
            device, torch.bfloat16
        )
    return "bfloat16" if native else "float32"


def make_linear(weight_OI: Tensor, bias_O: Tensor | None, packed: bool) -> Linear:
    """`packed` chooses the fast path; its caller has asked `can_pack`."""
    small = (
        weight_OI.numel() * weight_OI.element_size() <= SMALL_BYTES
        and weight_OI.dtype == torch.float32
    )
    if not packed or (small and mkl_is_fast()):
        return PlainLinear(weight_OI.contiguous() if packed else weight_OI, bias_O)
    return PackedLinear(weight_OI.contiguous(), bias_O)


def rms_norm(x_NC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) times its weight."""
    if x_NC.dtype == torch.bfloat16 and not x_NC.is_cuda:
        # On a CPU the fused op with a weight takes three times as long in bfloat16; on a GPU it is
        # one kernel.
        return F.rms_norm(x_NC, weight_C.shape, None, eps).mul_(weight_C)
    return F.rms_norm(x_NC, weight_C.shape, weight_C, eps)

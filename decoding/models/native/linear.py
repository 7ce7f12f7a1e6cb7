"""Matrix products and norms of the native backend: oneDNN's packed weights, and plain products.

On CPU, `F.linear` over 5 rows of float32 takes about three times as long as over one row, which
cancels the gain of speculation. oneDNN with a prepacked weight takes equally long for both, and in
bfloat16 half as long as `F.linear`. torch.compile uses this op when it freezes a model on CPU.

On Intel's processors `F.linear` calls MKL, which is up to 1.7 times as fast over one row of a small
float32 weight and equal over four. For weights of 25 MB and more it is only a tenth faster over one
row and half as fast from four rows, so those are packed.

Shapes: N rows, I input size, O output size.
"""

from functools import cache
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices

# typical rows of a round, for which oneDNN lays out the weight; others give the same result
PACK_ROWS = 4
# bytes of a float32 weight up to which MKL is faster over one row and equal over four
SMALL_BYTES = 4 << 20


class Linear(Protocol):
    """A linear layer: x_NI -> x_NI @ weight_OI^T + bias_O."""

    def __call__(self, x_NI: Tensor) -> Tensor: ...


class PlainLinear:
    """A linear layer by `F.linear`, for any device and dtype."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI, bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self.weight_OI, self.bias_O)


class PackedLinear:
    """A linear layer by oneDNN with a prepacked weight, where `can_pack` is true."""

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


def cpu_flags() -> list[str]:
    """Return the instruction sets of the processor, as Linux names them; [] where it does not."""
    lines = [line for line in _cpuinfo().splitlines() if line.startswith(("flags", "Features"))]
    return sorted(lines[0].partition(":")[2].split()) if lines else []


def multiplies_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 in hardware, by its name, not a timing."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpu_flags())


def mkl_is_fast() -> bool:
    """Return whether `F.linear` calls MKL on an Intel processor.

    The processor's name decides, not a timing, so that every run rounds alike.
    """
    return torch.backends.mkl.is_available() and "GenuineIntel" in _cpuinfo()


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN has packed products for the dtype on this device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def native_dtype(device: str | torch.device) -> str:
    """Return `bfloat16` if the device multiplies it in hardware, else `float32`."""
    device = torch.device(device)
    if device.type == "cuda":
        native = devices.multiplies_bfloat16()
    else:  # otherwise oneDNN converts, which costs more than it saves
        native = multiplies_bfloat16() and can_pack(device, torch.bfloat16)
    return "bfloat16" if native else "float32"


def draft_dtype(dtype: str, device: torch.device) -> str:
    """Return the dtype in which a head drafts for a target in `dtype`.

    In place of float32 it is the device's `native_dtype`, which may have half the bytes.
    """
    return native_dtype(device) if dtype == "float32" else dtype


def make_linear(weight_OI: Tensor, bias_O: Tensor | None, packed: bool) -> Linear:
    """Return a linear layer.

    packed: use oneDNN's product unless MKL's is faster; requires `can_pack`.
    """
    small = weight_OI.dtype == torch.float32 and weight_OI.nbytes <= SMALL_BYTES
    if not packed or (small and mkl_is_fast()):
        return PlainLinear(weight_OI.contiguous() if packed else weight_OI, bias_O)
    return PackedLinear(weight_OI.contiguous(), bias_O)


def rms_norm(x_NC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) and its weight."""
    if x_NC.dtype == torch.bfloat16 and not x_NC.is_cuda:
        # On a CPU the fused op with a weight takes three times as long in bfloat16; on a GPU it is
        # one kernel.
        return F.rms_norm(x_NC, weight_C.shape, None, eps).mul_(weight_C)
    return F.rms_norm(x_NC, weight_C.shape, weight_C, eps)

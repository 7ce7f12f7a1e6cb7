"""All calls to torch.cuda in the project; on a CPU each function does the plain equivalent.

A round on a GPU is a queue of kernels that the host fills ahead of the device. Two things empty it:
launching kernels one by one, which captured graphs avoid, and waiting for a number, which the loop
does once per round (`read`). All other code is independent of the device, so the tests run it on a
CPU; a test counts the lines here that only a GPU can run.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.values import check_value

T = TypeVar("T")

# printed by PyTorch at the first use of the mode in which the loop runs
warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
# On a CPU `compiled` serves tests, which need tracing but no fusion. Benchmarks that time it there
# set "inductor", which needs a C++ compiler.
CPU_COMPILER = "aot_eager"


def device_of(name: str) -> str:
    """Resolve `auto` to a GPU if there is one, else to the CPU.

    Raises UserError for an invalid name and for a GPU that does not exist.
    """
    check_value("device", name)
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= count_gpus():
        found = (
            f"{count_gpus()} CUDA devices, numbered from 0" if count_gpus() else "no CUDA device"
        )
        raise UserError(
            f"device '{name}' does not exist: PyTorch finds {found}. Use one that exists, cpu or "
            f"auto."
        )
    return name


def count_gpus() -> int:
    """Return the number of GPUs that PyTorch finds."""
    return torch.cuda.device_count()


def gpu_names() -> list[str]:
    """Return the GPUs' names in their order."""
    return [torch.cuda.get_device_name(index) for index in range(count_gpus())]


def multiplies_bfloat16() -> bool:
    """Return whether there is a GPU that multiplies bfloat16 in hardware."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def set_default_gpu(device: torch.device) -> None:
    """Make this GPU the one to which plain `cuda` refers; do nothing for a CPU or plain `cuda`."""
    if device.type == "cuda":
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)


def rng_state() -> Tensor | None:
    """Return the state of the current GPU's random number generator, None without a GPU."""
    return torch.cuda.get_rng_state() if device_of("auto") == "cuda" else None


def restore_rng(state: Tensor) -> None:
    """Restore what `rng_state` returned; without a GPU there is nothing to restore."""
    if device_of("auto") == "cuda":
        torch.cuda.set_rng_state(state)


def runs_ahead(device: torch.device) -> bool:
    """Return whether the host queues work ahead of the device, so that reading a tensor waits.

    Algorithms with an eager version and a version for such devices choose between them by this.
    """
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tensor(data: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a list or array of numbers as a tensor on the device, without waiting for it."""
    if device.type == "cuda":
        return copy_to_device(torch.as_tensor(data, dtype=dtype), device)
    return torch.as_tensor(data, dtype=dtype, device=device)


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting; return a device tensor unchanged.

    A copy from memory that is not pinned would wait for all queued work.
    """
    if device.type == "cuda":
        pinned = values if values.is_cuda else values.pin_memory()
        return pinned.to(device, non_blocking=True)
    return values.to(device)


def copy_arrays_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy host arrays to the device as int64 tensors of their shapes, in one asynchronous copy."""
    packed = torch.from_numpy(np.concatenate([array.ravel().astype(np.int64) for array in arrays]))
    parts = copy_to_device(packed, device).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def fill(buffer: Tensor, data: Any) -> None:
    """Overwrite a buffer with host numbers; on a GPU the copy is queued like a kernel."""
    host = torch.as_tensor(data, dtype=buffer.dtype)
    buffer.copy_(host.pin_memory() if buffer.is_cuda else host, non_blocking=True)


def read(*tensors: Tensor) -> list[Any]:
    """Return the tensors as (nested) lists, with one wait for the device.

    On a GPU the values travel as float64, so integers above 2^53 lose digits.
    """
    if not runs_ahead(tensors[0].device):
        return [each.tolist() for each in tensors]
    packed = torch.cat([each.reshape(-1).to(torch.float64) for each in tensors])
    with _sync_debug_mode(packed.device, "default"):
        host = packed.cpu()
    sizes = [each.numel() for each in tensors]
    return [
        part.to(each.dtype).view(each.shape).tolist()
        for part, each in zip(host.split(sizes), tensors, strict=True)
    ]


def argmax(scores: Tensor) -> Tensor:
    """Return the index of the largest score along the last dimension, the first among equals.

    On a CPU NumPy computes it: over 49,152 scores some fifteen times as fast as PyTorch.
    """
    if scores.device.type != "cpu" or runs_ahead(scores.device) or torch.compiler.is_compiling():
        return scores.argmax(-1)
    array = (scores.float() if scores.itemsize < 4 else scores).detach().numpy()
    return torch.as_tensor(array.argmax(-1))


def no_waiting(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which every wait for the GPU other than `read` raises RuntimeError."""
    return _sync_debug_mode(device, "error")


@contextmanager
def _sync_debug_mode(device: torch.device, mode: str) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def pool(device: torch.device) -> Any:
    """Return a new memory pool for the graphs of one model, None on a CPU."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def capture(function: Callable[[], T], device: torch.device, memory: Any) -> Callable[[], T]:
    """Record `function` once as a CUDA graph.

    Each call of the result replays the graph and returns the same tensors with new numbers. The
    function must read and write the same tensors at every call and never wait. On a CPU the result
    is the function itself.
    """
    if device.type != "cuda":
        return function
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # libraries choose their kernels and allocate workspaces outside the recording
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # a graph that the garbage collector deletes meanwhile would spoil this one
        collects = gc.isenabled()
        gc.disable()
        try:
            # thread_local: other threads may use the card meanwhile
            with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
                outputs = function()
        finally:
            if collects:
                gc.enable()

    def replay() -> T:
        graph.replay()
        return outputs

    return replay


def compiled(
    function: Callable[..., T], device: torch.device, sizes_open: bool = False
) -> Callable[..., T]:
    """Compile `function` with inductor on a GPU, and with CPU_COMPILER on a CPU.

    sizes_open: compile one form for all sizes and leave untraceable code uncompiled; otherwise
    compile one fully traced form for each size. Matrix-vector products are tuned: with one row,
    inductor writes them as reductions fused with the operations around them.
    """
    # each shape is compiled once, and a loop over contexts and widths has many shapes
    torch._dynamo.config.recompile_limit = 256
    how: dict[str, Any] = {"fullgraph": not sizes_open, "dynamic": sizes_open}
    if device.type == "cuda":
        return torch.compile(function, options={"coordinate_descent_tuning": True}, **how)
    return torch.compile(function, backend=CPU_COMPILER, **how)


def memory_bytes(device: torch.device) -> tuple[int, int] | None:
    """Return (free, total) bytes of the GPU, None on a CPU."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else None


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak bytes of tensors since the last call on this device, None on a CPU."""
    if device.type != "cuda":
        return None
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return most


def describe_gpu(device: torch.device) -> str:
    """Return the GPU's name and compute capability, or 'cpu'."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def release(device: torch.device) -> None:
    """Free the device memory that PyTorch caches; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

"""Every call of torch.cuda in the project; on a CPU each function here has its plain meaning.

A round on a GPU is a queue of kernels that the host fills ahead of the device. Two things empty it:
launching kernels one by one, which a captured graph does not, and waiting for a number, which the
loop does once a round (`read`). All other code is free of devices, so the tests run it on a CPU;
the lines here that only a GPU can run are counted (`scripts/bench/gpu.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.values import check_value

T = TypeVar("T")
# On a CPU `compiled` serves tests, which want it traced and not fused; benchmarks that time it
# there set "inductor" (it needs a C++ compiler).
CPU_COMPILER = "aot_eager"


def device_of(name: str) -> str:
    """`auto` is a GPU where there is one. Raises UserError for what is no device, and for a GPU
    that is not there.
    """
    check_value("device", name)
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= cards():
        found = f"{cards()} CUDA cards, numbered from 0," if cards() else "no CUDA card"
        raise UserError(
            f"device '{name}': PyTorch sees {found} here. Use one that is there, cpu or auto."
        )
    return name


def cards() -> int:
    """How many cards PyTorch sees."""
    return torch.cuda.device_count()


def names() -> list[str]:
    """What the cards are called, in their order."""
    return [torch.cuda.get_device_name(index) for index in range(cards())]


def multiplies_bfloat16() -> bool:
    """Whether there is a card that has it in hardware."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def use(device: torch.device) -> None:
    """Make it the card that a plain `cuda` means."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def rng_state() -> Tensor | None:
    """State of the present card's generator; None where there is no card."""
    return torch.cuda.get_rng_state() if device_of("auto") == "cuda" else None


def restore_rng(state: Tensor) -> None:
    """Inverse of `rng_state`; a machine without a card has no generator to restore."""
    if device_of("auto") == "cuda":
        torch.cuda.set_rng_state(state)


def runs_ahead(device: torch.device) -> bool:
    """Whether the host queues work ahead of the device, so that reading a tensor costs a wait; it
    chooses between twins.
    """
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tensor(data: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.tensor` of host numbers, without waiting for the device: pinned memory and an
    asynchronous copy.
    """
    if device.type == "cuda":
        return torch.tensor(data, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
    return torch.tensor(data, dtype=dtype, device=device)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for it; what is there already stays.

    A copy out of memory that is not pinned would wait for all that was queued before.
    """
    if device.type == "cuda":
        pinned = values if values.is_cuda else values.pin_memory()
        return pinned.to(device, non_blocking=True)
    return values.to(device)


def sent_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Host arrays as int64 tensors of their shapes on the device, in one copy that nobody waits
    for.
    """
    packed = torch.from_numpy(np.concatenate([array.ravel().astype(np.int64) for array in arrays]))
    parts = sent(packed, device).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def fill(buffer: Tensor, data: Any) -> None:
    """Overwrite a static buffer with host numbers, without waiting for the device (whose queue
    keeps the order).
    """
    host = torch.tensor(data, dtype=buffer.dtype, pin_memory=buffer.is_cuda)
    buffer.copy_(host, non_blocking=True)


def read(*tensors: Tensor) -> list[Any]:
    """The tensors as lists, with one wait for the device. Integers past 2^53 do not survive it: it
    is for token ids and probabilities.
    """
    if not runs_ahead(tensors[0].device):
        return [each.tolist() for each in tensors]
    packed = torch.cat([each.reshape(-1).to(torch.float64) for each in tensors])
    with _waiting_is_meant(packed.device):
        host = packed.cpu()
    sizes = [each.numel() for each in tensors]
    return [
        part.to(each.dtype).view(each.shape).tolist()
        for part, each in zip(host.split(sizes), tensors, strict=True)
    ]


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Inside, every wait for the device that is not a `read` raises (CUDA's sync debug mode)."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _waiting_is_meant(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def pool(device: torch.device) -> Any:
    """Memory that the graphs of one model share; their outputs are copied out before the next one
    runs.
    """
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def capture(function: Callable[[], T], device: torch.device, memory: Any) -> Callable[[], T]:
    """`function`, recorded once as a CUDA graph; each call replays it and returns the same tensors
    with new numbers.

    It must read and write the same tensors at every call and never wait. On a CPU it is the
    function itself.
    """
    if device.type != "cuda":
        return function
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # libraries choose their kernels and take their workspaces outside the recording
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            outputs = function()

    def replay() -> T:
        graph.replay()
        return outputs

    return replay


def compiled(
    function: Callable[..., T], device: torch.device, sizes_open: bool = False
) -> Callable[..., T]:
    """`function` fused by inductor on a GPU; on a CPU traced to the same graph and run by
    CPU_COMPILER.

    sizes_open: one form for all sizes, and what cannot be traced runs as it is; otherwise a form
    for each, traced whole. Tuned matrix-vector products: with one row, inductor writes them as
    reductions with what stands around them.
    """
    # one for every shape; a loop over contexts and widths has many
    torch._dynamo.config.recompile_limit = 256
    how: dict[str, Any] = {"fullgraph": not sizes_open, "dynamic": sizes_open}
    if device.type == "cuda":
        return torch.compile(function, options={"coordinate_descent_tuning": True}, **how)
    return torch.compile(function, backend=CPU_COMPILER, **how)


def memory_bytes(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes of the card; None on a CPU."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else None


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes that tensors took at once since the last call; None on a CPU."""
    if device.type != "cuda":
        return None
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return most


def card(device: torch.device) -> str:
    """The card's name and compute capability, or 'cpu'."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def release(device: torch.device) -> None:
    """Give cached memory back, between models of different sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

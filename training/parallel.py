"""One class between the loop and the processes: one process and DDP behave the same, on accelerate.

The global count of supervised tokens divides loss and gradient (the loop divides, ranks add): DDP averages over ranks, so every rank's
share is multiplied by the number of ranks before the backward pass.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decoding.errors import UserError
from decoding.target import device_of
from training.config import ParallelConfig

KINDS = ("single", "ddp")


class Parallel:
    """Where this process stands among the workers of a job, and the few operations that need the others."""

    def __init__(self, config: ParallelConfig, device: str = "auto") -> None:
        if config.kind not in KINDS:
            raise UserError(f"parallel.kind is '{config.kind}'; expected one of {', '.join(KINDS)}")
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        from accelerate import Accelerator, InitProcessGroupKwargs

        use_cpu = device_of(device) == "cpu"
        self._choose_card(device)
        timeout = InitProcessGroupKwargs(
            timeout=timedelta(seconds=config.timeout_seconds), backend="gloo" if use_cpu else "nccl"
        )
        self.accelerator = Accelerator(cpu=use_cpu, kwargs_handlers=[timeout] if self.world_size > 1 else None)
        self.device = self.accelerator.device
        if self.accelerator.num_processes != self.world_size:
            raise UserError(
                f"the workers disagree: WORLD_SIZE is {self.world_size}, accelerate sees {self.accelerator.num_processes} processes"
            )

    def _choose_card(self, device: str) -> None:
        """Make `cuda:N` the present card; raise UserError among ranks, which have a card each."""
        if ":" not in device:
            return
        if self.world_size > 1:
            raise UserError(f"target.device is '{device}', but every rank has a card of its own: use cuda or auto")
        torch.cuda.set_device(device)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def prepare(self, module: nn.Module) -> nn.Module:
        """Move to the device and wrap for gradient exchange."""
        module.to(self.device)
        return self.accelerator.prepare_model(module) if self.world_size > 1 else module

    def unwrap(self, module: nn.Module) -> Any:
        """The module that `prepare` wrapped."""
        return self.accelerator.unwrap_model(module)

    @contextlib.contextmanager
    def exchange(self, module: nn.Module, last: bool) -> Iterator[None]:
        """Gradients travel only in the last backward pass of a step."""
        with contextlib.nullcontext() if last else self.accelerator.no_sync(module):
            yield

    def backward(self, loss: Tensor) -> None:
        """Backward of this rank's share of a sum that ranks add up."""
        self.accelerator.backward(loss * self.world_size)

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over all ranks."""
        if self.world_size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """True on every rank when it is true on one."""
        if self.world_size == 1:
            return flag
        return bool(self.sum(torch.tensor([float(flag)], device=self.device)).item() > 0)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def wait(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

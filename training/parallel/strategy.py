"""One class between the loop and the processes, so that one process, DDP, ZeRO and FSDP agree.

accelerate runs one process, DDP and DeepSpeed's ZeRO (training/parallel/zero.py); torch's
`fully_shard` runs FSDP (training/parallel/fsdp.py). Loss and gradient are divided by the global
count of supervised tokens. Every kind averages gradients over ranks, so each rank's loss is
multiplied by the number of ranks before the backward pass.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from decoding import devices
from decoding.devices import device_of
from decoding.errors import UserError
from jobs import ranks
from jobs.config import ParallelConfig
from training.optimizer import MasterAdamW, Optimizer, Rate, SplitOptimizer
from training.optimizer_config import OptimizerConfig
from training.parallel import fsdp, zero

THREAD_EXIT_SECONDS = 0.1  # see Parallel.close


class Parallel:
    """One rank of a job, and the operations in which all its ranks take part."""

    def __init__(self, config: ParallelConfig, device: str = "auto") -> None:
        self.kind = config.kind
        self.stage = ranks.ZERO.get(config.kind, 0)
        self.rank, self.world_size = ranks.rank(), ranks.world_size()
        ranks.check_kind(self.kind, self.world_size)
        use_cpu = device_of(device) == "cpu"
        self._choose_card(device)
        self.accelerator = self._accelerator(use_cpu, config.timeout_seconds)
        self.device = self.accelerator.device
        if self.accelerator.num_processes != self.world_size:
            raise UserError(
                f"WORLD_SIZE is {self.world_size}, but accelerate has "
                f"{self.accelerator.num_processes} processes. Start the job without a launcher's "
                f"environment variables, or make the two numbers equal"
            )
        self._inner: nn.Module | None = None
        self._sharded: fsdp.ShardedModel | None = None

    def _accelerator(self, use_cpu: bool, timeout_seconds: int) -> Any:
        from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

        if self.world_size == 1:
            return Accelerator(cpu=use_cpu)
        backend = "gloo" if use_cpu else "nccl"
        group = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout_seconds), backend=backend)
        if not self.stage:
            # without it gradients are stored twice
            gradients = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
            return Accelerator(cpu=use_cpu, kwargs_handlers=[group, gradients])
        # With cpu=True accelerate would ignore DeepSpeed. Without a GPU it uses the CPU anyway.
        accelerator = Accelerator(
            deepspeed_plugin=zero.plugin(self.stage, use_cpu), kwargs_handlers=[group]
        )
        zero.unregister_from_transformers()
        return accelerator

    def _choose_card(self, device: str) -> None:
        """Make `cuda:N` the current GPU. Raises UserError if there are several ranks."""
        if ":" not in device:
            return
        if self.world_size > 1:
            raise UserError(
                f"target.device is '{device}', but every rank has a separate GPU. Use cuda or auto"
            )
        devices.set_default_gpu(torch.device(device))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def shards_state(self) -> bool:
        """Return whether ranks shard any of optimizer states, gradients and weights."""
        return self.stage > 0 or self.kind == "fsdp"

    @property
    def shards_weights(self) -> bool:
        """Return whether ranks shard weights, so that all must run every forward together."""
        return self.kind in ranks.SHARDED_WEIGHTS

    def place_frozen(self, model: Any) -> Any:
        """Move a frozen model to the device, sharded under zero3 and fsdp, and return it.

        `fully_shard` shards it under zero3 too, as DeepSpeed shards only what its engine trains.
        Ranks must then run the model equally often. A model on the meta device gets memory for its
        shards, to be filled (training.models.frozen).
        """
        if self.shards_weights:
            fsdp.shard_frozen(model, self._mesh())
        else:
            model.to(self.device)
        return model

    def prepare(
        self,
        module: nn.Module,
        trained: nn.Module,
        config: OptimizerConfig,
        rates: Mapping[str, Rate],
    ) -> tuple[nn.Module, Optimizer]:
        """Return the objective to call in the loop, and its optimizer.

        trained: the part of `module` that is saved; see `gathered_weights`. rates: learning rates
        of single parameters, by name. If ranks shard any state, the children of `trained` that hold
        these parameters stay unsharded: they are small, clamped between steps, and read outside of
        their forward.
        """
        module.to(self.device)
        if not self.shards_state:
            self._inner = module
            wrapped = self.accelerator.prepare_model(module) if self.world_size > 1 else module
            return wrapped, MasterAdamW(trained, config, rates)
        unsharded = {name.partition(".")[0] for name in rates}
        self._inner, live = fsdp.copy_objective(module, trained, unsharded)
        read = zero.gather_parameter if self.stage else fsdp.gather_parameter
        self._sharded = fsdp.ShardedModel(trained, live, read)
        self._sharded.empty()
        optimizer: Optimizer
        if self.stage:
            optimizer = zero.ZeroAdamW(self.accelerator, self._inner, live, config)
            wrapped = optimizer.engine
        else:
            fsdp.shard_trained(self._inner, self._mesh())
            wrapped, optimizer = self._inner, MasterAdamW(live, config)
        if unsharded:
            children = {name: trained.get_submodule(name) for name in sorted(unsharded)}
            masters = MasterAdamW(nn.ModuleDict(children), config, rates)
            optimizer = SplitOptimizer(optimizer, masters, self.sum, self.world_size)
        return wrapped, optimizer

    @property
    def inner(self) -> Any:
        """Return the objective inside the module that `prepare` returned."""
        return self._inner

    @contextlib.contextmanager
    def gathered_weights(self, for_good: bool = False) -> Iterator[None]:
        """Fill the caller's model with the current weights; all ranks must enter together.

        Under ZeRO and FSDP the model is empty outside of this context. for_good: end training and
        leave the model filled.
        """
        if self._sharded is not None:
            self._sharded.fill()
        yield
        if for_good:
            self._sharded = self._inner = None
            if self.stage:
                self.accelerator.free_memory()  # otherwise it keeps the engine
        elif self._sharded is not None:
            self._sharded.empty()

    @contextlib.contextmanager
    def exchange(self, module: Any, last: bool) -> Iterator[None]:
        """Exchange gradients over ranks in a backward pass of `module` inside this context.

        last: False defers the exchange under DDP and ZeRO-1; sharded gradients (ZeRO-2, ZeRO-3,
        FSDP) are exchanged in every pass.
        """
        if self.stage:
            module.set_gradient_accumulation_boundary(last)
        skips = self.kind == "ddp" and not last
        with self.accelerator.no_sync(module) if skips else contextlib.nullcontext():
            yield

    def backward(self, module: Any, loss: Tensor) -> None:
        """Run the backward pass of this rank's part of a loss that is summed over ranks."""
        loss = loss * self.world_size
        if self.stage:
            module.backward(loss)
        else:
            self.accelerator.backward(loss)

    def sum(self, values: Tensor) -> Tensor:
        """Return the element-wise sum over all ranks."""
        if self.world_size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return on every rank whether the flag is true on any."""
        if self.world_size == 1:
            return flag
        return bool(self.sum(torch.tensor([float(flag)], device=self.device)).item() > 0)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group, after which ranks cannot communicate."""
        if self.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()
            # FSDP and ZeRO keep the group's threads alive. A thread that releases the last
            # message while the interpreter shuts down cannot take Python's lock and aborts the
            # process, so this thread waits without the lock.
            time.sleep(THREAD_EXIT_SECONDS)

    def _mesh(self) -> Any:
        return init_device_mesh(self.device.type, (self.world_size,))

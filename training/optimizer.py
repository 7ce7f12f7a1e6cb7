"""torch's AdamW on float32 master weights, and the learning-rate schedule.

For bfloat16 weights the optimizer holds float32 copies. Gradients accumulate in the copies, and
every step writes the rounded result back. float32 weights are their own masters.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from training.optimizer_config import OptimizerConfig
from training.parallel.fsdp import assign, gather_tensor


@dataclass(frozen=True)
class Rate:
    """Learning rate of a parameter relative to the others."""

    # multiplier of the schedule's learning rate
    scale: float = 1.0
    # maximize the loss, as Lagrange multipliers do
    ascends: bool = False


PLAIN = Rate()


class Optimizer(Protocol):
    """Interface between the loop and an optimizer, which may be sharded."""

    @property
    def has_copies(self) -> bool:
        """Return whether every backward pass moves gradients to float32 copies of the weights."""
        ...

    def collect(self) -> None: ...

    def norm(self) -> Tensor: ...

    def clip(self, norm: Tensor | None = None) -> Tensor: ...

    def step(self, lr: float) -> None: ...

    def state(self, keep: bool) -> dict[str, Tensor]: ...

    def load(self, tensors: dict[str, Tensor]) -> None: ...


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    named = model.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def make_adamw(
    named: Iterable[tuple[str, Tensor]], config: OptimizerConfig, rates: Mapping[str, Rate]
) -> torch.optim.AdamW:
    """Return torch's AdamW, which decays only the matrices that train at the common rate.

    named: (name, parameter) pairs. rates: learning rates of single parameters, by name. Every
    parameter group holds `scale`, the multiplier of its learning rate.
    """
    groups: dict[tuple[float, float, bool], list[Tensor]] = {}
    for name, parameter in named:
        kind = rates.get(name, PLAIN)
        decay = config.weight_decay if parameter.dim() >= 2 and kind == PLAIN else 0.0
        groups.setdefault((decay, kind.scale, kind.ascends), []).append(parameter)
    settings = [
        {"params": members, "weight_decay": decay, "scale": scale, "maximize": ascends}
        for (decay, scale, ascends), members in groups.items()
    ]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(settings, lr=config.lr, betas=betas, fused=True)


class MasterAdamW:
    """torch's AdamW over float32 masters of a model's parameters, which may be FSDP's shards."""

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, rates: Mapping[str, Rate] | None = None
    ) -> None:
        """Create the masters and their optimizer.

        rates: learning rates of single parameters, by name; these parameters are not decayed.
        """
        self.config = config
        named = trained_parameters(model)
        self.names, self.parameters = list(named), list(named.values())
        self.masters = [
            p if p.dtype in (torch.float32, torch.float64) else p.detach().float().requires_grad_()
            for p in self.parameters
        ]
        self.optimizer = make_adamw(zip(self.names, self.masters, strict=True), config, rates or {})

    @property
    def _copies(self) -> list[tuple[Tensor, nn.Parameter]]:
        """Return the masters that are copies, with their parameters."""
        pairs = zip(self.masters, self.parameters, strict=True)
        return [(master, parameter) for master, parameter in pairs if master is not parameter]

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    def collect(self) -> None:
        """Move the gradients of one backward pass to the masters, which sum them over passes."""
        for master, parameter in self._copies:
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def step(self, lr: float) -> None:
        """Update the weights at learning rate `lr` from the gradients, then delete these."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the masters, rounded, into the model."""
        for master, parameter in self._copies:
            parameter.copy_(master)

    def norm(self) -> Tensor:
        """Return the norm of all gradients, over all ranks."""
        gradients = [master.grad for master in self.masters if master.grad is not None]
        return gather_tensor(nn.utils.get_total_norm(gradients))

    def clip(self, norm: Tensor | None = None) -> Tensor:
        """Clip the gradients by their global norm and return the norm before clipping.

        norm: a global norm that also covers other gradients; None: the norm of these.
        """
        norm = self.norm() if norm is None else norm
        nn.utils.clip_grads_with_norm_(
            self.masters, self.config.clip if self.config.clip > 0 else math.inf, norm
        )
        return norm

    def state(self, keep: bool = True) -> dict[str, Tensor]:
        """Return all state that the next step depends on, as unsharded named tensors.

        All ranks must call it; those without `keep` receive an empty dict.
        """
        tensors: dict[str, Tensor] = {}
        for name, master in zip(self.names, self.masters, strict=True):
            parts = {"master": master.detach(), **self.optimizer.state.get(master, {})}
            for key, value in parts.items():
                full = gather_tensor(value)
                if keep:
                    # gathered tensors move to the host: rank 0's GPU cannot hold them all
                    tensors[f"{key}.{name}"] = full if full is value else full.cpu()
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned, and the model's weights with it."""
        for name, master in zip(self.names, self.masters, strict=True):
            assign(master, tensors[f"master.{name}"])
            if f"step.{name}" not in tensors:
                continue
            state = {"step": tensors[f"step.{name}"].clone().to(master.device)}
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(master)
                assign(state[key], tensors[f"{key}.{name}"])
            self.optimizer.state[master] = state
        self.write_back()


class SplitOptimizer:
    """Pair of optimizers: one for sharded weights, one for weights that every rank holds in full.

    The latter are few and have other learning rates; their gradients are summed over ranks here.
    Both are clipped by the norm of all gradients.
    """

    def __init__(
        self, sharded: Optimizer, unsharded: MasterAdamW, add: Callable[[Tensor], Tensor], size: int
    ) -> None:
        """Store both optimizers.

        add: returns the sum of a tensor over the `size` ranks. As losses are scaled by `size`
        (Parallel.backward), the sum is divided by it.
        """
        self.sharded, self.unsharded = sharded, unsharded
        self._add, self._size = add, size

    @property
    def has_copies(self) -> bool:
        return self.sharded.has_copies

    def collect(self) -> None:
        self.sharded.collect()
        self.unsharded.collect()

    def norm(self) -> Tensor:
        return torch.hypot(self.sharded.norm().double(), self.unsharded.norm().double()).float()

    def clip(self, norm: Tensor | None = None) -> Tensor:
        """Sum the unsharded gradients over ranks and clip all; return the norm before clipping."""
        for master in self.unsharded.masters:
            mine = torch.zeros_like(master) if master.grad is None else master.grad
            master.grad = self._add(mine) / self._size
        norm = self.norm() if norm is None else norm
        self.sharded.clip(norm)
        self.unsharded.clip(norm)
        return norm

    def step(self, lr: float) -> None:
        self.sharded.step(lr)
        self.unsharded.step(lr)

    def state(self, keep: bool) -> dict[str, Tensor]:
        return self.sharded.state(keep) | self.unsharded.state(keep)

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.sharded.load(tensors)
        self.unsharded.load(tensors)


def learning_rate(config: OptimizerConfig, step: int, progress: float) -> float:
    """Return the learning rate of step `step` (from 0).

    It rises linearly to lr over `warmup_steps`, then follows a cosine to lr x final_lr. progress:
    the completed share (0 to 1) of the run after its warm-up. The cosine starts at the end of the
    warm-up, as in the published recipes (Composer's for Sheared-LLaMA, transformers' for
    ReDrafter). A run shorter than its warm-up ends while the rate rises.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr + (1 - config.final_lr) * cosine)

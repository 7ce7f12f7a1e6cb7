"""torch's AdamW on float32 master weights, and the learning-rate schedule.

Weights may be bfloat16: then the optimizer owns float32 copies, gradients are added to them in
float32 (so accumulation loses nothing) and the rounded result is written back after every step. For
float32 weights the copies are the weights themselves.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from training.optimizer_config import OptimizerConfig
from training.parallel.fsdp import assign, whole


@dataclass(frozen=True)
class Rate:
    """How a parameter moves beside the others."""

    scale: float = 1.0  # of the schedule's learning rate
    ascends: bool = False  # maximizes the loss, as Lagrange multipliers do


PLAIN = Rate()


class Optimizer(Protocol):
    """What the loop asks of an optimizer, whoever holds its states."""

    @property
    def has_copies(self) -> bool:
        """Gradients leave the weights after every backward pass, for float32 ones."""
        ...

    def collect(self) -> None: ...

    def norm(self) -> Tensor: ...

    def clip(self, norm: Tensor | None = None) -> Tensor: ...

    def step(self, lr: float) -> None: ...

    def state(self, keep: bool) -> dict[str, Tensor]: ...

    def load(self, tensors: dict[str, Tensor]) -> None: ...


def parameter_groups(
    named: Iterable[tuple[str, Tensor]], config: OptimizerConfig, rates: Mapping[str, Rate]
) -> list[dict[str, Any]]:
    """torch's parameter groups: matrices are decayed, vectors and parameters with a rate of their
    own are not.
    """
    groups: dict[tuple[float, float, bool], list[Tensor]] = {}
    for name, parameter in named:
        kind = rates.get(name, PLAIN)
        decay = config.weight_decay if parameter.dim() >= 2 and kind == PLAIN else 0.0
        groups.setdefault((decay, kind.scale, kind.ascends), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "scale": scale, "maximize": ascends}
        for (decay, scale, ascends), members in groups.items()
    ]


class MasterAdamW:
    """AdamW (torch.optim.AdamW) over float32 masters of the trainable parameters of `model`, which
    may be FSDP's shares.
    """

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, rates: Mapping[str, Rate] | None = None
    ) -> None:
        """rates: of the parameters, by name, that move otherwise than the rest; they are never
        decayed.
        """
        self.config = config
        named = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.masters = [
            p if p.dtype in (torch.float32, torch.float64) else p.detach().float().requires_grad_()
            for p in self.parameters
        ]
        groups = parameter_groups(zip(self.names, self.masters, strict=True), config, rates or {})
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), fused=True
        )

    @property
    def has_copies(self) -> bool:
        return any(
            master is not parameter
            for master, parameter in zip(self.masters, self.parameters, strict=True)
        )

    def collect(self) -> None:
        """Move the gradients of one backward pass to the masters, adding to what is there."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def step(self, lr: float) -> None:
        """One update at learning rate `lr`, with the gradients as `clip` left them."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def norm(self) -> Tensor:
        """The norm of all gradients, over all ranks."""
        gradients = [master.grad for master in self.masters if master.grad is not None]
        return whole(nn.utils.get_total_norm(gradients))

    def clip(self, norm: Tensor | None = None) -> Tensor:
        """Clip the global gradient norm; norm: the one to clip by, where more than these gradients
        make it up. Returns it as it was before.
        """
        norm = self.norm() if norm is None else norm
        nn.utils.clip_grads_with_norm_(
            self.masters, self.config.clip if self.config.clip > 0 else math.inf, norm
        )
        return norm

    def state(self, keep: bool = True) -> dict[str, Tensor]:
        """Everything the next step depends on, whole, as named tensors. All ranks ask; those
        without `keep` get nothing.
        """
        tensors: dict[str, Tensor] = {}
        for name, master in zip(self.names, self.masters, strict=True):
            parts = {"master": master.detach(), **self.optimizer.state.get(master, {})}
            for key, value in parts.items():
                full = whole(value)
                if keep:  # a gathered one leaves the card: rank 0's has no room for all
                    tensors[f"{key}.{name}"] = full if full is value else full.cpu()
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `state`; the model's weights follow the masters."""
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


class WithApart:
    """An optimizer of weights that ranks hold in shares, and one of the few parameters that every
    rank keeps whole, at rates of their own.

    The gradients of the latter are added over ranks here; the norm that both are clipped by is of
    all gradients together.
    """

    def __init__(
        self, shared: Optimizer, apart: MasterAdamW, add: Callable[[Tensor], Tensor], ranks: int
    ) -> None:
        """add: the sum over ranks, of whose losses each is `ranks` times its share
        (training.parallel.strategy).
        """
        self.shared, self.apart = shared, apart
        self._add, self._ranks = add, ranks

    @property
    def has_copies(self) -> bool:
        return self.shared.has_copies

    def collect(self) -> None:
        self.shared.collect()
        self.apart.collect()

    def norm(self) -> Tensor:
        return (
            (self.shared.norm().double().square() + self.apart.norm().double().square())
            .sqrt()
            .float()
        )

    def clip(self, norm: Tensor | None = None) -> Tensor:
        """Add what is whole over the ranks, then clip both alike. Returns the norm of all gradients
        as it was before.
        """
        for master in self.apart.masters:
            mine = torch.zeros_like(master) if master.grad is None else master.grad
            master.grad = self._add(mine) / self._ranks
        norm = self.norm() if norm is None else norm
        self.shared.clip(norm)
        self.apart.clip(norm)
        return norm

    def step(self, lr: float) -> None:
        self.shared.step(lr)
        self.apart.step(lr)

    def state(self, keep: bool) -> dict[str, Tensor]:
        return self.shared.state(keep) | self.apart.state(keep)

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.shared.load(tensors)
        self.apart.load(tensors)


def learning_rate(config: OptimizerConfig, step: int, progress: float) -> float:
    """Of step `step` (from 0): linear to lr over `warmup_steps`, then over what is left of the run
    a cosine to lr x final_lr.

    progress: how much of what is left lies behind, 0 to 1. The cosine starts where the warm-up
    ends, as in the published recipes' schedulers (Composer's for Sheared-LLaMA, Hugging Face's for
    ReDrafter). A run that is shorter than its warm-up ends on the way up.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr + (1 - config.final_lr) * cosine)


def count_parameters(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)

"""Low-rank adapters: W + B A is trained in place of W, and merged into W at the end.

LoRA (Hu et al. 2021, arXiv 2106.09685) for every linear layer of a drafter, in the form of
PyTorch's parametrizations: losses and drafts that read `layer.weight` see the sum, so no trainer
and no head knows of adapters. Only A and B have gradients and states of the optimizer. A step costs
as much time as one that trains W.

B starts at zero, so the start is the old drafter exactly. The entries of A have the variance 1 / r:
a first step at rate lr then changes each weight by about lr, as a step that trains W does, and the
same rates suit both.

Shapes: O and I outputs and inputs of a layer, r rank.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from decoding.errors import UserError
from training.config import DrafterJobConfig

RANK = "adapter_rank"
UNSHARDED = ("single", "ddp")


class LowRank(nn.Module):
    """The map W -> W + B A, of which A and B are trained."""

    def __init__(self, weight_OI: Tensor, rank: int) -> None:
        super().__init__()
        outputs, inputs = weight_OI.shape
        self.down_rI = nn.Parameter(weight_OI.new_empty(rank, inputs).normal_(std=rank**-0.5))
        self.up_Or = nn.Parameter(weight_OI.new_zeros(outputs, rank))

    def forward(self, weight_OI: Tensor) -> Tensor:
        """Return W + B A, summed in float32 or more and rounded once."""
        wide = torch.promote_types(weight_OI.dtype, torch.float32)
        sum_OI = torch.addmm(weight_OI.to(wide), self.up_Or.to(wide), self.down_rI.to(wide))
        return sum_OI.to(weight_OI.dtype)


def attach(model: nn.Module, rank: int) -> int:
    """Freeze a model and give its linear layers adapters; return the number of trained parameters.

    rank: 0 leaves the model unchanged. Layers with at most `rank` inputs or outputs, and those that
    share their weight with an embedding, stay frozen. Raises UserError if no layer is left.
    """
    if not rank:
        return sum(one.numel() for one in model.parameters() if one.requires_grad)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    embedded = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    free = [layer for layer in layers if id(layer.weight) not in embedded]
    adapted = [layer for layer in free if min(layer.weight.shape) > rank]
    if not adapted:
        widest = max((min(layer.weight.shape) for layer in free), default=0)
        raise UserError(
            f"{RANK} is {rank}, expected less than {widest}, the smaller side of the drafter's "
            f"largest linear layer; 0 trains all weights"
            if widest > 1
            else f"{RANK} is {rank}, but the drafter has no linear layer. Use 0, which trains all "
            f"weights"
        )
    model.requires_grad_(False)
    for layer in adapted:
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))
    return sum(one.numel() for one in model.parameters() if one.requires_grad)


def merge(model: nn.Module) -> None:
    """Replace every W by W + B A and remove the adapters."""
    for layer in _adapted(model).values():
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict that the model has after `merge`, and leave the model unchanged."""
    state: dict[str, Tensor] = dict(model.state_dict())
    for name, layer in _adapted(model).items():
        prefix = f"{name}." if name else ""
        for key in [key for key in state if key.startswith(f"{prefix}parametrizations.weight.")]:
            del state[key]
        state[f"{prefix}weight"] = layer.weight.detach()
    return state


def start_adapter(model: nn.Module, rank: int, show: bool) -> None:
    """Attach adapters before the first step. show: print how many parameters are trained."""
    whole = sum(one.numel() for one in model.parameters())
    trained = attach(model, rank)
    if rank and show:
        print(
            f"adapter: rank {rank}, {trained / 1e6:.2f} M parameters are trained in place of "
            f"{whole / 1e6:.2f} M"
        )


def adapter_rules(config: DrafterJobConfig, key: str, start: str) -> Mapping[str, tuple[bool, str]]:
    """Return the rules of continued drafters: key -> (validity of its value, expected values).

    start: the folder that the drafter starts from, as set by `key`; empty if there is none.
    """
    rank, refused = config.adapter_rank, ""
    if not start:
        refused = f"without {key}, as only a trained drafter has something to adapt"
    elif config.parallel.kind not in UNSHARDED:
        refused = f"with parallel.kind={config.parallel.kind}, expected {' or '.join(UNSHARDED)}"
    elif config.loop.compile:
        refused = "with loop.compile=true"
    expected = f"0 {refused}" if refused else "a rank of 1 or more, or 0 to train all weights"
    given = config.from_drafter
    return {
        RANK: (rank >= 0 and not (rank and refused), expected),
        "from_drafter": (
            given in ("", start),
            f"empty without +experiment=retarget, as a training continues from {key}",
        ),
    }


def _adapted(model: nn.Module) -> dict[str, Any]:
    """Return the layers with adapters, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module, "weight")
    }

"""Sharded weights: torch's `fully_shard` for trained and frozen models, and gathering.

Where ranks shard the trained weights (ZeRO, FSDP), the loop trains a copy of the objective. The
caller's model holds memory only while it is read (evaluation, checkpoint, export), and then plain
unsharded weights. No code outside this package therefore depends on sharding.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from decoding.errors import UserError
from training.models.layers import decoder_layers


class ShardedModel:
    """The caller's model while ranks shard its weights; empty except between `fill` and `empty`."""

    def __init__(
        self, trained: nn.Module, live: nn.Module, read: Callable[[Tensor], Tensor]
    ) -> None:
        """Store the caller's model and its sharded copy `live`.

        read: gathers a parameter of `live` into new memory; all ranks must call it. Parameters that
        the two models share (see `unsharded` of `copy_objective`) are always present.
        """
        self._trained, self._live, self._read = trained, live, read
        self._names = {name for name, _ in live.named_parameters()}

    @torch.no_grad()
    def fill(self) -> None:
        """Put the current, unsharded weights into the caller's model on every rank."""
        # not stored, as sharding replaces the parameters
        shares = dict(self._live.named_parameters())
        for name, parameter in self._sharded_parameters():
            parameter.data = self._read(shares[name])

    def empty(self) -> None:
        """Release the memory of the caller's model."""
        for _, parameter in self._sharded_parameters():
            parameter.data = parameter.data.new_empty(0)

    def _sharded_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter)
            for name, parameter in self._trained.named_parameters()
            if name in self._names
        ]


def copy_objective(
    module: nn.Module, trained: nn.Module, unsharded: Collection[str] = ()
) -> tuple[nn.Module, nn.Module]:
    """Return a copy of the objective and the copy of `trained` in it.

    A frozen teacher (training.objectives.TeacherStates) is shared with the original, and so are the
    children of `trained` named in `unsharded`. The copy reads these children without registering
    them, so that sharding skips them.
    """
    children = {name: trained.get_submodule(name) for name in unsharded}
    memo: dict[int, Any] = {id(child): child for child in children.values()}
    live = copy.deepcopy(module, memo)
    copied = memo[id(trained)]
    for name, child in children.items():
        delattr(copied, name)
        # nn.Module's attribute access would register it
        object.__setattr__(copied, name, child)
    return live, copied


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only each decoder layer's input for the backward pass, which recomputes the layer.

    Chen et al. 2016, by torch.utils.checkpoint without reentry. Raises UserError for a model
    without Hugging Face decoder layers.
    """
    owners: list[Any] = [
        owner for owner in model.modules() if hasattr(owner, "gradient_checkpointing_enable")
    ]
    if not decoder_layers(model) or not owners:
        raise UserError(
            f"loop.activation_checkpointing=true, but {type(model).__name__} has no decoder layers "
            f"to recompute. Set loop.activation_checkpointing=false"
        )
    owners[0].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def shard_trained(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a trained model over the ranks of `mesh`, in place: each decoder layer, then the rest.

    A layer is gathered only while it runs. Embedding, last norm and lm_head stay gathered from a
    step's forward to its backward, as the objective reads the lm_head's weight in both. Gradients
    are summed in float32. Raises UserError for scalars, which cannot be sharded.
    """
    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise UserError(
            f"parallel.kind is fsdp, which cannot shard the scalar parameter '{scalars[0]}'. Use "
            f"parallel=ddp, zero1, zero2 or zero3"
        )
    narrow = next(module.parameters()).dtype in (torch.bfloat16, torch.float16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
    for layer in decoder_layers(module):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def shard_frozen(model: Any, mesh: DeviceMesh) -> None:
    """Shard a frozen Hugging Face causal LM in place; a decoder layer is gathered while it runs.

    The lm_head stays unsharded, since losses read it in chunks outside of any forward. Every
    forward of `model.model` communicates among all ranks, so all must run it equally often. After
    one, its parts (embedding, layers, last norm) can be called too, and run by `run_part`. A model
    on the meta device gets uninitialized memory for this rank's shards.
    """
    empty = next(model.parameters()).is_meta
    if not empty:
        model.get_output_embeddings().to(mesh.device_type)
    for part in (model.model.embed_tokens, *decoder_layers(model.model), model.model.norm):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
        part.run_part = MethodType(_run_part, part)
        register_fsdp_forward_method(part, "run_part")
    fully_shard(model.model, mesh=mesh, reshard_after_forward=True)
    if empty:
        model.to_empty(device=mesh.device_type)


def run_part(part: Any, function: Callable[..., Any], *inputs: Tensor) -> Any:
    """Return function(part, *inputs), which reads the weights of a part of a frozen model.

    Weights that `shard_frozen` shards are gathered while it runs, and again in its backward pass.
    All ranks must then call it equally often, and gradients flow through its inputs and its result,
    a tensor or a list of them.
    """
    is_sharded = isinstance(part, FSDPModule)
    return part.run_part(function, *inputs) if is_sharded else function(part, *inputs)


def _run_part(part: Any, function: Callable[..., Any], *inputs: Tensor) -> Any:
    return function(part, *inputs)


class GatheredState(Mapping[str, Tensor]):
    """State dict whose tensors are gathered one at a time when they are read.

    All ranks must read the same names in the same order.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Tensor:
        return gather_tensor(self._state[name].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return a sharded tensor in full and any other unchanged. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_parameter(parameter: Tensor) -> Tensor:
    """Return a full copy of a parameter that FSDP shards. All ranks must call it."""
    return gather_tensor(parameter.detach())


def assign(tensor: Tensor, value: Tensor) -> None:
    """Copy `value`, which every rank has in full, into `tensor` or into this rank's shard of it."""
    if isinstance(tensor, DTensor):
        value = value.to(device=tensor.device, dtype=tensor.dtype)
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)

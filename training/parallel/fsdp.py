"""Weights in shares: torch's `fully_shard` for what is trained and for a frozen teacher, and the
whole weights that the rest of a job sees.

Where ranks hold the trained weights in shares (ZeRO, FSDP), the loop trains a copy of the
objective. The caller's own model is a shell: it holds memory only while somebody looks at it (an
evaluation, a checkpoint, the export), and plain whole weights then, so that nothing outside this
package knows of shares.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from decoding.errors import UserError


class ShardedModel:
    """The caller's model while ranks hold its weights in shares: its parameters are empty between
    `fill` and `empty`.
    """

    def __init__(
        self, trained: nn.Module, live: nn.Module, read: Callable[[Tensor], Tensor]
    ) -> None:
        """live: the copy of `trained` that holds the shares. read: a parameter of it -> its whole,
        in new memory, asked by all ranks.

        What `live` does not own (`copy_objective`, apart) both have in common: it is always there.
        """
        self._trained, self._live, self._read = trained, live, read
        self._names = {name for name, _ in live.named_parameters()}

    @torch.no_grad()
    def fill(self) -> None:
        """Put the present weights into the caller's model, whole, on every rank."""
        # Asked anew each time: cutting puts other parameters in the place of whole ones.
        shares = dict(self._live.named_parameters())
        for name, parameter in self._cut():
            parameter.data = self._read(shares[name])

    def empty(self) -> None:
        """Give the memory back."""
        for _, parameter in self._cut():
            parameter.data = parameter.data.new_empty(0)

    def _cut(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (name, parameter)
            for name, parameter in self._trained.named_parameters()
            if name in self._names
        ]


def copy_objective(
    module: nn.Module, trained: nn.Module, apart: Collection[str] = ()
) -> tuple[nn.Module, nn.Module]:
    """(a copy of the objective, the copy of `trained` in it); frozen models
    (training.objectives.Frozen) are shared with the original.

    apart: children of `trained` that are shared too. The copy reads them and does not own them:
    they are not among its parameters, so whoever cuts those leaves them whole.
    """
    children = {name: trained.get_submodule(name) for name in apart}
    memo: dict[int, Any] = {id(child): child for child in children.values()}
    live = copy.deepcopy(module, memo)
    copied = memo[id(trained)]
    for name, child in children.items():
        delattr(copied, name)
        # a plain attribute: nn.Module's own would register it
        object.__setattr__(copied, name, child)
    return live, copied


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of the Hugging Face models in `model`, in order."""
    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only each decoder layer's input for the backward pass, which runs the layer's forward
    again (Chen et al. 2016).

    By torch.utils.checkpoint, not reentrant. Raises UserError where there are no decoder layers of
    Hugging Face's.
    """
    owners: list[Any] = [
        owner for owner in model.modules() if hasattr(owner, "gradient_checkpointing_enable")
    ]
    if not decoder_layers(model) or not owners:
        raise UserError(
            f"loop.activation_checkpointing=true, but {type(model).__name__} has no decoder layers "
            f"to run again; set it to false"
        )
    owners[0].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def shard_trained(module: nn.Module, mesh: DeviceMesh) -> None:
    """Cut what is trained over the ranks of `mesh`, in place: each decoder layer by itself, and the
    rest together.

    A layer is whole only while it runs; embedding, last norm and lm_head are from the step's
    forward to its backward, as the objective reads the lm_head's weight in both. Gradients are
    added over ranks in float32. Raises UserError for scalars, which cannot be cut.
    """
    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise UserError(
            f"parallel.kind is fsdp, which cannot cut the scalar parameter '{scalars[0]}': use "
            f"parallel=ddp, or a zero kind"
        )
    policy = MixedPrecisionPolicy(reduce_dtype=_wide(next(module.parameters()).dtype))
    for layer in decoder_layers(module):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def shard_frozen(model: Any, mesh: DeviceMesh) -> None:
    """Cut a frozen Hugging Face causal LM over the ranks, in place: each decoder layer is whole
    only while it runs.

    The lm_head stays whole on every rank: losses read it in chunks, outside of any forward. So
    every forward of `model.model` is a message among all ranks, and they must run it equally often.
    After one, its parts (embedding, layers, last norm) can be called too. A model on the meta
    device is cut there, and gets memory for this rank's shares alone, with nothing in it yet.
    """
    empty = next(model.parameters()).is_meta
    if not empty:
        model.get_output_embeddings().to(mesh.device_type)
    for part in (model.model.embed_tokens, *decoder_layers(model.model), model.model.norm):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    fully_shard(model.model, mesh=mesh, reshard_after_forward=True)
    if empty:
        model.to_empty(device=mesh.device_type)


class GatheredState(Mapping[str, Tensor]):
    """A state dict whose tensors are whole when they are read, one at a time, on every rank.

    Where ranks hold them in shares, all must read the same names in the same order.
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
    """The whole of a tensor that ranks hold in shares (all of them must ask); others as
    they are.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assign(tensor: Tensor, value: Tensor) -> None:
    """Copy `value`, which every rank has whole, into `tensor` or this rank's share of it."""
    if isinstance(tensor, DTensor):
        value = value.to(device=tensor.device, dtype=tensor.dtype)
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that gradients are added in over ranks; None: their own."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else None

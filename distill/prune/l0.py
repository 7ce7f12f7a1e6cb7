"""Mode `l0`: the objective that trains masks, and the weights with them, to the student's shape.

The masked model is the target with hooks. The mask of the residual stream applies to every write to
it (embedding, attention, MLP) and to the outputs of the norms, whose variance counts only the
channels that are not masked. Masks of groups and heads apply before the output projection, those of
units before the down projection, and the mask of a layer to all its writes. With binary masks this
model equals the cut student.

Shapes: R rows, T tokens, N supervised tokens, C hidden size, D head width; masks as in
distill/prune/masks.py.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distill.config import L0Config
from distill.prune.masks import Masks
from training.bounds import Place
from training.data.packing import PackedBatch, Rows
from training.losses.chunked import chunked_cross_entropy
from training.objectives import hidden_states
from training.optimizer import Rate


class MaskedModel(nn.Module):
    """Objective of mode=l0: cross-entropy under sampled masks plus the Lagrangian penalty."""

    metric_names = ("accuracy",)
    keeps_weights = False

    def __init__(self, model: Any, masks: Masks, config: L0Config, lr: float) -> None:
        """Free or freeze the weights, and set the masks' learning rates relative to the weights'.

        lr: learning rate of the weights.
        """
        super().__init__()
        self.model, self.masks = model, masks
        model.requires_grad_(config.train_weights)
        self.rates: Mapping[str, Rate] = {
            name: Rate(config.mask_lr / lr, ascends=name.endswith("multipliers"))
            for name, _ in self.named_parameters()
            if name.startswith("masks.")
        }
        self._warmup_share = config.warmup_share
        self.step, self._warm = 0, 0.0
        self._hooks = contextlib.ExitStack()

    def begin(self, step: int, place: Place, rows: Rows) -> None:
        """Prepare a step: clamp the logits, and raise the target sparsity during the warm-up."""
        self.step = step
        for _, masks in self.masks.each():
            masks.bound()
        self._warm = place.share(of=self._warmup_share)

    def unmask(self) -> None:
        """Remove the masks of the last forward pass from the model."""
        self._hooks.close()

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the loss in nats and the number of correct argmaxes [1], summed over tokens.

        Only supervised tokens count. The penalty is added once per supervised token, because the
        loop divides by their global count. The masks of a forward pass depend on its rows and not
        on the rank. They stay until the next forward pass or `unmask`, because the backward pass
        may run layers again (loop.activation_checkpointing).
        """
        self.unmask()
        z = self.masks.sample(self.step, *(index for row in batch.rows for index in row))
        self._hooks.enter_context(apply_masks(self.model, z))
        hidden_NC = batch.at_supervised(hidden_states(self.model, batch))
        following_N = batch.at_supervised(batch.next_RT)
        loss, right = chunked_cross_entropy(hidden_NC, self.model.lm_head.weight, following_N)
        return loss + self.masks.penalty(self._warm) * len(following_N), right


@contextlib.contextmanager
def apply_masks(model: Any, z: Mapping[str, Tensor]) -> Iterator[None]:
    """Apply masks to a Hugging Face model for the duration of the block.

    z: masks by kind, layers [1, L], hidden [1, C], groups [L, H], queries [L H, G], units [L, F].
    """
    hidden_C = z["hidden"][0].to(model.dtype)
    layers = model.model.layers
    groups = z["groups"].shape[1]
    heads_LHG = z["groups"][:, :, None] * z["queries"].view(len(layers), groups, -1)
    heads_LQ = heads_LHG.flatten(1).to(model.dtype)
    units_LF = z["units"].to(model.dtype)
    with contextlib.ExitStack() as handles:

        def norm(module: Any) -> None:
            handles.enter_context(module.register_forward_hook(_make_norm_hook(hidden_C)))

        def write(module: Any, written_C: Tensor, incoming: Tensor | None = None) -> None:
            hook = module.register_forward_hook(lambda _, given, out: out * written_C)
            handles.enter_context(hook)
            if incoming is not None:
                hook = module.register_forward_pre_hook(lambda _, given: (given[0] * incoming,))
                handles.enter_context(hook)

        write(model.model.embed_tokens, hidden_C)
        norm(model.model.norm)
        for number, layer in enumerate(layers):
            norm(layer.input_layernorm)
            norm(layer.post_attention_layernorm)
            written_C = hidden_C * z["layers"][0, number].to(model.dtype)
            head_dim = layer.self_attn.o_proj.in_features // heads_LQ.shape[1]
            write(layer.self_attn.o_proj, written_C, heads_LQ[number].repeat_interleave(head_dim))
            write(layer.mlp.down_proj, written_C, units_LF[number])
        yield


def _make_norm_hook(hidden_C: Tensor) -> Any:
    """Return a forward hook that limits an RMS norm to the channels that are not masked."""
    channels = (hidden_C > 0).sum().clamp(min=1)

    def hook(module: Any, given: tuple[Tensor], out: Tensor) -> Tensor:
        # Masked channels are zero because every write to them is masked.
        incoming_RTC = given[0].float()
        variance = incoming_RTC.square().sum(-1, keepdim=True) / channels
        normed = (incoming_RTC * torch.rsqrt(variance + module.variance_epsilon)).to(out.dtype)
        return module.weight * normed * hidden_C

    return hook

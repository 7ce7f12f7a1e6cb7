"""Mode `l0`: learn what to keep together with the weights, constrained to the student's shape.

The masked model consists of the target's modules with hooks. Masks of the residual stream apply
wherever something is written to it (embedding, attention, MLP) and to the outputs of the norms,
whose variance counts only the remaining channels. Masks of groups and heads apply before the output
projection, those of units before the down projection, and a layer's mask to everything it writes.
With binary masks this equals the cut student.

Shapes: R rows, T tokens, N supervised tokens, C hidden size, D head width; masks as in
distill/prune/masks.py.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distill.prune.masks import Masks
from training.bounds import Place
from training.data.packing import PackedBatch
from training.losses.chunked import chunked_cross_entropy
from training.objectives import hidden_states
from training.optimizer import Rate


class MaskedModel(nn.Module):
    """Objective of mode=l0: cross-entropy under sampled masks plus the Lagrangian penalty."""

    metric_names = ("accuracy",)

    def __init__(
        self,
        model: Any,
        masks: Masks,
        warmup_share: float,
        mask_lr: float,
        lr: float,
        train_weights: bool,
    ) -> None:
        """Prepare the model and the learning rates of its masks.

        warmup_share: share of the run over which the target sparsity grows. mask_lr: learning rate
        of logits and multipliers; lr: learning rate of the weights.
        """
        super().__init__()
        self.model, self.masks = model, masks
        for parameter in model.parameters():
            parameter.requires_grad_(train_weights)
        self.rates: Mapping[str, Rate] = {
            name: Rate(mask_lr / lr, ascends=name.endswith("multipliers"))
            for name, _ in self.named_parameters()
            if name.startswith("masks.")
        }
        self._warmup_share = warmup_share
        self.step, self._warm = 0, 0.0
        self._hooks = contextlib.ExitStack()

    def begin(self, step: int, place: Place) -> None:
        """Set the step and the share of the target sparsity, which grows during the warm-up."""
        self.step = step
        for _, masks in self.masks.each():
            masks.bound()
        self._warm = place.share(of=self._warmup_share)

    def unmask(self) -> None:
        """Remove the masks of the last forward pass from the model."""
        self._hooks.close()

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Return the loss (summed, in nats) and the number of correct argmaxes [1].

        Both are taken over supervised tokens. The penalty is added once per supervised token
        because the loop divides by their global count. The masks of a forward pass depend on its
        rows and not on the rank. They stay until the next forward pass or `unmask`, because the
        backward pass may run layers again (loop.activation_checkpointing).
        """
        self.unmask()
        z = self.masks.sample(self.step, *(index for row in batch.rows for index in row))
        self._hooks.enter_context(masked(self.model, z))
        hidden_NC = batch.at_supervised(hidden_states(self.model, batch))
        following_N = batch.at_supervised(batch.next_RT)
        loss, right = chunked_cross_entropy(hidden_NC, self.model.lm_head.weight, following_N)
        return loss + self.masks.penalty(self._warm) * len(following_N), right


@contextlib.contextmanager
def masked(model: Any, z: Mapping[str, Tensor]) -> Iterator[None]:
    """Apply masks to the Hugging Face model inside the block.

    Their shapes are layers [1, L], hidden [1, C], groups [L, H], queries [L H, G] and units [L, F].
    """
    hidden_C = z["hidden"][0].to(model.dtype)
    layers = model.model.layers
    groups = z["groups"].shape[1]
    heads_LQ = (
        (z["groups"][:, :, None] * z["queries"].view(len(layers), groups, -1))
        .flatten(1)
        .to(model.dtype)
    )
    units_LF = z["units"].to(model.dtype)
    handles = [
        model.model.embed_tokens.register_forward_hook(lambda _, given, out: out * hidden_C),
        model.model.norm.register_forward_hook(_masked_norm(hidden_C)),
    ]
    for number, layer in enumerate(layers):
        written_C = hidden_C * z["layers"][0, number].to(model.dtype)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            handles.append(norm.register_forward_hook(_masked_norm(hidden_C)))
        head_dim = layer.self_attn.o_proj.in_features // heads_LQ.shape[1]
        channels = heads_LQ[number].repeat_interleave(head_dim)
        for module, incoming in (
            (layer.self_attn.o_proj, channels),
            (layer.mlp.down_proj, units_LF[number]),
        ):
            handles.append(
                module.register_forward_pre_hook(lambda _, given, m=incoming: (given[0] * m,))
            )
            handles.append(module.register_forward_hook(lambda _, given, out, m=written_C: out * m))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _masked_norm(hidden_C: Tensor) -> Any:
    """Return a hook that replaces an RMS norm by one over the channels that are not masked."""
    left = (hidden_C > 0).sum().clamp(min=1)

    def hook(module: Any, given: tuple[Tensor], out: Tensor) -> Tensor:
        # Masked channels are zero because every write to them is masked.
        incoming_RTC = given[0].float()
        variance = incoming_RTC.square().sum(-1, keepdim=True) / left
        normed = (incoming_RTC * torch.rsqrt(variance + module.variance_epsilon)).to(out.dtype)
        return module.weight * normed * hidden_C

    return hook

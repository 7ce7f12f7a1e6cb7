"""Mode `l0`: learn what to keep together with the weights, under masks that a constraint drives to
the student's shape.

The masked model is the target's own modules with hooks: the residual stream's masks stand where
something is written to it (embedding, attention, MLP) and at the norms' outputs, whose variance
counts the channels that are left; a group's and a head's before the output projection, a unit's
before the down projection, a layer's on all that it writes. With binary masks this computes what
the cut student computes.

Shapes: R rows, T tokens, C hidden size, D head width; masks as in distill/prune/masks.py.
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
    """Cross-entropy under sampled masks, and the Lagrangian of their constraint: the objective of
    mode=l0.
    """

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
        """warmup_share: of the whole run, over which the target sparsity grows; mask_lr beside the
        weights' lr: of logits and multipliers.
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
        """The target sparsity of this step: t times what lies behind of the warm-up."""
        self.step = step
        for _, masks in self.masks.each():
            masks.bound()
        self._warm = place.share(of=self._warmup_share)

    def unmask(self) -> None:
        """Take the masks of the last forward off the model."""
        self._hooks.close()

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """(sum of -log q in nats and of the penalty, number of right argmaxes [1]) over supervised
        tokens.

        The penalty is counted once a supervised token, so that after the loop's division by their
        global count it stands there once. A mask is drawn for every forward, by its rows: whichever
        rank runs them. It stays on through the backward pass, which may run layers again
        (loop.activation_checkpointing), until the next forward or `unmask`.
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
    """The Hugging Face model with these masks (layers [1, L], hidden [1, C], groups [L, H], queries
    [L H, G], units [L, F]) while inside.
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
    """A hook in place of an RMS norm: its variance is over the channels that are not masked to
    zero.
    """
    left = (hidden_C > 0).sum().clamp(min=1)

    def hook(module: Any, given: tuple[Tensor], out: Tensor) -> Tensor:
        # masked channels are zero: all that is written to them is masked
        incoming_RTC = given[0].float()
        variance = incoming_RTC.square().sum(-1, keepdim=True) / left
        normed = (incoming_RTC * torch.rsqrt(variance + module.variance_epsilon)).to(out.dtype)
        return module.weight * normed * hidden_C

    return hook

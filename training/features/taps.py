"""Hidden states of the target at chosen layers, numbered as Hugging Face's `hidden_states`.

Layer 0 is the embedding, layer k the residual stream that enters decoder layer k, and layer L, of L
decoder layers, the state after the final norm, which the lm_head reads. States of several layers
are concatenated in the channels in the given order. Without taps, layer L is read.

Shapes: R rows, T tokens, H hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.errors import UserError

Layers = tuple[int, ...]


def read_layers(target: Any, layers: Layers, forward: Callable[[], Tensor]) -> Tensor:
    """Run `forward` and return the states at these layers, [R, T, len(layers) x H].

    target: a Hugging Face causal LM. forward: returns the states after the final norm.
    """
    last = target.config.num_hidden_layers
    if layers == (last,):
        return forward()
    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            found[layer] = given[0] if given else named["hidden_states"]

        return hook

    hooks = [
        target.model.layers[layer].register_forward_pre_hook(keep(layer), with_kwargs=True)
        for layer in set(layers) - {last}
    ]
    try:
        found[last] = forward()
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([found[layer] for layer in layers], dim=-1)


def check_layers(layers: Sequence[int], num_layers: int) -> None:
    """Raise UserError for a tap outside a target of `num_layers` decoder layers."""
    wrong = [layer for layer in layers if not 0 <= layer <= num_layers]
    if wrong:
        raise UserError(
            f"the head reads layer {wrong[0]} of the target, expected a layer from 0, the "
            f"embedding, to {num_layers}, the final norm. Use a head trained for this target."
        )

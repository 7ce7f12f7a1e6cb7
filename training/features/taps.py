"""Hidden states of the target at chosen layers, as Hugging Face's `hidden_states` numbers them.

Layer 0 is the embedding, layer k the residual stream that enters decoder layer k, and layer L, of L
decoder layers, the state after the final norm, which the lm_head reads. States of several layers
lie behind one another in the channels, in the order of the numbers. No taps are layer L alone.

Shapes: R rows, T tokens, H hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.errors import UserError

Layers = tuple[int, ...]


def read_layers(target: Any, layers: Layers, forward: Callable[[], Tensor]) -> Tensor:
    """Return the states at these layers, [R, T, len(layers) H], of a forward that gives those after
    the final norm.

    target: a Hugging Face causal LM.
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
    """Raise UserError for a tap that a target of so many decoder layers does not have."""
    wrong = [layer for layer in layers if not 0 <= layer <= num_layers]
    if wrong:
        raise UserError(
            f"the head reads the target at layer {wrong[0]}, expected 0 (the embedding) to "
            f"{num_layers} (after the final norm): take a head of this target"
        )

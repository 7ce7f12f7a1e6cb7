"""Taps: the layers of a target whose hidden states a drafter reads.

One convention, here and wherever a layer's number is stored: number k is Hugging Face's
`hidden_states[k]`. 0 is the output of the embedding, k the residual stream after k layers, and k =
num_layers the state after the final norm.

Shapes: B rows, N new tokens, C hidden size, X taps.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.interfaces import Target
from decoding.values import is_int, quote


def check_taps(target: Target, taps: Sequence[int]) -> None:
    """Raise UserError for a layer that the target lacks or that is named twice.

    A backend with `only_final_state` gives no state but the one after the final norm.
    """
    last = target.num_layers
    if getattr(target, "only_final_state", False) and any(tap != last for tap in taps):
        raise UserError(
            f"the drafter reads the target's hidden states at layers "
            f"{', '.join(map(str, taps))}, of which the {target.backend} backend has only layer "
            f"{last}, the state after the final norm. Use a drafter that reads the last hidden "
            f"state (a Medusa or recurrent head) or none, or convert '{target.name}' to a folder "
            f"(python scripts/from_gguf.py) and use backend=native."
        )
    for place, tap in enumerate(taps):
        if not is_int(tap) or not 0 <= tap <= last:
            raise UserError(
                f"taps holds {quote(tap)}, expected layers of '{target.name}': whole numbers from "
                f"0 (the output of the embedding) to {last} (after the final norm)."
            )
        if tap in taps[:place]:
            raise UserError(f"taps holds layer {tap} twice, expected each layer once.")


def join_taps(states: Mapping[int, Tensor], taps: Sequence[int]) -> Tensor:
    """Return the hidden states (B, N, X * C) at the taps, in this order.

    states: the hidden states (B, N, C) by layer.
    """
    return torch.cat([states[tap] for tap in taps], -1)

"""Prefill: prompts are read into a target's cache, in chunks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Target

PREFILL_CHUNK = 512  # tokens per row in one prefill forward, to bound memory


def prefill(
    target: Target,
    prompts_B: Sequence[Sequence[int]],
    keep_hidden: bool = False,
    taps: tuple[int, ...] = (),
) -> Tensor | None:
    """Read these tokens into the rows of an open target, after what the rows hold.

    A row's tokens may be empty. With keep_hidden returns the hidden states (B, N, C) of all tokens,
    padded on the right: after the final norm, or at the taps (see `Target.forward`). Returns None
    without keep_hidden, or if no row has tokens.
    """
    longest = max(len(prompt) for prompt in prompts_B)
    hidden: list[Tensor] = []
    for start in range(0, longest, PREFILL_CHUNK):
        parts = [list(prompt[start : start + PREFILL_CHUNK]) for prompt in prompts_B]
        width = max(len(part) for part in parts)
        padded = [part + [0] * (width - len(part)) for part in parts]
        hidden_BNC = target.features(devices.tensor(padded, target.device), None, taps)
        target.commit(None, [len(part) for part in parts])
        if keep_hidden:
            hidden.append(hidden_BNC)
    return torch.cat(hidden, 1) if hidden else None

"""Prefill: prompts are read into a target's cache, in chunks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Target

PREFILL_CHUNK = 512  # tokens per row in one prefill forward, to bound memory
# A forward over fewer tokens takes about as long as one over this many, to read the weights.
LEAST_TOKENS = 32


def prefill(
    target: Target,
    prompts_B: Sequence[Sequence[int]],
    keep_hidden: bool = False,
    taps: tuple[int, ...] = (),
) -> Tensor | None:
    """Read these tokens into the rows of an open target, after what the rows hold.

    A row's tokens may be empty. With keep_hidden returns the hidden states (B, N, C) of all tokens,
    padded on the right: after the final norm, or at the taps (see `Target.forward`). Returns None
    without keep_hidden, or if no row has tokens. A target whose states cost more than reading has
    `read_rows` for that case.
    """
    read = _read_ragged if reads_ragged(target, prompts_B) else _read_padded
    without_states = None if keep_hidden else getattr(target, "read_rows", None)
    hidden: list[Tensor] = []
    for start in range(0, max(map(len, prompts_B)), PREFILL_CHUNK):
        parts_B = [list(prompt[start : start + PREFILL_CHUNK]) for prompt in prompts_B]
        if without_states is not None:
            without_states({row: part for row, part in enumerate(parts_B) if part})
        else:
            hidden_BNC = read(target, parts_B, taps)
        target.commit(None, [len(part) for part in parts_B])
        if keep_hidden:
            hidden.append(hidden_BNC)
    return torch.cat(hidden, 1) if hidden else None


def reads_ragged(target: Target, prompts_B: Sequence[Sequence[int]]) -> bool:
    """Return whether reading the rows without padding takes less time.

    On a CPU the time of a forward grows with its tokens, padding included.
    """
    if not hasattr(target, "features_of_rows") or devices.runs_ahead(target.device):
        return False
    padded = len(prompts_B) * max(map(len, prompts_B))
    return padded > max(LEAST_TOKENS, sum(map(len, prompts_B)))


def _read_padded(target: Target, parts_B: list[list[int]], taps: tuple[int, ...]) -> Tensor:
    """Return the states (B, N, C) of a forward over rows that are padded to the longest."""
    width = max(map(len, parts_B))
    padded = [part + [0] * (width - len(part)) for part in parts_B]
    return target.features(devices.tensor(padded, target.device), None, taps)


def _read_ragged(target: Any, parts_B: list[list[int]], taps: tuple[int, ...]) -> Tensor:
    """Return the states (B, N, C), padded with zeros, of a forward over the rows' tokens alone."""
    tokens_of = {row: part for row, part in enumerate(parts_B) if part}
    states_of = dict(zip(tokens_of, target.features_of_rows(tokens_of, taps), strict=True))
    first_NC = next(iter(states_of.values()))
    hidden_BNC = first_NC.new_zeros(len(parts_B), max(map(len, parts_B)), first_NC.shape[-1])
    for row, states_NC in states_of.items():
        hidden_BNC[row, : len(states_NC)] = states_NC
    return hidden_BNC

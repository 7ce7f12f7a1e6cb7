"""Prefill: prompts are read into a target's cache, in chunks."""

from collections.abc import Callable, Sequence
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
    ragged = reads_ragged(target, prompts_B)
    return _prefill(target, prompts_B, keep_hidden, taps, _read_ragged if ragged else _read_padded)


def prefill_more(
    target: Target,
    prompts_B: Sequence[Sequence[int]],
    capacity: int,
    keep_hidden: bool = False,
    taps: tuple[int, ...] = (),
) -> Tensor | None:
    """Add rows to an open target and read these tokens into them; see `prefill`.

    capacity: cache slots of a row. A target that cannot read some rows alone reads padding into the
    others, in chunks that fit into their slots.
    """
    running = len(target.lengths_B)
    target.add_rows(len(prompts_B))
    rows_B = [*[()] * running, *prompts_B]
    if hasattr(target, "features_of_rows"):
        hidden_BNC = _prefill(target, rows_B, keep_hidden, taps, _read_ragged)
    else:
        hidden_BNC = _prefill(target, rows_B, keep_hidden, taps, _read_padded, capacity)
    return None if hidden_BNC is None else hidden_BNC[running:]


def _prefill(
    target: Target,
    prompts_B: Sequence[Sequence[int]],
    keep_hidden: bool,
    taps: tuple[int, ...],
    read: Callable[[Any, list[list[int]], tuple[int, ...]], Tensor],
    capacity: int | None = None,
) -> Tensor | None:
    """Return what `prefill` returns, from forwards of `read`.

    capacity: slots of a row, if all rows need room for a chunk; None: they have it.
    """
    without_states = None if keep_hidden else getattr(target, "read_rows", None)
    hidden: list[Tensor] = []
    start, longest = 0, max(map(len, prompts_B))
    while start < longest:
        size = PREFILL_CHUNK
        if capacity is not None:
            size = max(1, min(size, capacity - max(target.lengths_B)))
        parts_B = [list(prompt[start : start + size]) for prompt in prompts_B]
        start += size
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

"""Prefill: prompts are read into a target's cache, in chunks."""

from collections.abc import Sequence

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
    without keep_hidden, or if no row has tokens.
    """
    if not reads_rows_alone(target, prompts_B):
        return _read(target, prompts_B, keep_hidden, taps)
    found: list[tuple[int, Tensor]] = []
    for row, prompt in enumerate(prompts_B):
        if prompt:
            with target.only_row(row):  # type: ignore[attr-defined]
                hidden_1NC = _read(target, [prompt], keep_hidden, taps)
            if hidden_1NC is not None:
                found.append((row, hidden_1NC[0]))
    if not found:
        return None
    longest = max(len(prompt) for prompt in prompts_B)
    hidden_BNC = found[0][1].new_zeros(len(prompts_B), longest, found[0][1].shape[-1])
    for row, hidden_NC in found:
        hidden_BNC[row, : len(hidden_NC)] = hidden_NC
    return hidden_BNC


def reads_rows_alone(target: Target, prompts_B: Sequence[Sequence[int]]) -> bool:
    """Return whether reading the rows one after another takes less time than padding them.

    On a CPU the time of a forward grows with its tokens, padding included.
    """
    if not hasattr(target, "only_row") or devices.runs_ahead(target.device):
        return False
    alone = sum(max(len(prompt), LEAST_TOKENS) for prompt in prompts_B if prompt)
    return alone < len(prompts_B) * max(len(prompt) for prompt in prompts_B)


def _read(
    target: Target,
    prompts_B: Sequence[Sequence[int]],
    keep_hidden: bool,
    taps: tuple[int, ...],
) -> Tensor | None:
    """Read the tokens of all rows, padded to the longest."""
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

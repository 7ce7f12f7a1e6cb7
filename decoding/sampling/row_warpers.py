"""Sampling settings that differ between the rows of a batch.

They serve greedy and coupled decoding. Under the other rules a row's text depends on q, and so on
how its drafter warps, which may use one setting for all rows.

Shapes: B rows, N nodes, V vocabulary, K most likely tokens, ... any further dimensions.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decoding import devices
from decoding.sampling.warpers import Warper


class RowWarpers:
    """The warper of each row. A row at temperature 0 has probability 1 at its largest logit."""

    greedy = truncates = is_shared = False

    def __init__(self, warpers_B: Sequence[Warper]) -> None:
        self.warpers_B = tuple(warpers_B)
        # of drafters that take one temperature for all rows
        self.temperature = max(warper.temperature for warper in warpers_B)
        self._rows_of: dict[Warper, list[int]] = {}
        for row, warper in enumerate(warpers_B):
            self._rows_of.setdefault(warper, []).append(row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowWarpers) and self.warpers_B == other.warpers_B

    def __hash__(self) -> int:
        return hash(self.warpers_B)

    def probs(self, logits_BxV: Tensor) -> Tensor:
        """Return the warped probabilities (B, ..., V); see `Warper.probs`."""
        return self._by_row(logits_BxV, lambda warper, logits: warper.probs(logits), devices.argmax)

    def of_likeliest(self, logits_BxK: Tensor) -> Tensor:
        """Return what `Warper.of_likeliest` does for each row."""

        def first(logits: Tensor) -> Tensor:
            return torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)

        return self._by_row(logits_BxK, lambda warper, logits: warper.of_likeliest(logits), first)

    def _by_row(
        self,
        logits: Tensor,
        warp: Callable[[Warper, Tensor], Tensor],
        best: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the probabilities of each row: of `warp`, or at temperature 0 all at `best`."""
        if len(logits) != len(self.warpers_B):
            raise ValueError(f"found {len(logits)} rows of logits for {len(self.warpers_B)} rows")
        dtype = torch.promote_types(logits.dtype, torch.float32)
        found = torch.zeros(logits.shape, dtype=dtype, device=logits.device)
        for warper, rows in self._rows_of.items():
            places = devices.tensor(rows, logits.device)
            part = logits[places]
            if warper.greedy:
                found[places] = torch.zeros_like(part, dtype=dtype).scatter_(
                    -1, best(part)[..., None], 1.0
                )
            else:
                found[places] = warp(warper, part)
        return found


def join_warpers(warpers_B: Sequence[Warper]) -> Warper | RowWarpers:
    """Return the warper of all rows, or the warpers of rows that differ."""
    return warpers_B[0] if len(set(warpers_B)) == 1 else RowWarpers(warpers_B)

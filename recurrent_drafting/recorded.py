"""Picked beams as one recorded step: search, packing and all, for a fixed number of rows, steps and one temperature.

The eager twin is `search` with `Picks`. Shapes are fixed and nothing is asked of the host, so a CUDA graph can hold the whole draft; it is
recorded on first use and replayed from then on. On a CPU the same body runs unrecorded: so the tests compare it with its twin.

Shapes: B rows, L steps, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding import cuda
from decoding.drafter import Proposal
from recurrent_drafting.beams import Embed, Picks, search
from recurrent_drafting.drafts import fixed_proposal, last_beams
from recurrent_drafting.packed import Head
from recurrent_drafting.prefix_tree import Tree


@dataclass(slots=True)
class _Recording:
    """One shape: the buffers that it reads, and what is recorded."""

    tips_B: Tensor
    hidden_BH: Tensor
    depths_B: Tensor
    run: Callable[[], Tree | Tensor]


class RecordedPicks:
    """The recorded drafts of one head for one target. A recording holds addresses: another target needs others."""

    def __init__(self, head: Head, width: int, embed: Embed, device: torch.device) -> None:
        self.head, self.width, self.embed, self.device = head, width, embed, device
        self._recordings: dict[tuple[int, int, float], _Recording] = {}
        self._memory = cuda.pool(self.device)

    def __call__(
        self,
        tips: Sequence[int],
        hidden_BH: Tensor,
        depths_B: Sequence[int],
        temperature: float,
        room_B: list[int] | None,
    ) -> Proposal:
        """The proposal of each row's beams; it lives until the next call. room_B: see `PickedDraft`."""
        length = max(depths_B)
        key = (len(tips), length, temperature)
        found = self._recordings.get(key)
        if found is None:
            found = self._recordings[key] = self._record(*key, hidden_BH)
        cuda.fill(found.tips_B, list(tips))
        cuda.fill(found.depths_B, list(depths_B))
        found.hidden_BH.copy_(hidden_BH)
        drafted = found.run()
        if isinstance(drafted, Tensor):
            return Proposal(drafted, list(depths_B), steps=length)
        return fixed_proposal(drafted, room_B, length)

    def _record(self, rows: int, length: int, temperature: float, hidden_BH: Tensor) -> _Recording:
        with torch.inference_mode(False):
            tips_B = torch.zeros(rows, dtype=torch.long, device=self.device)
            depths_B = torch.full_like(tips_B, length)
            hidden_BH = torch.zeros_like(hidden_BH)
        choose = Picks(self.head, self.width, temperature)

        def body() -> Tree | Tensor:
            beams = search(self.head, self.embed, tips_B, hidden_BH, length, choose)
            return beams.tokens_BLW[:, :, 0] if self.width == 1 else last_beams(beams, depths_B)

        return _Recording(tips_B, hidden_BH, depths_B, cuda.capture(body, self.device, self._memory))

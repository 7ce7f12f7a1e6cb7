"""Top-k drafts, packing included, recorded for each number of rows and temperature.

The eager twin is `search` with `TopBeams`. Shapes are fixed and nothing waits for the device, so a
CUDA graph holds the complete draft. It is recorded at its first use and then replayed. Only the
longest length so far is recorded: rows with a smaller budget read the beams of the step at which it
ends, so smaller budgets at the end of a text need no recording. On a CPU the same body runs
unrecorded, so that tests can compare it with its twin.

Shapes: B rows, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import Proposal
from recurrent_drafting.beams import Embed, TopBeams, search
from recurrent_drafting.drafts import fixed_proposal, pack_last_beams
from recurrent_drafting.head import Head
from recurrent_drafting.prefix_tree import Tree


@dataclass(slots=True)
class _Recording:
    """The input buffers and the recorded draft of one shape."""

    length: int
    tips_B: Tensor
    hidden_BH: Tensor
    depths_B: Tensor
    run: Callable[[], Tree | Tensor]


class RecordedBeams:
    """The recorded drafts of one head for one target, whose weights they refer to by address."""

    def __init__(self, head: Head, width: int, embed: Embed, device: torch.device) -> None:
        self.head, self.width, self.embed, self.device = head, width, embed, device
        self._recordings: dict[tuple[int, float], _Recording] = {}  # by rows and temperature
        self._longest = 0
        self._memory = devices.pool(self.device)

    def __call__(
        self,
        tips: Sequence[int],
        hidden_BH: Tensor,
        depths_B: Sequence[int],
        temperature: float,
        rooms_B: list[int] | None,
    ) -> Proposal:
        """Return the rows' proposal, which is valid until the next call.

        tips, hidden_BH: each row's last token, and the target's hidden state before it. depths_B:
        draft length of each row. rooms_B: see `recurrent_drafting.drafts.list_rooms`.
        """
        self._longest = max(self._longest, *depths_B)
        found = self._recordings.get((len(tips), temperature))
        if found is None or found.length < max(depths_B):
            found = self._record(len(tips), self._longest, temperature, hidden_BH)
            self._recordings[len(tips), temperature] = found
        devices.fill(found.tips_B, list(tips))
        devices.fill(found.depths_B, list(depths_B))
        found.hidden_BH.copy_(hidden_BH)
        drafted = found.run()
        if isinstance(drafted, Tensor):
            proposal = Proposal(drafted[:, : max(depths_B)], list(depths_B))
        else:
            proposal = fixed_proposal(drafted, rooms_B)
        proposal.steps, proposal.frontiers = found.length, 1 + (found.length - 1) * self.width
        return proposal

    def _record(self, rows: int, length: int, temperature: float, hidden_BH: Tensor) -> _Recording:
        with torch.inference_mode(False):
            tips_B = torch.zeros(rows, dtype=torch.long, device=self.device)
            depths_B = torch.full_like(tips_B, length)
            hidden_BH = torch.zeros_like(hidden_BH)
        choose = TopBeams(self.head, self.width, temperature)

        def body() -> Tree | Tensor:
            beams = search(self.head, self.embed, tips_B, hidden_BH, length, choose)
            return (
                beams.tokens_BLW[:, :, 0] if self.width == 1 else pack_last_beams(beams, depths_B)
            )

        return _Recording(
            length, tips_B, hidden_BH, depths_B, devices.capture(body, self.device, self._memory)
        )

"""The SDSAT drafter: one forward of the target over the tip and slots drafts a chain.

It is the published loop of two forwards a round: this one drafts, and the next verifies. The tip's
row predicts the first token with the target's own distribution, so that token is always accepted.
Every later token depends on the text alone, not on the tokens drafted before it, so its q is known
before any token is sampled, and tests of p / q are exact.

Shapes: B rows, N drafted tokens, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.parallel import choose_at_each_depth
from decoding.drafters.target_view import TargetViewDrafter
from decoding.errors import UserError
from decoding.interfaces import (
    Capabilities,
    Chooser,
    Policies,
    Proposal,
    RoundCosts,
    Target,
    Tokens,
)
from decoding.models.native.model import NativeTarget
from heads.sdsat.checkpoint import load_head
from heads.sdsat.model import SdsatHead, sizes_of
from heads.sdsat.view import SlotView
from training.heads.drafter import choose_name, load_to_draft


class SdsatDrafter(TargetViewDrafter):
    """Drafter of a chain from trained slots in a folder or in memory.

    The target drafts, in its own dtype and on its device. A draft has at most one token more than
    there are slots. Raises UserError for an invalid folder.
    """

    capabilities = Capabilities(shape="chain", has_q=True, steps="round", stops_by_token=False)

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        head: SdsatHead | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(choose_name(name, folder, "sdsat"))
        self.head = load_to_draft(folder, head, load_head)
        self.config = self.head.config
        self.num_layers = self.config.target_layers
        self.num_parameters = self.head.num_parameters

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Set the target.

        Raises UserError for a backend other than native, and for a target of other sizes than the
        one of the slots, with all differences.
        """
        super().prepare(target, costs)
        assert isinstance(target, NativeTarget)
        found = [
            f"{key} is {getattr(self.config, key)} for the slots and {size} in the target"
            for key, size in sizes_of(target.config).items()
            if getattr(self.config, key) != size
        ]
        if found:
            raise UserError(
                f"drafter '{self.name}' was trained for another target than '{target.name}': "
                f"{'; '.join(found)}. Use slots that were trained for this target."
            )

    def view_of(self, target: NativeTarget) -> NativeTarget:
        """Return the target with the slots in its vocabulary."""
        return SlotView(target, self.head)

    def width(self, gamma: int) -> int:
        """Return the length of the chain: gamma, at most one more than there are slots."""
        return min(gamma, self.config.num_drafts)

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft a chain for each row in one forward of the target."""
        self._follow()
        fitting_B = self._within_context(sequences_B, budgets_B)
        counts_B = [min(count, self.config.num_drafts) for count in fitting_B]
        if max(counts_B) == 0:
            return Proposal(torch.empty(len(counts_B), 0, dtype=torch.long), counts_B)
        tips_B = [sequence[-1] for sequence in sequences_B]
        logits_BNV, _ = self.model.forward(self._read_slots(tips_B, max(counts_B)))
        fitted_BNV = self._fit(logits_BNV, chooser)
        tokens_BN, q_BNV = choose_at_each_depth(fitted_BNV, sequences_B, chooser)
        return Proposal(tokens_BN, counts_B, None, q_BNV, 1)

    def _read_slots(self, tips_B: Sequence[int], count: int) -> Tensor:
        """Return the ids (B, N) that are read to draft `count` = N tokens: tips, then slots."""
        device = self.model.device
        tips_B1 = devices.tensor(list(tips_B), device)[:, None]
        slots_N = self.config.vocab_size + torch.arange(count - 1, device=device)
        return torch.cat((tips_B1, slots_N.expand(len(tips_B1), -1)), 1)

    def time_step(self, frontier: int = 1) -> None:
        """Run the forward of the longest draft, without committing it."""
        rows = len(self.model.lengths_B)
        self.model.forward(self._read_slots([0] * rows, self.config.num_drafts))

"""The SDSAT drafter: the target reads slots after the text, and they predict a chain.

The published loop has two forwards a round: one over the tip and the slots drafts, and the next one
verifies. The tip's row predicts the first token with the target's own distribution, so that token
is always accepted.

With `one_forward`, slots ride along in the verifying forward instead, after the tip and after every
drafted token. Those of the last accepted token predict the next draft. The target chooses the token
right after it in the same round, so slot j predicts the token j places after that one.

In both forms a drafted token depends on the text alone, not on the tokens drafted before it, so its
q is known before any token is sampled, and tests of p / q are exact.

Shapes: B rows, N drafted tokens, P = N + 1 nodes with the tip, S slots after a node, M = P S
riders, V vocabulary.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from decoding.costs.roofline import ForwardBudget, forward_budget
from decoding.drafters.parallel import choose_at_each_depth
from decoding.drafters.target_view import TargetViewDrafter
from decoding.errors import UserError
from decoding.interfaces import (
    EXACT,
    Capabilities,
    Chooser,
    Observation,
    Policies,
    Proposal,
    Riders,
    RoundCosts,
    Target,
    Tokens,
)
from decoding.models.load import DTYPES
from decoding.models.native.model import NativeTarget
from decoding.values import is_int
from decoding.verification.nodes import at_nodes
from heads.sdsat.checkpoint import load_head
from heads.sdsat.model import SdsatHead, sizes_of
from heads.sdsat.view import SlotView
from training.heads import budget
from training.heads.drafter import choose_name, load_to_draft


class SdsatDrafter(TargetViewDrafter):
    """Drafter of a chain from trained slots in a folder or in memory.

    The target drafts, in its own dtype and on its device. one_forward: read the slots in the
    verifying forward; a draft then has at most as many tokens as there are slots, else one more.
    slots: use only the first ones. Raises UserError for an invalid folder or number of slots.
    """

    capabilities = Capabilities(shape="chain", has_q=True, steps="round", stops_by_token=False)
    # of `one_forward`: the length of each row's next draft and its logits, if they are known, and
    # the length of the draft after it, whose slots ride along in this round
    _known_B: list[int]
    _logits_BSV: Tensor | None
    _asked_B: list[int]

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        head: SdsatHead | None = None,
        one_forward: bool = False,
        slots: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(choose_name(name, folder, "sdsat"))
        self.head = load_to_draft(folder, head, load_head)
        self.config, self.one_forward = self.head.config, one_forward
        most = self.config.num_slots
        if slots is not None and not (is_int(slots) and 1 <= slots <= most):
            raise UserError(
                f"drafter '{self.name}': slots is {slots!r}, expected 1 to {most}, the number of "
                f"trained slots. Correct or omit it."
            )
        self.slots = slots or most
        self._forget()
        self.num_layers = self.config.target_layers
        self.num_parameters = self.head.num_parameters

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Set the target.

        Raises UserError for a backend other than native, for a target of other sizes than the one
        of the slots, with all differences, and where text would depend on the drafts.
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
        eager = self.one_forward and self.config.rank  # a change that the fused step lacks
        if eager and target.execution == "fused" and target.dtype not in EXACT:
            raise UserError(
                f"drafter '{self.name}' has one_forward=true and a low-rank change, with which a "
                f"target that runs fused verifies layer by layer; in {target.dtype} its text would "
                f"differ from the text without a drafter. Use one_forward=false, or a target in "
                f"float32."
            )

    def view_of(self, target: NativeTarget) -> NativeTarget:
        """Return the target with the slots in its vocabulary."""
        return SlotView(target, self.head)

    def width(self, gamma: int) -> int:
        """Return the length of the chain, or with `one_forward` of a chain of gamma and riders."""
        if not self.one_forward:
            return min(gamma, self.slots + 1)
        drafted = min(gamma, self.slots)
        return gamma + (drafted + 1) * drafted

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Share the cache of the target; no draft is known yet."""
        super().open(prompts_B, prefill_hidden_BNC, capacity)
        self._forget()

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Follow the target; no draft of the new rows is known yet."""
        super().join(prompts_B, prefill_hidden_BNC)
        if self._logits_BSV is not None:
            self._known_B = [*self._known_B, *[0] * len(prompts_B)]
            self._logits_BSV = F.pad(self._logits_BSV, (0, 0, 0, 0, 0, len(prompts_B)))

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Follow the target, which has read the new tokens; no draft is known yet."""
        super().resume(prompt, kept, hidden_NC)
        self._forget()

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft a chain for each row, in one forward of the target or from the last one's slots."""
        self._follow()
        fitting_B = self._within_context(sequences_B, budgets_B)
        if self.one_forward:
            return self._propose_known(sequences_B, fitting_B, chooser)
        counts_B = [min(count, self.slots + 1) for count in fitting_B]
        if max(counts_B) == 0:
            return Proposal(torch.empty(len(counts_B), 0, dtype=torch.long), counts_B)
        tips_B = [sequence[-1] for sequence in sequences_B]
        logits_BNV, _ = self.model.forward(self._read_slots(tips_B, max(counts_B)))
        fitted_BNV = self._fit(logits_BNV, chooser)
        tokens_BN, q_BNV = choose_at_each_depth(fitted_BNV, sequences_B, chooser)
        return Proposal(tokens_BN, counts_B, None, q_BNV, 1)

    def _propose_known(
        self, sequences_B: Tokens, fitting_B: Sequence[int], chooser: Chooser
    ) -> Proposal:
        """Draft from the slots of the last round, and let slots ride along for the next one.

        A row's next draft is at most as long as its budget in this round. So it does not depend on
        the other rows, for which more slots may ride along.
        """
        known_B, logits_BSV = self._known_B, self._logits_BSV
        self._forget()
        self._asked_B = [min(count, self.slots) for count in fitting_B]
        B, slots = len(sequences_B), max(self._asked_B)
        counts_B = [0] * B
        if known_B:
            counts_B = [min(pair) for pair in zip(known_B, self._asked_B, strict=True)]
        N, q_BNV = max(counts_B), None
        tokens_BN = torch.empty(B, 0, dtype=torch.long, device=chooser.device)
        if N:
            assert logits_BSV is not None
            fitted_BNV = self._fit(logits_BSV[:, :N], chooser)
            tokens_BN, q_BNV = choose_at_each_depth(fitted_BNV, sequences_B, chooser)
        riders = self._riders(B, N + 1, slots) if slots else None
        return Proposal(tokens_BN, counts_B, None, q_BNV, riders=riders)

    def _riders(self, rows: int, nodes: int, slots: int) -> Riders:
        """Return slots after each of the first nodes, of which the first is the tip."""
        device = self.model.device
        slots_S = self.config.vocab_size + torch.arange(slots, device=device)
        parents_PS = torch.arange(-1, nodes * slots - 1, device=device).view(nodes, slots)
        parents_PS[:, 0] = -1 - torch.arange(nodes, device=device)
        return Riders(
            slots_S.repeat(nodes).expand(rows, -1),
            parents_PS.flatten().expand(rows, -1),
            self.model,
        )

    def observe(self, observation: Observation) -> None:
        """Keep the logits of the slots after each row's last accepted token, if slots rode along.

        Rows for which another drafter proposed had no budget, so their logits are never used.
        """
        riders_BMV = observation.riders_BMV
        if riders_BMV is None:
            return self._forget()
        riders_BPSV = riders_BMV.unflatten(1, (-1, max(self._asked_B)))
        last = riders_BPSV.shape[1] - 1
        nodes_B = [min(accepted, last) for accepted in observation.outcome.accepted_B]
        self._known_B, self._logits_BSV = self._asked_B, at_nodes(riders_BPSV, nodes_B)

    def select(self, rows: Sequence[int]) -> None:
        """Follow the target, which has selected its rows, and keep their known drafts."""
        super().select(rows)
        if self._logits_BSV is not None:
            self._known_B = [self._known_B[row] for row in rows]
            self._logits_BSV = self._logits_BSV[devices.tensor(list(rows), self.model.device)]

    def _forget(self) -> None:
        """Drop the known drafts."""
        self._known_B, self._asked_B, self._logits_BSV = [], [], None

    def _read_slots(self, tips_B: Sequence[int], count: int) -> Tensor:
        """Return the ids (B, N) that are read to draft `count` = N tokens: tips, then slots."""
        device = self.model.device
        tips_B1 = devices.tensor(list(tips_B), device)[:, None]
        slots_N = self.config.vocab_size + torch.arange(count - 1, device=device)
        return torch.cat((tips_B1, slots_N.expand(len(tips_B1), -1)), 1)

    def draft_budget(
        self, target: Target, steps: float, gamma: int, context: int, rows: float
    ) -> ForwardBudget:
        """Return the budget of a mean round's draft (see `BudgetedDrafter`): of its forward.

        With `one_forward` only the low-rank change adds to the verifying forward.
        """
        assert isinstance(target, NativeTarget)
        changes = self.head.layers.parameters()
        if self.one_forward:
            return budget.products(changes, (1 + self.width(gamma)) * rows)
        count, dtype = self.width(gamma), DTYPES[target.dtype]
        forward = forward_budget(target.config, dtype, count, context, rows)
        return (forward + budget.products(changes, count * rows)).times(steps)

    def time_step(self, frontier: int = 1) -> None:
        """Run the forward of the longest draft, without committing it.

        With `one_forward` a draft takes no forward, and only the riders are made.
        """
        rows = len(self.model.lengths_B)
        if self.one_forward:
            self._riders(rows, self.slots + 1, self.slots)
        else:
            self.model.forward(self._read_slots([0] * rows, self.slots + 1))

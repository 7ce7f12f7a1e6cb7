"""The early-exit drafter: the target's first layers, one trained layer, and the target's lm_head.

It drafts a chain. Its first layers read the target's keys and values, and the trained layer has its
own, made from the target's states after the first layers: those of the prompt, and in every round
those of the tip and of the accepted tokens. No token is read twice by the trained layer.

Shapes: B rows, N tokens, C hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from decoding.costs.roofline import ForwardBudget, forward_budget
from decoding.drafters.target_view import TargetViewDrafter
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Observation, RoundCosts, Target, Tokens
from decoding.models.load import DTYPES
from decoding.models.native.early_exit import EarlyExit
from decoding.models.native.model import NativeTarget
from heads.early_exit.checkpoint import differences, load_head
from heads.early_exit.model import EarlyExitHead
from training.heads.drafter import choose_name, load_to_draft


class EarlyExitDrafter(TargetViewDrafter):
    """Drafter of a chain from an early-exit head in a folder or in memory.

    The head drafts in the target's dtype and on its device, as both share one cache. Raises
    UserError for an invalid folder.
    """

    _view: EarlyExit | None

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        head: EarlyExitHead | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(choose_name(name, folder, "early_exit"))
        self.head = load_to_draft(folder, head, load_head)
        self.config = self.head.config
        self.num_layers = self.config.exit_layer + 1
        self.num_parameters = self.head.num_parameters
        self.capabilities = Capabilities(
            has_q=True, needs_hidden=True, taps=(self.config.exit_layer,)
        )

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Set the target.

        Raises UserError for a backend other than native, and for a target that differs from the one
        of the head, with all differences.
        """
        super().prepare(target, costs)
        assert isinstance(target, NativeTarget)
        if found := differences(self.config, target.config):
            raise UserError(
                f"drafter '{self.name}' was trained for another target than '{target.name}': "
                f"{'; '.join(found)}. Use a head that was trained for this target."
            )
        target.reserve_layer()  # now, as a cache that is open already would be copied

    def view_of(self, target: NativeTarget) -> NativeTarget:
        """Return the target's first layers with the trained layer after them."""
        layer, norm_C = self.head.draft_layer(target.weights)
        ids = self.head.token_ids_V
        ids = None if ids is None else ids.to(target.device)
        return EarlyExit(target, self.config.exit_layer, layer, norm_C, ids)

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Share the target's cache, and let the trained layer read all prompt tokens but the last.

        prefill_hidden_BNC: the target's states after the first layers.
        """
        super().open(prompts_B, prefill_hidden_BNC, capacity)
        if prefill_hidden_BNC is not None:
            self._append(prefill_hidden_BNC, [len(prompt) - 1 for prompt in prompts_B])

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Let the trained layer read the new prompts' tokens but the last."""
        super().join(prompts_B, prefill_hidden_BNC)
        if prefill_hidden_BNC is not None and self._view is not None:
            running = len(self._view.lengths_B) - len(prompts_B)
            self._append(
                F.pad(prefill_hidden_BNC, (0, 0, 0, 0, running, 0)),
                [*[0] * running, *(len(prompt) - 1 for prompt in prompts_B)],
            )

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Let the trained layer read the tokens that the target has just read."""
        super().resume(prompt, kept, hidden_NC)
        if hidden_NC is not None:
            self._append(hidden_NC[None], [len(hidden_NC)])

    def observe(self, observation: Observation) -> None:
        """Let the trained layer read the tip and the accepted tokens from the target's states."""
        counts_B = [accepted + 1 for accepted in observation.outcome.accepted_B]
        self._follow()
        self._append(observation.hidden_BNC[:, : max(counts_B)], counts_B)

    def draft_budget(
        self, target: Target, steps: float, gamma: int, context: int, rows: float
    ) -> ForwardBudget:
        """Return the budget of a mean round's draft (see `BudgetedDrafter`).

        A step reads the target's first layers, which the head shares, once, and its own layer.
        """
        shape = replace(self.config, num_layers=self.num_layers)
        dtype = DTYPES[target.dtype]
        return forward_budget(shape, dtype, 1, context, rows).times(steps)

    def _append(self, states_BNC: Tensor, counts_B: Sequence[int]) -> None:
        """Read the states of the last counts_B[b] tokens that the target has committed."""
        view = self._view
        assert view is not None, "open() comes first"
        view.truncate([length - count for length, count in zip(view.lengths_B, counts_B)])
        view.append(states_BNC, counts_B)

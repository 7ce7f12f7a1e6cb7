"""Base of chain drafters that run layers of the target on the target's own keys and values.

Such a drafter has a view of the target. It reads the committed keys and values of the layers that
it runs, and appends new ones, which the target's next forward overwrites.

Shapes: B rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.interfaces import Chooser, Policies, Proposal, RoundCosts, Target, Tokens
from decoding.models.native.model import NativeTarget


class TargetViewDrafter(ChainDrafter, ABC):
    """A chain drafter whose model is a view of the target, which `view_of` makes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_layers = self.num_parameters = 0
        self._target: NativeTarget | None = None
        # kept from batch to batch, with its recorded graphs
        self._view: NativeTarget | None = None

    @abstractmethod
    def view_of(self, target: NativeTarget) -> NativeTarget:
        """Return the view of an open target with which this drafter drafts."""

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Set the target. Raises UserError for a backend other than native."""
        if not isinstance(target, NativeTarget):
            raise UserError(
                f"drafter '{self.name}' runs some of the target's layers, which the "
                f"{target.backend} backend does not support. Use target.backend=native and "
                f"target.parallel=none."
            )
        if target is not self._target:
            self._target, self._view = target, None

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Share the cache of the target, which has read the prompts."""
        assert self._target is not None, "prepare() comes before open()"
        self._capacity = capacity
        if self._view is None:
            self._view = self.view_of(self._target)
        self.model = self._view
        self._follow()

    def _follow(self) -> None:
        """Take over the target's current lengths and cache."""
        assert self._target is not None and self._view is not None, "open() comes first"
        self._view.follow(self._target)

    def join(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None) -> None:
        """Follow the target, which has read the new prompts."""
        self._follow()

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Follow the target, which has read the new tokens."""
        self._follow()

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft a chain for each row after the target's committed tokens."""
        self._follow()
        return super().propose(sequences_B, budgets_B, stopping_B, chooser)

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Follow the target, which overwrites the drafted keys and values."""
        self._follow()

    def select(self, rows: Sequence[int]) -> None:
        """Follow the target, which has selected its rows."""
        self._follow()

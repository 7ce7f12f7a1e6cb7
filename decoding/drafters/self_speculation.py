"""Self-speculation: the target drafts with some of its attention and MLP sub-layers skipped.

Source: Zhang et al. 2024, "Draft & Verify" (arXiv 2309.08168). It needs no second model, training
or memory: the draft reads the target's committed keys and values of the remaining layers, and
appends new ones, which the target's next forward overwrites. `python -m distill.skip_search`
searches for the sub-layers to skip and writes them to skips.json.

Shapes: B rows.
"""

import json
from collections.abc import Sequence
from os.path import normpath
from pathlib import Path

from torch import Tensor

from decoding.drafters.chain import ChainDrafter
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
from decoding.models.native.model import NativeTarget, Skips

FILE = "skips.json"


class SelfSpeculation(ChainDrafter):
    """A drafter that runs the target without some of its sub-layers.

    Hydra: `_target_: decoding.drafters.self_speculation.SelfSpeculation`. skips: a skips.json or
    its folder. Without it, attention and mlp are the numbers of the layers (from 0) whose attention
    or MLP is skipped. Raises UserError for an invalid skips.json.
    """

    capabilities = Capabilities(shape="chain", has_q=True)

    def __init__(
        self,
        skips: str | Path | None = None,
        *,
        attention: Sequence[int] = (),
        mlp: Sequence[int] = (),
        name: str = "self_speculation",
    ) -> None:
        self.skips = Skips(tuple(attention), tuple(mlp)) if skips is None else read_skips(skips)
        self.name = name
        self.num_layers = self.num_parameters = 0
        self._target: NativeTarget | None = None
        # kept from batch to batch, with its recorded graphs
        self._view: NativeTarget | None = None

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Set the target.

        Raises UserError for a backend other than native, for layers that the target lacks, and for
        an empty set of sub-layers.
        """
        if not isinstance(target, NativeTarget):
            raise UserError(
                f"drafter '{self.name}' runs some of the target's layers, which the "
                f"{target.backend} backend does not support. Use target.backend=native and "
                f"target.parallel=none."
            )
        last = max([-1, *self.skips.attention, *self.skips.mlp])
        if last >= target.num_layers:
            raise UserError(
                f"drafter '{self.name}' skips layer {last}, but '{target.name}' has layers 0 to "
                f"{target.num_layers - 1}. Use skips that were searched for this target."
            )
        if len(self.skips) == 0:
            raise UserError(
                f"drafter '{self.name}' skips nothing, expected at least one sub-layer. Set "
                f"attention or mlp layers, or search for them with distill.skip_search."
            )
        if target is not self._target:
            self._target, self._view = target, None
        self.num_layers = target.num_layers - len(self.skips) // 2

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Share the cache of the target, which has read the prompts."""
        assert self._target is not None, "prepare() comes before open()"
        self._capacity = capacity
        if self._view is None:
            self._view = self._target.partial(self.skips)
        self.model = self._view
        self._follow()

    def _follow(self) -> None:
        """Take over the target's current lengths and cache."""
        assert self._target is not None and self._view is not None, "open() comes first"
        self._view.follow(self._target)

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


def read_skips(path: str | Path) -> Skips:
    """Return the sub-layers in a skips.json; raise UserError for an invalid file."""
    # resolve "..", since the path may lead through a folder that does not exist yet
    place = Path(normpath(path))
    file = place / FILE if place.is_dir() else place
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Skips(tuple(int(i) for i in found["attention"]), tuple(int(i) for i in found["mlp"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{file} is not a skip set ({error}), expected {{"attention": [layers], "mlp": '
            f"[layers]}}. Write it with distill.skip_search."
        ) from error


def write_skips(path: Path, skips: Skips, about: dict[str, object]) -> None:
    """Write a skip set as JSON, with the additional fields `about`."""
    path.write_text(
        json.dumps({"attention": list(skips.attention), "mlp": list(skips.mlp), **about}, indent=1),
        encoding="utf-8",
    )

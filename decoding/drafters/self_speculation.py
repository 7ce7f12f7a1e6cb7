"""The target drafts for itself with some of its attention and MLP sub-layers skipped, on its own
cache.

Source: Zhang et al. 2024, "Draft & Verify" (arXiv 2309.08168). No second model, no training, no
memory: the draft reads the keys and values that the target committed in the layers it keeps, and
writes its own behind them, where the target's next forward puts the right ones. Which sub-layers to
skip is an artefact: `python -m distill.skip_search` finds a set for a target and writes it to
skips.json.

Shapes: B rows.
"""

import json
from collections.abc import Sequence
from os.path import normpath
from pathlib import Path

from torch import Tensor

from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Proposal, RoundCosts, Stopping, Target
from decoding.models.native.model import NativeTarget, Skips

FILE = "skips.json"


class SelfSpeculation(ChainDrafter):
    """The target with skipped sub-layers. Hydra:
    `_target_: decoding.drafters.self_speculation.SelfSpeculation`.

    skips: a skips.json, or the folder it lies in; or give `attention` and `mlp`, the layers (from
    0) whose sub-layer is skipped.
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
        # kept from batch to batch, with what it has recorded
        self._view: NativeTarget | None = None

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Take the target. Raises UserError for another backend than native, and for layers that it
        does not have.
        """
        if not isinstance(target, NativeTarget):
            raise UserError(
                f"drafter '{self.name}' runs the target's own layers, which the {target.backend} "
                f"backend does not offer: take target.backend=native and target.parallel=none."
            )
        last = max([-1, *self.skips.attention, *self.skips.mlp])
        if last >= target.num_layers:
            raise UserError(
                f"drafter '{self.name}' skips layer {last}, but '{target.name}' has layers 0 to "
                f"{target.num_layers - 1}: take the skips that were searched for this target."
            )
        if len(self.skips) == 0:
            raise UserError(
                f"drafter '{self.name}' skips nothing: name sub-layers, or search for them with "
                f"distill.skip_search."
            )
        if target is not self._target:
            self._target, self._view = target, None
        self.num_layers = target.num_layers - len(self.skips) // 2

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int
    ) -> None:
        """The target has read the prompts already."""
        assert self._target is not None, "prepare() comes before open()"
        self._capacity = capacity
        if self._view is None:
            self._view = self._target.partial(self.skips)
        self.model = self._view
        self._follow()

    def _follow(self) -> None:
        """Stand where the target stands."""
        assert self._target is not None and self._view is not None, "open() comes first"
        self._view.follow(self._target)

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """The target has read what is new."""
        self._follow()

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: Chooser,
    ) -> Proposal:
        """Draft a chain for each row from the target's committed tokens on."""
        self._follow()
        return super().propose(sequences_B, budgets_B, stopping_B, chooser)

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """The drafted keys and values are overwritten by the target's."""
        self._follow()

    def select(self, rows: Sequence[int]) -> None:
        """The target has moved its rows already."""
        self._follow()


def read_skips(path: str | Path) -> Skips:
    """The sub-layers named in a skips.json. Raises UserError for a file that is none."""
    # a stage names its neighbour's folder by way of its own, which may not be there yet
    place = Path(normpath(path))
    file = place / FILE if place.is_dir() else place
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Skips(tuple(int(i) for i in found["attention"]), tuple(int(i) for i in found["mlp"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{file} holds no skip set ({error}); expected {{"attention": [layers], "mlp": '
            f"[layers]}} as distill.skip_search writes it."
        ) from error


def write_skips(path: Path, skips: Skips, about: dict[str, object]) -> None:
    """Write a skip set with what is known of it."""
    path.write_text(
        json.dumps({"attention": list(skips.attention), "mlp": list(skips.mlp), **about}, indent=1),
        encoding="utf-8",
    )

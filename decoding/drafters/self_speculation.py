"""Self-speculation: the target drafts with some of its attention and MLP sub-layers skipped.

Source: Zhang et al. 2024, "Draft & Verify" (arXiv 2309.08168). It needs no second model, training
or memory. `python -m distill.skip_search` searches for the sub-layers to skip and writes them to
skips.json.
"""

import json
from collections.abc import Sequence
from os.path import normpath
from pathlib import Path

from decoding.drafters.target_view import TargetViewDrafter
from decoding.errors import UserError
from decoding.interfaces import Capabilities, RoundCosts, Target
from decoding.models.native.model import NativeTarget
from decoding.models.native.skips import Skips

FILE = "skips.json"


class SelfSpeculation(TargetViewDrafter):
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
        super().__init__(name)
        self.skips = Skips(tuple(attention), tuple(mlp)) if skips is None else read_skips(skips)

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Set the target.

        Raises UserError for a backend other than native, for layers that the target lacks, and for
        an empty set of sub-layers.
        """
        super().prepare(target, costs)
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
        self.num_layers = target.num_layers - len(self.skips) // 2

    def view_of(self, target: NativeTarget) -> NativeTarget:
        """Return the target without the skipped sub-layers."""
        return target.partial(self.skips)


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

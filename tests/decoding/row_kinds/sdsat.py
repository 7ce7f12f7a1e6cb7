"""Rows of SDSAT's slots: random ones, and ones that know the text."""

from typing import Any

import torch

from decoding.interfaces import Target
from decoding.models.native.model import NativeTarget
from heads.sdsat.drafter import SdsatDrafter
from heads.sdsat.model import SdsatConfig, SdsatHead, sizes_of
from tests.decoding.row_kinds.kit import DrafterRow
from tests.support.oracle_drafters import Foresight
from tests.support.tiny_targets import five_words

SLOTS = 7  # the longest draft of the laws has 6 tokens


def random_slots(target: Target, **fields: Any) -> SdsatHead:
    """Return float64 slots with random weights for a native target.

    fields: further fields of `SdsatConfig`.
    """
    assert isinstance(target, NativeTarget)
    head = SdsatHead(SdsatConfig(**sizes_of(target.config), num_slots=SLOTS, **fields))
    head = head.double().requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(8)
    for parameter in head.parameters():
        parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
    return head


class Knowing(SdsatDrafter):
    """Drafter whose slots predict as if they were the likeliest tokens of a model.

    The model is the target, or one whose next token depends on the last one alone.
    """

    def __init__(self, model: Target) -> None:
        super().__init__(head=random_slots(model))
        self.knows = model

    def view_of(self, target: NativeTarget) -> Any:
        assert isinstance(self.knows, NativeTarget)
        view = NativeTarget(
            self.knows.weights, "foresight", target.max_length, execution=target.execution
        )
        view.follow(target)
        return Foresight(view)


@torch.inference_mode()
def slots_of(target: Target, draft_model: Target, **fields: Any) -> SdsatDrafter:
    """Return a drafter with slots: on a bigram target `Knowing`, on others random."""
    if target.name == "last word":
        return Knowing(draft_model)
    return SdsatDrafter(head=random_slots(target, **fields))


ROWS = [
    DrafterRow(
        "sdsat",
        make=lambda kit: slots_of(kit.target, kit.draft_model),
        rules=("greedy", "token", "block", "coupled"),
        perfect=lambda kit: Knowing(kit.twin),
        # sampled tokens are not those that its deeper distributions assume
        perfect_rules=("greedy",),
        table=lambda: SdsatDrafter(head=random_slots(five_words())),
    ),
    DrafterRow(
        "sdsat_low_rank",
        make=lambda kit: slots_of(kit.target, kit.draft_model, rank=3),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: SdsatDrafter(head=random_slots(five_words(), rank=3)),
        slow=True,
    ),
]

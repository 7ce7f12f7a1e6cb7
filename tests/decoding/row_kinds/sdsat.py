"""Rows of SDSAT's slots: random ones, and ones that know the text."""

from typing import Any

import torch
from torch import Tensor

from decoding.interfaces import Target
from decoding.models.native.model import NativeTarget
from decoding.models.native.skips import Skips
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

    The model is the target, or one whose next token depends on the last one alone. With `wrong`, a
    draft of `one_forward` is the least likely tokens after these instead.
    """

    def __init__(self, model: Target, wrong: bool = False, **options: Any) -> None:
        super().__init__(head=random_slots(model), **options)
        self.knows, self.sign = model, -1 if wrong else 1

    def view_of(self, target: NativeTarget) -> Any:
        assert isinstance(self.knows, NativeTarget)
        view = NativeTarget(
            self.knows.weights, "foresight", target.max_length, execution=target.execution
        )
        view.follow(target)
        foresight = Foresight(view)
        if not self.one_forward:
            return foresight
        return KnowingReader(target.partial(Skips()), foresight, self.sign)


class KnowingReader:
    """A reader with the target's logits at text, and `sign` times a `Foresight`'s at slots.

    The other methods are those of a view of the target.
    """

    def __init__(self, view: NativeTarget, foresight: Any, sign: int) -> None:
        self._view, self._foresight, self._sign = view, foresight, sign

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def follow(self, target: NativeTarget) -> None:
        self._view.follow(target)
        self._foresight.follow(target)

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        guessed_BNV, _ = self._foresight.forward(tokens_BN, parents_BN)
        is_slot_BN = tokens_BN >= self._view.vocab_size
        # the target comes last, as it overwrites the keys and values of the other model
        text_BN = tokens_BN.masked_fill(is_slot_BN, 0)
        logits_BNV, hidden_BNC = self._view.forward(text_BN, parents_BN, taps)
        slots_BN1 = is_slot_BN[:, :, None]
        return torch.where(slots_BN1, self._sign * guessed_BNV, logits_BNV), hidden_BNC


@torch.inference_mode()
def slots_of(
    target: Target, draft_model: Target, one_forward: bool = False, **fields: Any
) -> SdsatDrafter:
    """Return a drafter with slots: on a bigram target `Knowing`, on others random."""
    if target.name == "last word":
        return Knowing(draft_model, one_forward=one_forward)
    return SdsatDrafter(head=random_slots(target, **fields), one_forward=one_forward)


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
    DrafterRow(
        "sdsat_one_forward",
        make=lambda kit: slots_of(kit.target, kit.draft_model, one_forward=True),
        rules=("greedy", "token", "block", "coupled"),
        perfect=lambda kit: Knowing(kit.twin, one_forward=True),
        perfect_rules=("greedy",),
        adversarial=lambda kit: Knowing(kit.twin, wrong=True, one_forward=True),
        table=lambda: SdsatDrafter(head=random_slots(five_words()), one_forward=True),
        late=1,
    ),
    DrafterRow(
        "sdsat_one_forward_low_rank",
        make=lambda kit: slots_of(kit.target, kit.draft_model, one_forward=True, rank=3),
        rules=("greedy", "token", "block", "coupled"),
        adversarial=lambda kit: Knowing(kit.twin, wrong=True, one_forward=True),
        table=lambda: SdsatDrafter(head=random_slots(five_words(), rank=3), one_forward=True),
        late=1,
        slow=True,
    ),
]

"""Rows of recurrent heads, and random ones."""

from copy import deepcopy

import torch

from decoding.interfaces import Target
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import HeadConfig, RecurrentHead
from tests.decoding.row_kinds.kit import DrafterRow, Kit, draft_table


def random_head(target: Target, scale: float = 1.0, seed: int = 3, **fields: int) -> RecurrentHead:
    """Return a float64 recurrent head with random weights, in the target's sizes.

    scale: factor of the output layer's weights; a larger one makes the distribution less even.
    fields: further sizes of `HeadConfig`.
    """
    sizes = {"exit_dim": 2 * target.hidden_size, "num_draft_layers": 1} | fields
    config = HeadConfig(target.vocab_size, target.hidden_size, **sizes)
    generator = torch.Generator().manual_seed(seed)
    head = RecurrentHead(config).double().requires_grad_(False)
    for parameter in head.parameters():
        parameter.normal_(generator=generator).div_(parameter.shape[-1] ** 0.5)
    head.output.mul_(scale)
    return head.eval().to(target.device)


class AllBeams(RecurrentDrafter):
    """Recurrent drafter that always searches `beam_width` beams.

    Under `by_cost` the costs of the tests would otherwise reduce the search to a single beam.
    """

    def choose_width(self) -> int:
        return self.beam_width


def recurrent(
    target: Target,
    beam_width: int = 4,
    scale: float = 3.0,
    fields: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> RecurrentDrafter:
    """Return a recurrent drafter with a random head, with top-k children by default.

    scale, fields: arguments of `random_head`. dtype: dtype of the head. options: further options of
    the drafter.
    """
    head = random_head(target, scale, **(fields or {})).to(dtype)
    return AllBeams(head=head, beam_width=beam_width, **{"children": "top_k", **options})  # type: ignore[arg-type]


def recurrent_of(
    kit: Kit, beam_width: int, dtype: torch.dtype | None = None, **options: object
) -> RecurrentDrafter:
    """Return a recurrent drafter with the kit's head or a random one, in `dtype` if given."""
    head = kit.head or random_head(kit.target, 3.0)
    if dtype is not None:
        head = deepcopy(head).to(dtype)
    return AllBeams(head=head, beam_width=beam_width, **{"children": "top_k", **options})  # type: ignore[arg-type]


ROWS = [
    DrafterRow(
        "recurrent",
        make=lambda kit: recurrent_of(kit, 8),
        rules=("greedy", "token", "coupled"),
        table=lambda: recurrent(draft_table(), 3, 0.8),
    ),
    DrafterRow(
        "recurrent_chain",
        make=lambda kit: recurrent_of(kit, 1),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: recurrent(draft_table(), 1, 0.8, children="sampled"),
    ),
    DrafterRow(
        "recurrent_drawn",
        make=lambda kit: recurrent_of(kit, 6, children="sampled"),
        rules=("greedy", "token", "coupled"),
        table=lambda: recurrent(draft_table(), 3, 0.8, children="sampled"),
    ),
    # The head has a lower precision than the target: tokens are tested against the rounded q from
    # which they were sampled.
    DrafterRow(
        "recurrent_bfloat16",
        make=lambda kit: recurrent_of(kit, 6, torch.bfloat16, children="sampled"),
        rules=("greedy", "token", "coupled"),
        table=lambda: recurrent(draft_table(), 3, 0.8, dtype=torch.bfloat16, children="sampled"),
        slow=True,
    ),
    DrafterRow(
        "recurrent_by_cost",
        make=lambda kit: recurrent_of(kit, 6, by_cost=True),
        rules=("greedy", "token", "coupled"),
        table=lambda: recurrent(draft_table(), 3, 0.8, by_cost=True),
        slow=True,
    ),
    DrafterRow(
        "recurrent_drawn_by_cost",
        make=lambda kit: recurrent_of(kit, 6, children="sampled", by_cost=True),
        rules=("greedy", "token", "coupled"),
        table=lambda: recurrent(draft_table(), 3, 0.8, children="sampled", by_cost=True),
    ),
]

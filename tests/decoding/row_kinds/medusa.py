"""Rows of Medusa heads: random ones, and ones fitted to a target's texts."""

import torch

from decoding.interfaces import Target
from heads.medusa.drafter import MedusaDrafter
from heads.medusa.model import MedusaConfig, MedusaHeads
from tests.decoding.row_kinds.kit import DrafterRow, Kit, draft_table
from tests.support.block_heads import (
    after_each,
)


def random_medusa(target: Target, scale: float = 1.0, **fields: int) -> MedusaHeads:
    """Return float64 Medusa heads with random weights, in the target's sizes.

    scale: factor of all weights. fields: further sizes of `MedusaConfig`.
    """
    config = MedusaConfig(target.vocab_size, target.hidden_size, **{"num_heads": 4, **fields})
    generator = torch.Generator().manual_seed(4)
    heads = MedusaHeads(config).double().requires_grad_(False)
    for parameter in heads.parameters():
        parameter.normal_(generator=generator).mul_(scale / parameter.shape[-1] ** 0.5)
    return heads.eval().to(target.device)


def fitted_medusa(kit: Kit, count: int = 4) -> MedusaHeads:
    """Return `count` Medusa heads fitted by least squares to the kit's texts.

    Head k maps the target's state at a position to the token k + 2 positions later.
    """
    target, V = kit.target, kit.target.vocab_size
    states, tokens = [], []
    for text in kit.texts:
        target.open(1, len(text))
        states_NC = target.features(torch.tensor([text], device=target.device))[0]
        states.append(states_NC[: -count - 1].double().cpu())
        tokens.append(torch.tensor(text).unfold(0, count + 2, 1)[:, 2:])
    inverse_CN, tokens_NK = torch.linalg.pinv(torch.cat(states)), torch.cat(tokens)
    heads = MedusaHeads(MedusaConfig(V, target.hidden_size, num_heads=count))
    for head in range(count):
        wanted_NV = torch.nn.functional.one_hot(tokens_NK[:, head], V).double()
        heads.projections[head].weight.data.copy_((inverse_CN @ wanted_NV).T)
    return heads.requires_grad_(False).eval().to(target.device)


@torch.inference_mode()
def medusa_of(kit: Kit, **options: object) -> MedusaDrafter:
    """Return a drafter with Medusa heads fitted by least squares.

    If the kit has texts, the heads are `fitted_medusa`'s. Otherwise they map the state of each
    one-token prompt to the draft model's logits along a greedy text, each computed from the token
    before alone. The text begins with the target's next token.
    """
    if kit.texts:
        return MedusaDrafter(heads=fitted_medusa(kit), **options)  # type: ignore[arg-type]
    target, V = kit.target, kit.target.vocab_size
    logits_VV, states_VC = after_each(target, torch.arange(V, device=target.device))
    heads = MedusaHeads(MedusaConfig(V, target.hidden_size, num_heads=6)).double()
    next_V, inverse_CV = logits_VV.argmax(-1), torch.linalg.pinv(states_VC.cpu())
    for head in range(6):
        next_VV, _ = after_each(kit.draft_model, next_V)
        heads.projections[head].weight.data.copy_((inverse_CV @ next_VV.cpu()).T)
        next_V = next_VV.argmax(-1)
    heads = heads.requires_grad_(False).eval().to(target.device)
    return MedusaDrafter(heads=heads, **options)  # type: ignore[arg-type]


ROWS = [
    DrafterRow(
        "medusa",
        make=lambda kit: medusa_of(kit),
        rules=("greedy", "token", "coupled"),
        table=lambda: MedusaDrafter(heads=random_medusa(draft_table(), 2.0)),
    ),
    DrafterRow(
        "medusa_chain",
        make=lambda kit: medusa_of(kit, shape="chain"),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: MedusaDrafter(heads=random_medusa(draft_table(), 2.0), shape="chain"),
        slow=True,
    ),
]

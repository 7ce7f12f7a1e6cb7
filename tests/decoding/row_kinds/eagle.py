"""Rows of EAGLE heads: random ones, and ones that know or fit a target's texts."""

from collections.abc import Sequence

import torch

from decoding.interfaces import Target
from heads.eagle.drafter import EagleDrafter
from heads.eagle.model import EagleConfig, EagleHead, default_taps
from heads.eagle.parallel import ParallelEagleDrafter
from tests.decoding.row_kinds.kit import DrafterRow, Kit, draft_table
from tests.support.block_heads import after_each
from tests.support.parallel_eagle import knowing_head


def random_eagle(target: Target, scale: float = 1.0, **fields: object) -> EagleHead:
    """Return a float64 EAGLE head with random weights, in the target's sizes.

    scale: factor of the output layer's weights, where there is one. fields: further fields of
    `EagleConfig`.
    """
    sizes = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 16,
        "taps": default_taps(target.num_layers),
        "rope": {"rope_type": "default", "rope_theta": 100.0},
        "max_positions": target.max_length,
        "norm_eps": 1.0,  # a table's states have one channel, which would always be normed to 1
    }
    config = EagleConfig(target.vocab_size, target.hidden_size, **{**sizes, **fields})  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(4)
    head = EagleHead(config).double().requires_grad_(False)
    for parameter in head.parameters():
        parameter.normal_(generator=generator).div_(parameter.shape[-1] ** 0.5)
    if not config.predicts_states:
        head.lm_head.weight.mul_(scale)
    return head.eval().to(target.device)


def fitted_eagle(target: Target, texts: Sequence[Sequence[int]]) -> EagleHead:
    """Return an EAGLE-3 head whose output layer is fitted to texts by least squares.

    The layer adds nothing, so a draft repeats the prediction from the target's last state.
    """
    head = random_eagle(target, taps=(target.num_layers,), fc_norm=False)
    head.fc.weight.copy_(torch.eye(target.hidden_size))
    for weight in (head.midlayer.self_attn.o_proj.weight, head.midlayer.mlp.down_proj.weight):
        weight.zero_()
    states, tokens = [], []
    for text in texts:
        target.open(1, len(text))
        states_NC = target.features(torch.tensor([text], device=target.device))[0]
        states.append(head.norm(states_NC[:-2].double()))
        tokens.append(torch.tensor(text[2:], device=target.device))
    wanted_NV = torch.nn.functional.one_hot(torch.cat(tokens), target.vocab_size).double()
    head.lm_head.weight.copy_((torch.linalg.pinv(torch.cat(states)) @ wanted_NV).T)
    return head


@torch.inference_mode()
def eagle_of(kit: Kit, **options: object) -> EagleDrafter:
    """Return a drafter with the kit's EAGLE-3 head, a fitted one or a random one."""
    head = kit.eagle
    if head is None and kit.texts:
        head = fitted_eagle(kit.target, kit.texts)
    return EagleDrafter(head=head or random_eagle(kit.target, 3.0), **options)  # type: ignore[arg-type]


def random_first(target: Target, adds: bool = True) -> EagleHead:
    """Return a random EAGLE-1 head. adds: whether its layer adds anything to the joined inputs."""
    form = {"taps": (), "fc_norm": False, "norm_output": False, "predicts_states": True}
    head = random_eagle(target, **form)
    for product in () if adds else (head.midlayer.self_attn.o_proj, head.midlayer.mlp.down_proj):
        product.weight.zero_()
    return head


def fitted_first(target: Target, texts: Sequence[Sequence[int]]) -> EagleHead:
    """Return an EAGLE-1 head whose map is fitted to the target's next states by least squares."""
    head, joined, wanted = random_first(target, adds=False), [], []
    for text in texts:
        target.open(1, len(text))
        ids_1N = torch.tensor([text], device=target.device)
        states_NH = target.features(ids_1N)[0].double()
        joined.append(torch.cat((target.embed(ids_1N)[0, 1:].double(), states_NH[:-1]), 1))
        wanted.append(states_NH[1:])
    head.fc.weight.copy_((torch.linalg.pinv(torch.cat(joined)) @ torch.cat(wanted)).T)
    return head


def knowing_first(target: Target, draft_model: Target) -> EagleHead:
    """Return an EAGLE-1 head whose logits are those of a bigram model after the last token.

    target: a bigram target, whose lm_head turns the head's states into them.
    """
    head, V = random_first(target, adds=False), target.vocab_size
    logits_VV, _ = after_each(draft_model, torch.arange(V))
    columns_HV = target.lm_head(torch.eye(target.hidden_size, dtype=torch.float64))
    head.fc.weight.zero_()
    head.fc.weight[:, :V] = (logits_VV @ torch.linalg.pinv(columns_HV)).T
    return head


@torch.inference_mode()
def first_of(kit: Kit, **options: object) -> EagleDrafter:
    """Return a drafter with an EAGLE-1 head: one that knows a bigram target, fitted, or random."""
    if kit.target.name == "last word":
        head = knowing_first(kit.target, kit.draft_model)
    else:
        head = fitted_first(kit.target, kit.texts) if kit.texts else random_first(kit.target)
    return EagleDrafter(head=head, **options)  # type: ignore[arg-type]


def random_parallel_eagle(target: Target, scale: float = 1.0, by_depth: bool = False) -> EagleHead:
    """Return `random_eagle` of a head that drafts six tokens in one pass.

    by_depth: `masks_by_depth`.
    """
    masks = {"parallel": 6, "mask_token_id": target.vocab_size - 1, "masks_by_depth": by_depth}
    return random_eagle(target, scale, **masks)


def parallel_eagle_of(kit: Kit, by_depth: bool = False, **options: object) -> ParallelEagleDrafter:
    """Return a drafter with a head that knows the draft model's text, or a random one.

    It knows the text of a bigram target only.
    """
    if kit.target.name == "last word":
        head = knowing_head(kit.target, kit.draft_model, by_depth)
    else:
        head = random_parallel_eagle(kit.target, 3.0, by_depth)
    return ParallelEagleDrafter(head=head, **options)  # type: ignore[arg-type]


ROWS = [
    DrafterRow(
        "eagle3",
        make=lambda kit: eagle_of(kit, frontier=3, max_nodes=10),
        rules=("greedy", "token", "coupled"),
        table=lambda: EagleDrafter(head=random_eagle(draft_table(), 2.0), frontier=3, max_nodes=10),
    ),
    DrafterRow(
        "eagle3_chain",
        make=lambda kit: eagle_of(kit, shape="chain"),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: EagleDrafter(head=random_eagle(draft_table(), 2.0), shape="chain"),
    ),
    DrafterRow(
        "eagle3_by_cost",
        make=lambda kit: eagle_of(kit, frontier=3, by_cost=True),
        rules=("greedy", "token", "coupled"),
        table=lambda: EagleDrafter(head=random_eagle(draft_table(), 2.0), frontier=3, by_cost=True),
        slow=True,
    ),
    DrafterRow(
        "eagle1",
        make=lambda kit: first_of(kit, frontier=3, max_nodes=10),
        rules=("greedy", "token", "coupled"),
        table=lambda: EagleDrafter(head=random_first(draft_table()), frontier=3, max_nodes=10),
    ),
    DrafterRow(
        "eagle1_chain",
        make=lambda kit: first_of(kit, shape="chain"),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: EagleDrafter(head=random_first(draft_table()), shape="chain"),
        slow=True,
    ),
    DrafterRow(
        "p_eagle",
        make=lambda kit: parallel_eagle_of(kit),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: ParallelEagleDrafter(head=random_parallel_eagle(draft_table(), 2.0)),
    ),
    DrafterRow(
        "parallelspec",
        make=lambda kit: parallel_eagle_of(kit, by_depth=True),
        rules=("greedy", "token", "block", "coupled"),
        table=lambda: ParallelEagleDrafter(
            head=random_parallel_eagle(draft_table(), 2.0, by_depth=True)
        ),
        slow=True,
    ),
]

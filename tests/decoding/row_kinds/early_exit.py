"""Rows of early-exit heads, made of layers of the target and of another model."""

import torch

from decoding.interfaces import Target
from decoding.models.native.model import NativeTarget
from heads.early_exit.drafter import EarlyExitDrafter
from heads.early_exit.model import EarlyExitConfig, EarlyExitHead
from tests.decoding.row_kinds.kit import DrafterRow, Kit
from tests.support.tiny_targets import five_words


def empty_early_exit(target: Target, exit_layer: int = 1) -> EarlyExitHead:
    """Return a float64 early-exit head for a native target, whose layer adds nothing."""
    assert isinstance(target, NativeTarget)
    shape = EarlyExitConfig(**(vars(target.config) | {"exit_layer": exit_layer}))
    head = EarlyExitHead(shape).double().requires_grad_(False).eval()
    head.out.weight.zero_()
    head.down.weight.zero_()
    head.norm.copy_(target.weights.norm_C)
    return head


@torch.inference_mode()
def early_exit_of(kit: Kit, model: Target) -> EarlyExitDrafter:
    """Return a drafter with the kit's target up to its last layer, then the last layer of `model`.

    model: a native target whose layers have the shape of the kit's target's, without biases.
    """
    assert isinstance(model, NativeTarget)
    head, layer = empty_early_exit(kit.target, kit.target.num_layers - 1), model.weights.layers[-1]
    for name in ("qkv", "out", "gate_up", "down"):
        ours, theirs = getattr(head, name), getattr(layer, name)
        # products with unit vectors, as packed weights cannot be read
        units = torch.eye(ours.in_features, dtype=model.weights.dtype, device=model.device)
        ours.weight.copy_(theirs(units).T)
    head.attention_norm.copy_(layer.attention_norm_C)
    head.mlp_norm.copy_(layer.mlp_norm_C)
    head.norm.copy_(model.weights.norm_C)
    return EarlyExitDrafter(head=head)


def random_early_exit(target: Target) -> EarlyExitDrafter:
    """Return a drafter with a random layer after the target's first layer."""
    head, generator = empty_early_exit(target), torch.Generator().manual_seed(6)
    for product in (head.qkv, head.out, head.gate_up, head.down):
        product.weight.normal_(generator=generator).mul_(product.weight.shape[-1] ** -0.5)
    return EarlyExitDrafter(head=head)


ROWS = [
    DrafterRow(
        "early_exit",
        make=lambda kit: early_exit_of(kit, kit.draft_model),
        rules=("greedy", "token", "block", "coupled"),
        perfect=lambda kit: early_exit_of(kit, kit.twin),
        # without its last layer, the target of a table has the logits of the negative table
        adversarial=lambda kit: EarlyExitDrafter(head=empty_early_exit(kit.target)),
        table=lambda: random_early_exit(five_words()),
    ),
]

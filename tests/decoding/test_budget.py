"""Budgets of forwards, compared with the model's parameters, cache and matrix products."""

import torch

from decoding.costs.roofline import forward_budget, round_budget
from decoding.models.native.model import NativeTarget
from tests.support.tiny_targets import VOCABULARY, hf_model, native_of


def test_weights_are_the_matrices_and_the_embeddings_of_new_tokens() -> None:
    target = native_of(hf_model("llama", layers=2))
    assert isinstance(target, NativeTarget)
    vectors = 32 * (2 * 2 + 1)  # norms
    table = VOCABULARY * 32
    budget = forward_budget(target.config, torch.float64, 1, 0)
    assert budget.weight_bytes == 8 * (target.num_parameters - vectors - table + 32)
    assert budget.cache_bytes == 0


def test_cache_bytes_grow_with_context_and_batch() -> None:
    config = native_of(hf_model("llama", layers=2)).config
    one, long, batch = (
        forward_budget(config, torch.float32, 1, *more) for more in ((10,), (30,), (10, 4))
    )
    assert long.cache_bytes == 3 * one.cache_bytes
    assert batch.cache_bytes == 4 * one.cache_bytes
    # keys and values of both layers, two heads of eight, in float32
    assert one.cache_bytes == 2 * 2 * 2 * 8 * 10 * 4
    assert long.weight_bytes == one.weight_bytes


def test_operations_equal_the_counter_of_torch() -> None:
    """Check against torch's counter, on a model with eager attention and without a cache."""
    from torch.utils.flop_counter import FlopCounterMode

    model = hf_model("llama_mha", layers=2)
    model.set_attn_implementation("eager")  # the counter lacks the CPU's fused kernel
    config = native_of(model).config
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, 8, dtype=torch.long))
    ours = forward_budget(config, torch.float64, 8, 0).operations
    # The counter includes all pairs of positions, the budget only the causal half.
    attention = 4 * 2 * config.num_heads * config.head_dim * 8 * 8
    assert counter.get_total_flops() - attention == ours - attention // 2


def test_the_longer_of_reads_and_products_is_the_bound() -> None:
    budget = forward_budget(native_of(hf_model("llama", layers=2)).config, torch.float32, 1, 100)
    assert budget.seconds(1.0, 1e30) == budget.bytes_read
    assert budget.seconds(1e30, 1.0) == budget.operations


def test_a_round_has_its_draft_steps_and_one_target_forward() -> None:
    target = native_of(hf_model("llama", layers=3)).config
    drafter = native_of(hf_model("llama", layers=1)).config
    whole = round_budget(target, drafter, torch.float32, 2, 20)
    parts = [
        forward_budget(target, torch.float32, 3, 20),
        *(forward_budget(drafter, torch.float32, 1, n) for n in (20, 21)),
    ]
    for name in ("weight_bytes", "cache_bytes", "operations"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts)
    assert round_budget(target, None, torch.float32, 0, 20) == forward_budget(
        target, torch.float32, 1, 20
    )
    assert round_budget(target, None, torch.float32, 3, 20) == forward_budget(
        target, torch.float32, 4, 20
    )

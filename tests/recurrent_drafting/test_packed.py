"""The packed head computes the same logits as the trained head."""

from functools import partial

import pytest
import torch

from decoding.models.native.fused import FusedLinear
from decoding.models.native.linear import can_pack, make_linear
from recurrent_drafting.head import Head, HeadConfig, RecurrentHead
from recurrent_drafting.packed import PackedHead, for_drafting

V, H = 50, 16
SHAPES = {
    "published": HeadConfig(V, H, 2 * H, 2),
    "one_block": HeadConfig(V, H, 2 * H, 1),
    "no_block": HeadConfig(V, H, 2 * H, 0),
    "sum": HeadConfig(V, H, 2 * H, 2, rnn=False),
    "projected": HeadConfig(V, H, 24, 2),
    "projected_no_block": HeadConfig(V, H, 24, 0),
    "shortlist": HeadConfig(V, H, 2 * H, 2, draft_vocab_size=20),
}


def random_head(config: HeadConfig, dtype: torch.dtype = torch.float32) -> RecurrentHead:
    torch.manual_seed(0)
    return RecurrentHead(config).to(dtype).requires_grad_(False).eval()


def logits_of(head: Head, dtype: torch.dtype) -> torch.Tensor:
    """Return the logits of three rows of four beams after two tokens.

    The states are strided as in a search.
    """
    generator = torch.Generator().manual_seed(1)
    hidden_BH, first_BH = (torch.randn(3, H, generator=generator).to(dtype) for _ in range(2))
    second_BWH = torch.randn(3, 4, H, generator=generator).to(dtype)
    state_BWH = head.start(first_BH)[:, None].expand(3, 4, H)
    state_BWH = head.advance(state_BWH, second_BWH)
    return head.logits(head.features(head.context(hidden_BH).unsqueeze(1), state_BWH))


@pytest.mark.parametrize("name", SHAPES)
def test_plain_and_packed_products_equal_the_trained_head(name: str) -> None:
    head = random_head(SHAPES[name], torch.float64)
    expected = logits_of(head, torch.float64)
    for products in (partial(make_linear, packed=False), FusedLinear):
        exact = logits_of(PackedHead(head, products), torch.float64)
        assert torch.allclose(exact, expected, atol=1e-12)
    single = random_head(SHAPES[name])
    assert can_pack(torch.device("cpu"), torch.float32)
    packed = logits_of(for_drafting(single), torch.float32)
    assert torch.allclose(packed.double(), expected, atol=1e-4)
    assert not torch.allclose(packed[0], packed[1], atol=1e-2), "logits must differ between rows"


def test_heads_are_packed_where_possible() -> None:
    assert isinstance(for_drafting(random_head(SHAPES["published"])), PackedHead)
    double = random_head(SHAPES["published"], torch.float64)
    assert isinstance(for_drafting(double), RecurrentHead)
    assert isinstance(for_drafting(double, fused=True), PackedHead)

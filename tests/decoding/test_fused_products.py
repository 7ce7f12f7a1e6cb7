"""The products and the attention of the fused step, in sizes that fill its tiles and that do not.

Shapes: M rows, I inputs, O outputs.
"""

import pytest
import torch

from decoding.models.native.fused import fused_linear
from tests.support.tiny_targets import hf_model, native_of

ROWS = (1, 2, 12, 13, 16, 17, 32, 33, 70)
# inputs and outputs: whole tiles, one more, one less, less than a tile, an odd number
SIZES = [(64, 64), (65, 66), (576, 96), (31, 62), (7, 3), (96, 33), (33, 1)]


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_product_is_exact_and_its_rows_do_not_depend_on_each_other(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x_MI, weight_OI, bias_O = tensors(dtype, (max(ROWS), inputs), (outputs, inputs), (outputs,))
    exact_MO = x_MI.double() @ weight_OI.double().T + bias_O.double()
    alone_MO = torch.cat([fused_linear(row_1I, weight_OI, bias_O) for row_1I in x_MI.split(1)])
    # terms are near 1: sums are off by some roundings of their number, outputs by one of their size
    roundings = 4 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    torch.testing.assert_close(
        alone_MO.double(), exact_MO, atol=roundings * inputs, rtol=torch.finfo(dtype).eps
    )
    for rows in ROWS:
        assert torch.equal(fused_linear(x_MI[:rows], weight_OI, bias_O), alone_MO[:rows])


def test_what_lies_beside_the_weights_is_not_read() -> None:
    """Rows of 33 inputs end within a tile, and so do 3 outputs: NaN beyond them has no effect."""
    x_MI, weight_OI = tensors(torch.bfloat16, (17, 33), (5, 33))
    weight_OI[0] = weight_OI[4] = torch.nan
    inner_OI = weight_OI[1:4]
    found_MO = fused_linear(x_MI, inner_OI, None)
    assert torch.equal(found_MO, fused_linear(x_MI, inner_OI.clone(), None))
    assert found_MO.isfinite().all()


def test_rows_that_lie_apart_in_memory_are_read_as_they_are() -> None:
    """Such rows are copied, and the copy must live until the product has read it."""
    x_MI, weight_OI = tensors(torch.float32, (8, 16), (24, 16))
    for found_MI in (x_MI.T.contiguous().T, x_MI.repeat(1, 2)[:, :16]):
        assert not found_MI.is_contiguous()
        assert torch.equal(
            fused_linear(found_MI, weight_OI, None), fused_linear(x_MI, weight_OI, None)
        )


def test_nan_in_one_row_stays_there() -> None:
    x_MI, weight_OI = tensors(torch.bfloat16, (20, 48), (40, 48))
    clean_MO = fused_linear(x_MI, weight_OI, None)
    x_MI[3, 5] = torch.nan
    found_MO = fused_linear(x_MI, weight_OI, None)
    assert found_MO[3].isnan().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(found_MO[others], clean_MO[others])


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (12, 2), (8, 1)], ids=str)
def test_attention_of_any_number_of_query_heads_equals_the_eager_one(
    heads: tuple[int, int],
) -> None:
    """heads: of queries and of keys; up to four queries' heads are computed together."""
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 24}
    made = hf_model("llama", hidden_size=96, **sizes)
    ids_BN = torch.randint(0, 30, (2, 19), generator=torch.Generator().manual_seed(0))
    logits = []
    for execution in ("fused", "eager"):
        target = native_of(made, dtype=torch.float64, execution=execution)
        with torch.inference_mode():
            target.open(2, 40)
            target.forward(ids_BN)
            target.commit(None, [19, 7])
            logits.append(target.forward(ids_BN[:, :5])[0])
    torch.testing.assert_close(*logits, atol=1e-9, rtol=1e-9)

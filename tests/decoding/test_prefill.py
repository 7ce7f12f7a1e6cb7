"""Law: prompts of different lengths are read alike, whether ragged or padded."""

import pytest
import torch

from decoding.models import prefill as module
from decoding.models.native import fused
from decoding.models.native.model import NativeTarget
from decoding.models.prefill import prefill, reads_ragged
from tests.support.tiny_targets import VOCABULARY, hf_model, native_of

LENGTHS = (3, 0, 90, 41, 1)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    made = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCABULARY, (size,), generator=made).tolist() for size in lengths]


def target_of(execution: str) -> NativeTarget:
    return native_of(hf_model("llama", layers=2), execution=execution, dtype=torch.float64)


@torch.inference_mode()
def read(
    target: NativeTarget, rows: list[list[int]], taps: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states after reading the prompts in two parts, and the next logits."""
    target.open(len(rows), 512)
    prefill(target, [row[: len(row) // 2] for row in rows])
    hidden_BNC = prefill(target, [row[len(row) // 2 :] for row in rows], True, taps)
    assert hidden_BNC is not None and target.lengths_B == [len(row) for row in rows]
    return hidden_BNC, target.forward(torch.full((len(rows), 1), 7))[0]


@pytest.mark.parametrize("taps", [(), (0, 1)])
@pytest.mark.parametrize("execution", ["eager", "fused"])
def test_ragged_rows_equal_padded_rows(
    execution: str, taps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rows = target_of(execution), prompts()
    assert reads_ragged(target, rows)
    hidden_BNC, logits = read(target, rows, taps)
    monkeypatch.setattr(module, "LEAST_TOKENS", 1000)
    assert not reads_ragged(target, rows)
    padded_BNC, expected = read(target, rows, taps)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    assert hidden_BNC.shape == padded_BNC.shape
    for row, found, padded in zip(rows, hidden_BNC, padded_BNC, strict=True):
        count = len(row) - len(row) // 2
        torch.testing.assert_close(found[:count], padded[:count], rtol=1e-10, atol=1e-10)


def test_control_another_row_differs() -> None:
    target, rows = target_of("eager"), prompts()
    _, logits = read(target, rows)
    _, swapped = read(target, [rows[2], *rows[1:2], rows[0], *rows[3:]])
    assert (logits - swapped).abs().max() > 1e-3


@pytest.mark.parametrize("execution", ["eager", "fused"])
def test_a_ragged_row_equals_a_batch_of_one(execution: str) -> None:
    target, rows = target_of(execution), prompts()
    _, logits = read(target, rows)
    for row, found in zip(rows, logits, strict=True):
        if row:
            target.open(1, 256)
            prefill(target, [row[: len(row) // 2]])
            prefill(target, [row[len(row) // 2 :]])
            with torch.inference_mode():
                alone = target.forward(torch.full((1, 1), 7))[0][0]
            torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-10)


def bits_beside_others(target: NativeTarget) -> bool:
    """Return whether prompts have the same states, to the bit, alone as in a batch."""
    rows = prompts((70, 3, 300, 290, 1))
    hidden_BNC, logits = read(target, rows)
    equal = True
    for row, states_NC, logits_1V in zip(rows, hidden_BNC, logits, strict=True):
        alone_1NC, alone_11V = read(target, [row])
        equal &= torch.equal(alone_1NC[0], states_NC[: alone_1NC.shape[1]])
        equal &= torch.equal(alone_11V[0], logits_1V)
    return equal


def test_a_fused_prompts_bits_do_not_depend_on_the_rows_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check parts narrow and wide enough for either kind of product, beside an eager control."""
    sizes = {"hidden_size": 96, "intermediate_size": 232}
    monkeypatch.setattr(fused, "WIDEST", 1000)
    for head_dim in (24, 32):
        made = hf_model("llama", head_dim=head_dim, **sizes)
        for dtype in (torch.float64, torch.bfloat16):
            for width in (fused.SLICE, 100):
                monkeypatch.setattr(fused, "SLICE", width)
                assert bits_beside_others(native_of(made, execution="fused", dtype=dtype))
        assert not bits_beside_others(native_of(made, execution="eager", dtype=torch.bfloat16))


@pytest.mark.parametrize(("heads", "shared"), [(1, 1), (4, 2), (9, 3), (4, 4), (5, 5), (7, 7)])
@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_prompts_are_read_as_exactly_as_by_the_eager_step(
    heads: int, shared: int, head_dim: int
) -> None:
    """Check every number of heads that share keys, against float64, in bfloat16.

    The control is the same prompts in other rows.
    """
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads // shared}
    made = hf_model("llama", hidden_size=12 * heads, head_dim=head_dim, **sizes)
    rounded = made.to(torch.bfloat16).to(torch.float64)
    rows = prompts((70, 3, 130, 33, 1, 16))

    def states(execution: str, dtype: torch.dtype) -> torch.Tensor:
        hidden_BNC, _ = read(native_of(rounded, execution=execution, dtype=dtype), rows)
        return hidden_BNC.to(torch.float64)

    exact = states("eager", torch.float64)
    error = (states("fused", torch.bfloat16) - exact).norm()
    assert error <= 1.2 * (states("eager", torch.bfloat16) - exact).norm()
    assert error < 0.1 * (exact.roll(1, 0) - exact).norm()


def test_prompts_of_one_length_and_short_ones_are_padded() -> None:
    target = target_of("eager")
    assert not reads_ragged(target, prompts((50, 50, 50)))
    assert not reads_ragged(target, prompts((3, 10, 6)))
    assert reads_ragged(target, prompts((3, 12, 30)))
    assert not reads_ragged(target, prompts((50,)))
    assert reads_ragged(target, prompts((50, 200)))
    assert not reads_ragged(object.__new__(Padded), prompts((50, 200)))


class Padded:
    """A target that reads all rows together."""

"""Warpers compared with their definitions, and the properties of the keyed noise.

Shapes: R rows, V vocabulary.
"""

import math

import numpy as np
import pytest
import torch

from decoding.errors import UserError
from decoding.sampling import noise
from decoding.sampling.token_chooser import FEW, TokenChooser
from decoding.sampling.warpers import PARTIAL_SORT_SIZES, Warper, draw

from .law_3 import exact_row

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 4},
        {"temperature": 1.4, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.3},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
    ],
    ids=str,
)
def test_warpers_follow_their_definition(fields: dict) -> None:
    generator = torch.Generator().manual_seed(3)
    logits_RV = torch.randn(40, 11, generator=generator, dtype=torch.float64) * 2
    logits_RV[::3] = logits_RV[::3].round()  # many ties
    probs_RV = Warper(**fields).probs(logits_RV)
    expected = torch.tensor(
        [exact_row(row, **fields) for row in logits_RV.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(probs_RV, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}], ids=str)
def test_ties_go_to_the_lower_token_id(fields: dict) -> None:
    """Check a vocabulary for which a partial sort, which leaves ties undefined, is tried first."""
    logits = torch.full((2, 2 * PARTIAL_SORT_SIZES[-1]), -30.0)
    logits[0, [7, 40, 90, 200]] = 2.0
    logits[1, [3, 5]] = torch.tensor([1.0, 2.0])
    kept = [row.nonzero().flatten().tolist() for row in Warper(1.0, **fields).probs(logits)]
    assert kept[0] == ([7, 40, 90, 200] if "min_p" in fields else [7, 40])
    assert kept[1] == ([3, 5] if "top_k" in fields else [5])


@pytest.mark.parametrize(
    "fields", [{"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.4}, {"top_k": 90, "top_p": 0.99}], ids=str
)
def test_partial_and_full_sorts_agree(fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the partial sort, the fast path, gives the result of a full stable sort."""
    logits_RV = (
        torch.randn(30, 500, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 4
    )
    fast_RV = Warper(1.0, **fields).probs(logits_RV)
    monkeypatch.setattr("decoding.sampling.warpers.PARTIAL_SORT_SIZES", ())
    torch.testing.assert_close(fast_RV, Warper(1.0, **fields).probs(logits_RV), rtol=1e-12, atol=0)


def test_a_flat_row_over_a_large_vocabulary_needs_the_full_sort() -> None:
    logits_RV = torch.zeros(2, 4000, dtype=torch.float64)
    logits_RV[1, 77] = 40
    kept = (Warper(1.0, top_p=0.500125).probs(logits_RV) > 0).sum(-1).tolist()
    assert kept == [2001, 1]


@pytest.mark.parametrize(
    "fields", [{"temperature": -1}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.2}, {"min_p": -0.1}]
)
def test_warpers_refuse_impossible_settings(fields: dict) -> None:
    with pytest.raises(UserError, match=f"{next(iter(fields))} is .*, expected"):
        Warper(**fields)


def test_draw_never_samples_a_token_of_weight_zero() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    for u in (2.0**-53, 0.1, 0.2999, 0.3001, 0.5, 1 - 2.0**-53):
        assert draw(weights, [u]).item() == (1 if u < 0.3 else 3)


def test_scalar_and_tensor_noise_are_the_same_function() -> None:
    keys = [noise.key(5, request, position) for request in range(3) for position in range(4)]
    ids = torch.arange(20)
    rows = noise.exponentials(
        torch.tensor([noise.signed(k) for k in keys])[:, None], noise.scaled_ids(ids)
    )
    for row, k in zip(rows, keys):
        for i in range(20):
            # The tensor leaves out the last xorshift of the scalar: y = z ^ (z >> 31), so z = y ^
            # (y >> 31) ^ (y >> 62).
            mixed = noise.mix((k + (i + 1) * noise.GOLDEN) & noise.MASK)
            bits = noise.signed(mixed ^ (mixed >> 31) ^ (mixed >> 62))
            assert row[i].item() == pytest.approx(
                -math.log(bits * noise.SIGNED_STEP + 0.5), rel=1e-6
            )


def test_uniforms_stay_inside_the_open_interval() -> None:
    assert 0 < noise.HALF_STEP < (2**52 - 1) * 2.0**-52 + noise.HALF_STEP < 1
    assert 0 < -(2**63) * noise.SIGNED_STEP + 0.5 < (2**63 - 1) * noise.SIGNED_STEP + 0.5 < 1


def test_mixing_matches_splitmix64() -> None:
    """Check the first outputs for seed 1234567 against SplitMix64's published ones."""
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + noise.GOLDEN) & noise.MASK
        outputs.append(noise.mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_is_equal_on_cuda() -> None:
    ids, keys = (
        torch.arange(4096),
        torch.tensor([noise.signed(noise.key(1, 2, p)) for p in range(3)])[:, None],
    )
    cpu = noise.mix_tensor(noise.scaled_ids(ids) + keys)
    assert torch.equal(cpu, noise.mix_tensor(noise.scaled_ids(ids.cuda()) + keys.cuda()).cpu())


def test_exponentials_are_standard_exponentials() -> None:
    keys = torch.tensor([noise.signed(noise.key(0, 0, position)) for position in range(50)])[
        :, None
    ]
    values = noise.exponentials(keys, noise.scaled_ids(torch.arange(2000)))
    assert values.min() > 0
    assert abs(values.mean().item() - 1) < 0.02
    assert abs(values.var().item() - 1) < 0.05
    adjacent = torch.corrcoef(torch.stack((values[:, :-1].flatten(), values[:, 1:].flatten())))[
        0, 1
    ]
    between = torch.corrcoef(values[:2])[0, 1]
    assert max(abs(adjacent.item()), abs(between.item())) < 0.05


def test_uniforms_differ_by_every_part_of_their_key() -> None:
    chooser = TokenChooser(Warper(1.0), "token", 0, 5, CPU)
    chooser.begin([noise.key(0, 0), noise.key(0, 1), noise.key(1, 0)], [0, 0, 0], [9, 9, 9], 4)
    values = {
        chooser.uniform(row, depth, purpose)
        for row in range(3)
        for depth in range(4)
        for purpose in range(4)
    }
    chooser.begin([noise.key(0, 0)], [1], [9], 4)
    values |= {chooser.uniform(0, depth, purpose) for depth in range(4) for purpose in range(4)}
    assert len(values) == 64
    assert all(0 < value < 1 for value in values)


def test_numbers_of_many_rows_are_those_of_each_row() -> None:
    """Check that numpy, which computes many keyed numbers at once, gives Python's numbers."""
    chooser, rows = TokenChooser(Warper(1.0), "token", 0, 5, CPU), range(3 * FEW)
    requests = [noise.key(7, row) for row in rows]
    chooser.begin(requests, [row % 3 for row in rows], [9 + row for row in rows], 4)
    for nodes in (None, [4, 0]):
        made = chooser.uniforms(np.array(rows)[:, None], [2, 3], noise.ACCEPT, nodes)
        assert made.tolist() == [
            [chooser.uniform(row, depth, noise.ACCEPT, node) for depth, node in pairs]
            for row in rows
            for pairs in [zip([2, 3], nodes or [None, None])]
        ]
    round_keys = [noise.extend(key, row % 3) for key, row in zip(requests, rows)]
    assert chooser.draft_keys([1])[:, 0].tolist() == [
        noise.signed(noise.extend(noise.extend(key, 10 + row), noise.DRAFT))
        for key, row in zip(round_keys, rows)
    ]


@pytest.mark.parametrize("depths", [None, torch.tensor([[0, 1, 1, 2], [0, 1, 2, 3]])])
def test_noise_for_survivors_selects_the_same_tokens(depths: torch.Tensor | None) -> None:
    """Check that noise for the survivors, the fast path, selects the tokens of noise for all."""
    logits_BNV = torch.randn(2, 4, 300, generator=torch.Generator().manual_seed(1))
    warper = Warper(1.0, top_k=7)
    picks = []
    for chosen, logits in ((warper, logits_BNV), (Warper(1.0), warper.probs(logits_BNV).log())):
        chooser = TokenChooser(chosen, "coupled", 3, 300, CPU)
        chooser.begin([noise.key(3, 0), noise.key(3, 1)], [0, 0], [4, 7], 5)
        picks.append(chooser.race(logits, 0, depths))
    assert torch.equal(*picks)


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(
        UserError,
        match="verify 'lenient' is unknown, expected one of greedy, token, block, coupled",
    ):
        TokenChooser(Warper(1.0), "lenient", 0, 5, CPU)
    with pytest.raises(UserError, match=r"verify 'greedy' needs temperature 0, found 0\.5"):
        TokenChooser(Warper(0.5), "greedy", 0, 5, CPU)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision_are_warped_in_float32(
    dtype: torch.dtype, temperature: float
) -> None:
    logits_RV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).mul(9).to(dtype)
    probs_RV = Warper(temperature).probs(logits_RV)
    assert torch.equal(probs_RV, (logits_RV.float() / temperature).softmax(-1))
    rounded_RV = (logits_RV / temperature).softmax(-1, dtype=torch.float32)
    assert torch.equal(probs_RV, rounded_RV) == (temperature == 1.0), (
        "control: a division in half precision is rounded"
    )

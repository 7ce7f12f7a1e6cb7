"""Draft vocabularies: the choice of tokens, their order, and the refusal of invalid ones."""

from pathlib import Path

import numpy as np
import pytest
import torch

from decoding.errors import UserError
from decoding.models.draft_vocabulary import check_tokens
from tests.heads import law_6
from training.data.packing import PackedData, Sample, collate
from training.draft_vocabulary import choose_tokens, index_tokens
from training.heads.draft_vocabulary import choose_by_mass, measure_mass
from training.objectives import hidden_states

V = 64
IDS = torch.tensor([2, 3, 9, 60])


def test_the_most_frequent_answer_tokens_are_chosen(capsys: pytest.CaptureFixture[str]):
    ids = np.array([50, 9, 9, 9, 4, 4, 60, 60, 3, 2], dtype=np.int32)
    mask = np.array([False, True, True, True, True, True, False, True, True, True])
    chosen = choose_tokens([Sample(ids, mask)], V, 4, show=True)
    assert chosen.tolist() == [2, 3, 4, 9], (
        "50 and one 60 are not in answers; ties go to smaller ids"
    )
    assert "4 of 64 tokens, 87.50% of the training answers' tokens" in capsys.readouterr().out


def answers(seed: int, count: int = 30) -> list[Sample]:
    generator = np.random.default_rng(seed)
    return [
        Sample(generator.integers(0, 61, 20).astype(np.int32), np.arange(20) >= 8)
        for _ in range(count)
    ]


def test_the_likeliest_tokens_are_chosen_by_the_targets_probability(
    capsys: pytest.CaptureFixture[str],
):
    """Check it against whole distributions, one sample at a time."""
    model, samples = law_6.target(), answers(1)
    data = PackedData(samples, 64, 1, 0)
    chosen = choose_by_mass(data, model, 12, show=True)
    sums, places = torch.zeros(61, dtype=torch.float64), 0
    with torch.no_grad():
        for sample in samples:
            states = hidden_states(model, collate([sample], [[0]], 20))[0]
            sums += model.lm_head(states[7:-1]).softmax(-1).sum(0).double()
            places += 12
    assert chosen.tolist() == sums.topk(12).indices.sort().values.tolist()
    counted = choose_tokens(samples, 61, 12, show=False)
    assert counted.tolist() != chosen.tolist(), "the control: these texts are not the target's"
    shares = [float(sums[ids].sum()) / places for ids in (chosen, counted)]
    assert shares[0] > shares[1]
    assert (
        f"12 of 61 tokens, with {shares[0]:.2%} of the target's probability at 360 places of the "
        f"training answers; the most frequent tokens have {shares[1]:.2%}"
        in capsys.readouterr().out
    )


def test_the_target_reads_a_part_of_large_data():
    model, data = law_6.target(), PackedData(answers(2, 60), 64, 1, 0)
    some, places = measure_mass(data, model, 256)
    assert 12 * 3 <= places <= 12 * 3 * 5 < 12 * 60
    everything, all_places = measure_mass(data, model, 10**6)
    assert all_places == 12 * 60
    for found in (some, everything):
        assert float(found.sum()) == pytest.approx(1)


def test_indices_of_target_tokens_invert_the_draft_vocabulary():
    indices = index_tokens(IDS, V)
    assert indices[IDS].tolist() == [0, 1, 2, 3]
    assert int((indices >= 0).sum()) == 4
    # the control: token ids are not indices
    assert indices[IDS].tolist() != IDS.tolist()


@pytest.mark.parametrize("wrong", [IDS.flip(0), IDS + 10, IDS - 3, IDS.int(), torch.tensor([1, 1])])
def test_an_invalid_draft_vocabulary_is_refused(wrong: torch.Tensor):
    check_tokens(Path("model.safetensors"), "token_ids_V", IDS, V)
    with pytest.raises(UserError, match="token_ids_V is not a rising list .* below 64"):
        check_tokens(Path("model.safetensors"), "token_ids_V", wrong, V)

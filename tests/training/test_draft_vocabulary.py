"""Draft vocabularies: the choice of tokens, their order, and the refusal of invalid ones."""

from pathlib import Path

import numpy as np
import pytest
import torch

from decoding.errors import UserError
from decoding.models.draft_vocabulary import check_tokens
from training.data.packing import Sample
from training.draft_vocabulary import choose_tokens, index_tokens

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

"""What training samples in a row follows the seed, the step and the row's samples, and no more."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.heads import law_6
from tests.heads.rows import HEAD_ROWS
from training.data.packing import PackedBatch, Sample, collate
from training.heads import positions as module
from training.heads.loss_config import HeadLossConfig
from training.heads.objective import HeadObjective
from training.heads.positions import Positions, positions

K, LENGTH = 4, 60


def texts() -> list[Sample]:
    """Return texts of equal lengths, all tokens of which are supervised."""
    ids = np.random.default_rng(0).integers(0, law_6.VOCABULARY, (3, LENGTH)).astype(np.int32)
    return [Sample(ids_T, np.arange(LENGTH) > 0) for ids_T in ids]


def in_row(
    where: Positions, batch: PackedBatch, row: int, of_draft: Callable[[int], Any]
) -> dict[int, Any]:
    """Return a property of each draft in a row, by the draft's place in the row."""
    length = batch.ids_RT.shape[1]
    places = where.kept_P[where.drafts_M].tolist()
    return {
        place % length: of_draft(draft)
        for draft, place in enumerate(places)
        if place // length == row
    }


def depths_of(where: Positions) -> Callable[[int], Any]:
    return lambda draft: tuple(sorted(where.head_N[where.draft_N == draft].tolist()))


def masks_of(where: Positions) -> Callable[[int], Any]:
    return lambda draft: tuple((where.filled_MK[draft] == module.MASKED).tolist())


def continues(where: Positions) -> Callable[[int], Any]:
    return lambda draft: draft in where.own_O.tolist()


SAMPLED = {
    "drafts": ({"drafts_per_row": 12}, lambda where: lambda draft: True),
    "depths": ({"shares_K": (1.0, 0.6, 0.4, 0.2)}, depths_of),
    "masks": ({"random_masks": True}, masks_of),
    "own tokens": ({"own_tokens": 0.5}, continues),
}


def sampled(
    name: str, key: tuple[int, ...], rows: list[list[int]], row: int, length: int = LENGTH
) -> dict[int, Any]:
    """Return what is sampled in one row of a batch of rows of the texts."""
    options, of_drafts = SAMPLED[name]
    batch = collate(texts(), rows, length)
    where = positions(batch, K, False, key=key, context=True, **options)
    return in_row(where, batch, row, of_drafts(where))


def check_a_row_follows_its_samples(name: str) -> None:
    one = sampled(name, (0, 3), [[0]], 0)
    assert one == sampled(name, (0, 3), [[2], [1], [0]], 2), "the rows before it"
    assert one == sampled(name, (0, 3), [[0], [1]], 0, LENGTH + 37), "padding"
    others = [
        sampled(name, (1, 3), [[0]], 0),
        sampled(name, (2, 3), [[0]], 0),
        sampled(name, (0, 4), [[0]], 0),
        sampled(name, (0, 3), [[1]], 0),
        sampled(name, (0, 3), [[2]], 0),
    ]
    for index, other in enumerate(others):
        assert other not in (one, *others[:index]), "other seeds, steps and rows"


@pytest.mark.parametrize("name", SAMPLED)
def test_a_row_follows_the_seed_the_step_and_its_samples(name: str):
    check_a_row_follows_its_samples(name)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize(
    ("part", "message"), [("row", "other seeds"), ("place", "rows before"), ("length", "padding")]
)
def test_other_keys_are_found(name: str, part: str, message: str, monkeypatch: pytest.MonkeyPatch):
    """Control: keys without the row's samples, of a place in the batch, and of padded length."""
    keys = module._draft_keys

    def changed(
        batch: PackedBatch, drafts: np.ndarray, key: tuple[int, ...], purpose: int
    ) -> np.ndarray:
        length = batch.ids_RT.shape[1]
        samples = {
            "row": [() for _ in batch.rows],
            "place": [(*row, number) for number, row in enumerate(batch.rows)],
            "length": [(*row, length) for row in batch.rows],
        }[part]
        other = PackedBatch(samples, *(vars(batch)[name] for name in list(vars(batch))[1:]))
        return keys(other, drafts, key, purpose)

    monkeypatch.setattr(module, "_draft_keys", changed)
    with pytest.raises(AssertionError, match=message):
        check_a_row_follows_its_samples(name)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dflash", {"drafts_per_row": 5}),
        ("p_eagle", {"depth_share": 0.5}),
        ("specdiff", {}),
        ("recurrent", {"own_tokens": 0.5}),
    ],
)
def test_a_run_samples_by_its_seed(name: str, settings: dict[str, Any]):
    row, model = next(row for row in HEAD_ROWS if row.name == name), law_6.target()
    head, states = law_6.head_of(row, model), law_6.states_of(row, model)
    loss = HeadLossConfig("cross_entropy", predict_n_tokens=4, **settings)
    batch = collate(texts(), [[0], [1]], LENGTH)

    def total(seed: int) -> float:
        return float(HeadObjective(row.kind, head, states, loss, seed=seed)(batch)[0].detach())

    assert total(0) == total(0) and len({total(seed) for seed in range(3)}) == 3

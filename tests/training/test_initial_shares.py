"""Test the initial shares of a mixture that starts where another training ended."""

import json
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from training.bounds import Progress
from training.config import DataConfig
from training.data.from_config import data_files, row_data
from training.data.mixture import MixedData, check_mixture
from training.data.shares import with_initial_shares
from training.drafter_folder import shares_on_card

from .test_mixture import DOMAINS, NAMES, config

SHARES = {"code": 0.125, "prose": 0.25, "maths": 0.625}


def write_card(folder: Path, data: dict[str, Any]) -> str:
    (folder / "drafter_card.json").write_text(json.dumps({"data": data}))
    return str(folder)


def test_a_mixture_starts_from_the_shares_on_the_card(tmp_path: Path):
    folder = write_card(tmp_path, {"shares": SHARES})
    found = row_data(DOMAINS, config(shares_from=folder), 4, 7)
    assert isinstance(found, MixedData) and found.shares == SHARES
    given = row_data(DOMAINS, config(), 4, 7)
    assert isinstance(given, MixedData) and given.shares != SHARES, "control"
    data = config(shares_from=folder, root=str(tmp_path))
    for name in ("x.txt", "y.txt"):
        (tmp_path / name).write_text("text")
    assert tmp_path / "drafter_card.json" in data_files(data), "the manifest records the card"


def test_the_card_of_a_training_that_moved_shares_has_them():
    progress = Progress(data={"shares": SHARES})
    assert shares_on_card(config(mixing="acceptance"), progress) == {"shares": SHARES}
    assert shares_on_card(config(mixing="fixed"), progress) == {}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"sources": []}, "drafter_card.json records no shares of domains"),
        ({"shares": {"code": 1.0}}, "shares of code, but data.domains are code, prose, maths"),
    ],
)
def test_a_card_without_the_domains_is_refused(tmp_path: Path, written: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        with_initial_shares(config(shares_from=write_card(tmp_path, written)))


def test_a_missing_folder_or_mixture_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        with_initial_shares(config(shares_from=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="data.shares_from is x, but data.domains is empty"):
        check_mixture(DataConfig(shares_from="x"), ())
    assert list(with_initial_shares(config()).domains) == list(NAMES)

"""A target, a drafter cut from it and prompts, on the disk; one thread for all."""

import pytest
import torch

from . import tiny


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval_run")
    tiny.save(folder / "target", layers=3)
    tiny.save(folder / "shallow", layers=1)
    tiny.prompts(folder / "prompts.jsonl", count=5)
    return folder


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)

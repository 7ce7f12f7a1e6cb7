"""Test that a training run killed a hundred times at random moments gives the same drafter."""

import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.forks import Fork

KILLS = 100


def start(target: Path, folder: Path) -> Fork:
    given = ["+experiment=smoke", "threads=1", f"target.path={target}", f"output_dir={folder}"]
    return Fork("distill.train", *given)


def drafter_bytes(folder: Path) -> bytes:
    return (folder / "drafter" / "model.safetensors").read_bytes()


@pytest.mark.exhaustive
def test_a_hundred_kills_change_nothing(tiny_target: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    assert start(tiny_target, tmp_path / "straight").wait() == 0
    seconds = time.monotonic() - began
    moments, killed, attempt = random.Random(0), 0, 0
    while killed < KILLS:
        # A run is resumed until it ends before it is killed. Then the next run starts.
        folder = tmp_path / f"attempt_{attempt}"
        fresh = not folder.exists()
        began = time.monotonic()
        process = start(tiny_target, folder)
        try:
            assert process.wait(moments.uniform(0.0, seconds)) == 0
            assert drafter_bytes(folder) == drafter_bytes(tmp_path / "straight")
            attempt += 1
            if fresh:  # a machine that got faster would end its runs before they are killed
                seconds = min(seconds, time.monotonic() - began)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
            print(f"{killed} killed, {attempt} ended")
    assert start(tiny_target, folder).wait() == 0, "the last run resumed, too"
    assert drafter_bytes(folder) == drafter_bytes(tmp_path / "straight")

"""Memory that a process frees goes back to the system."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20
# A process of its own, since the heap of one that has run other tests has room for these tensors.
# Once 16 MB were freed, glibc takes tensors of 1 MB from its heap. Of these, 300 are freed below
# small ones that stay, as in a step.
PROGRAM = """
import torch
from decoding.rounds.memory import HeapTrimmer, resident_bytes

torch.ones(4 << 20)
control, trimmer, before = HeapTrimmer(1 << 40), HeapTrimmer(100 << 20, every=2), resident_bytes()
pairs = [(torch.ones(1 << 18), torch.ones(256)) for _ in range(300)]
kept = [small for _, small in pairs]
del pairs
print(resident_bytes() - before)
for give_back in (control, trimmer, trimmer):
    give_back()
    print(resident_bytes() - before)
"""

# 1.3 GB are freed among small tensors that stay, and then a text is decoded.
DECODING = """
import torch
from decoding.loop import decode
from decoding.rounds.memory import resident_bytes
from decoding.rounds.settings import Settings
from tests.support.tiny_targets import hf_model, native_of

target = native_of(hf_model("llama", layers=2))
torch.ones(4 << 20)
pairs = [(torch.ones(1 << 18), torch.ones(256)) for _ in range(1300)]
kept = [small for _, small in pairs]
del pairs
print(resident_bytes())
target.open(1, 8)
target.forward(torch.tensor([[3, 4]]))
print(resident_bytes())
decode(target, None, [[3, 4]], Settings(2))
print(resident_bytes())
"""
needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone is trimmed"
)


@needs_glibc
def test_a_batch_that_begins_gives_memory_back() -> None:
    """Check that a decode frees what others have left; control: a forward alone frees nothing."""
    command = [sys.executable, "-c", DECODING]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    before, forward, decoded = map(int, done.stdout.split())
    assert decoded < 0.6 * before and forward > 0.95 * before


@needs_glibc
def test_memory_is_given_back_after_some_growth() -> None:
    """Check that resident memory falls at the second call, which looks at it.

    Control: with a larger growth it stays.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    grown, *untrimmed, trimmed = map(int, done.stdout.split())
    assert grown > 200 * MB
    assert len(untrimmed) == 2 and min(untrimmed) > grown - 20 * MB
    assert trimmed < grown / 3

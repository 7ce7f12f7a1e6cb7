"""Memory that a process frees goes back to the system."""

import platform

import pytest
import torch

from training.memory import HeapTrimmer, resident_bytes

MB = 1 << 20


def fragment_the_heap() -> list[torch.Tensor]:
    """Free 300 MB of tensors below others that stay, as steps do; return those."""
    torch.ones(4 * MB)  # once 16 MB were freed, glibc takes tensors of 1 MB from its heap
    pairs = [(torch.ones(MB // 4), torch.ones(256)) for _ in range(300)]
    return [small for _, small in pairs]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc alone is trimmed")
@pytest.mark.parametrize(("growth", "trims"), [(100 * MB, True), (1 << 40, False)])
def test_memory_is_given_back_after_some_growth(growth: int, trims: bool) -> None:
    """Check that resident memory falls; with a larger `growth` it stays, as the control."""
    give_back = HeapTrimmer(growth)
    before = resident_bytes()
    kept = fragment_the_heap()
    grown = resident_bytes() - before
    give_back()
    left = resident_bytes() - before
    assert len(kept) == 300
    if trims:
        assert grown > 200 * MB and left < grown / 3
    else:
        assert left > grown - 20 * MB

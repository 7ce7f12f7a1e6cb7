"""The sources of the fused step compile for processors other than this one."""

import platform
import subprocess

import pytest

from decoding.models.native.library import FLAGS, SOURCES, compiler

NATIVE = "-march=native"


def compiles(processor: str) -> bool:
    """Check the sources for a processor, without making code."""
    flags = FLAGS.replace(NATIVE, f"-march={processor}").split()
    command = [*compiler(), *flags, "-fsyntax-only", str(SOURCES / "step.cpp")]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86 processors")
@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ("x86-64", True),
        ("x86-64-v3", True),  # vectors of 32 bytes
        ("x86-64-v4", True),  # of 64 bytes, without products of bfloat16
        ("cooperlake", True),  # with them, without tile registers
        ("sapphirerapids", True),
        ("nothing", False),  # the control
    ],
)
def test_the_step_compiles_for_other_processors(processor: str, expected: bool) -> None:
    assert NATIVE in FLAGS
    assert compiles(processor) == expected

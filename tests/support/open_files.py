"""Open files of the test process, each of which may be a connection."""

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

# GitHub sets both. Its workflows here unset the first one, as they lack real models.
CI_VARIABLES = ("CI", "GITHUB_ACTIONS")


@contextmanager
def allow_open_files(count: int, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Raise the soft limit to the hard one within the block.

    If that allows fewer than `count` files, the running test is skipped, or fails in CI.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        reason = f"needs {count:,} open files, this system allows {hard:,} (ulimit -Hn)"
        in_ci = any(environment.get(name) for name in CI_VARIABLES)
        (pytest.fail if in_ci else pytest.skip)(reason)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""Tests that need many open files: skipped where the system allows too few, failures in CI."""

import resource

import pytest

from tests.support.open_files import allow_open_files


def outcome(count: int, environment: dict[str, str]) -> str:
    """Return what becomes of a test that needs so many open files."""
    try:
        with allow_open_files(count, environment):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            return "runs" if soft == hard else "has the soft limit"
    except pytest.skip.Exception as end:
        return f"skipped: {end.msg}"
    except pytest.fail.Exception as end:
        return f"failed: {end.msg}"


def test_too_few_open_files_fail_in_ci_alone() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = f"needs {hard + 1:,} open files, this system allows {hard:,}"
    assert outcome(hard + 1, {}).startswith(f"skipped: {words}")
    assert outcome(hard + 1, {"CI": "true"}).startswith(f"failed: {words}")
    assert outcome(hard + 1, {"GITHUB_ACTIONS": "true"}).startswith(f"failed: {words}")


def test_the_soft_limit_is_raised_for_a_while() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowered = min(soft, hard - 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowered, hard))
    try:
        assert outcome(hard, {"CI": "true"}) == "runs"
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (lowered, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""Parameters of tests in two tiers: cases that repeat a quick one run with `--all` alone."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], quick: Collection[Any] | Callable[..., bool]) -> list[Any]:
    """Return cases as parameters of a test; those that are not quick run in the long suite.

    A case that is a tuple has a value per argument. quick: the quick cases, of which there must be
    one, or a function that returns whether a case's values are quick.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    is_quick = quick if callable(quick) else lambda *of: (of if len(of) > 1 else of[0]) in quick
    assert any(is_quick(*of) for of in values), f"no quick case: {values}"
    return [pytest.param(*of, marks=[] if is_quick(*of) else [pytest.mark.long]) for of in values]

"""The joint distribution of the first three tokens, and a test of samples against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

P_LIMIT = 1e-6  # samples with a smaller p-value are not of the distribution
LENGTH = 3  # tokens of a sample
Triple = tuple[int, ...]


def joint(
    next_row: Callable[[list[int]], Sequence[float]], prompt: Sequence[int]
) -> dict[Triple, float]:
    """Return the exact joint distribution of the first three tokens after a prompt.

    next_row: function from a token sequence to the probability of each next token. Triples of
    probability 0 are absent from the result.
    """
    law: dict[Triple, float] = {(): 1.0}
    for _ in range(LENGTH):
        law = {
            (*begun, token): probability * p
            for begun, probability in law.items()
            for token, p in enumerate(next_row([*prompt, *begun]))
            if p
        }
    return law


def p_value(counts: Counter[Triple], law: Mapping[Triple, float]) -> float:
    """Return the p-value of a chi-square test of the counts against the law.

    It is 0 if the law excludes any counted triple. Triples with fewer than 5 expected samples are
    pooled into one cell, which is left out if it too expects fewer than 5.
    """
    draws = counts.total()
    if any(cell not in law for cell in counts):
        return 0.0
    large = {cell: p * draws for cell, p in law.items() if p * draws >= 5}
    pairs = [(counts.get(cell, 0), expected) for cell, expected in large.items()]
    rest = draws - sum(expected for _, expected in pairs)
    if rest >= 5:
        pairs.append((draws - sum(count for count, _ in pairs), rest))
    statistic = sum((count - expected) ** 2 / expected for count, expected in pairs)
    freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)).item()

"""The matches of lookup drafters, compared with a plain search."""

import random
from collections.abc import Sequence

import pytest

from decoding.drafters.prompt_lookup import PromptLookup, SuffixLookup
from decoding.drafters.suffix_automaton import SuffixAutomaton
from decoding.errors import UserError


def longest_match(sequence: Sequence[int]) -> int:
    """Return the length of the longest suffix that also occurs earlier, or 0."""
    size = len(sequence)
    for length in range(size - 1, 0, -1):
        if any(
            list(sequence[end - length : end]) == list(sequence[size - length :])
            for end in range(length, size)
        ):
            return length
    return 0


@pytest.mark.parametrize("symbols", [2, 3, 8])
def test_the_automaton_finds_the_longest_match(symbols: int) -> None:
    draw = random.Random(symbols)
    for _ in range(5):
        automaton, sequence = SuffixAutomaton(), [draw.randrange(symbols)]
        for _ in range(60):
            sequence += [draw.randrange(symbols) for _ in range(draw.randrange(1, 4))]
            position = automaton.find(sequence)
            length = longest_match(sequence)
            assert automaton.matched == length
            if length == 0:
                assert position is None
                continue
            assert position is not None
            assert position < len(sequence)
            assert sequence[position - length : position] == sequence[-length:]


def test_a_short_match_is_not_copied() -> None:
    assert SuffixAutomaton(min_match=1).find([1, 2, 3, 1]) == 1
    assert SuffixAutomaton(min_match=2).find([1, 2, 3, 1]) is None
    assert SuffixAutomaton(min_match=2).find([1, 2, 3, 1, 2]) == 2


def test_errors_name_the_match_lengths() -> None:
    with pytest.raises(UserError, match="min_match is 0, expected 1 or more"):
        SuffixLookup(0)
    with pytest.raises(UserError, match="min_ngram is 3 and max_ngram is 2"):
        PromptLookup(2, 3)

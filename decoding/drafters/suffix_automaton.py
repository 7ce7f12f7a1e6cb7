"""A suffix automaton, which finds the longest suffix of a growing sequence that occurred before.

It takes constant time per token and finds matches of any length. Source: Hu et al. 2024, "SAM
Decoding" (arXiv 2411.10666); the automaton is that of Blumer et al. 1985, built online.
"""

from collections.abc import Sequence


class SuffixAutomaton:
    """An index of the last earlier occurrence of a sequence's longest repeated suffix.

    Each state represents a set of substrings that end at the same positions; its suffix link leads
    to the longest of their suffixes that also ends elsewhere.
    """

    def __init__(self, min_match: int = 1) -> None:
        self.min_match = min_match
        self._next: list[dict[int, int]] = [{}]
        # of each state: suffix link, length of the longest substring, position of its last token
        self._link, self._length, self._end = [-1], [0], [-1]
        self._last = 0  # the state of the complete sequence
        # state and length of the longest suffix that occurred before
        self._state = self.matched = 0
        self._follows: int | None = None
        self._read = 0  # tokens in the index

    def find(self, sequence: Sequence[int]) -> int | None:
        """Return the position after the last earlier occurrence of the longest repeated suffix.

        Returns None for a match below `min_match` tokens. Each call's `sequence` must extend the
        one of the call before.
        """
        for position in range(self._read, len(sequence)):
            self._match(sequence[position])
            self._append(sequence[position], position)
            self._record_match(position)
        self._read = len(sequence)
        return self._follows if self.matched >= self.min_match else None

    def _match(self, token: int) -> None:
        """Extend the match by a token, or fall back to its longest suffix that can be extended."""
        while self._state and token not in self._next[self._state]:
            self._state = self._link[self._state]
            self.matched = self._length[self._state]
        if token in self._next[self._state]:
            self._state, self.matched = self._next[self._state][token], self.matched + 1

    def _record_match(self, position: int) -> None:
        """Store the position after the match's earlier occurrence, and its new end."""
        while self._state and self.matched <= self._length[self._link[self._state]]:
            self._state = self._link[self._state]  # the state of the match was split
        self._follows = self._end[self._state] + 1 if self._state else None
        if self._state:
            self._end[self._state] = position

    def _append(self, token: int, position: int) -> None:
        new = self._state_of(self._length[self._last] + 1, position)
        at = self._last
        while at != -1 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        if at == -1:
            self._link[new] = 0
        else:
            self._link[new] = self._split(at, token)
        self._last = new

    def _split(self, at: int, token: int) -> int:
        """Return the state of (longest substring of `at`) + token; split it off if it is shared."""
        old = self._next[at][token]
        if self._length[old] == self._length[at] + 1:
            return old
        copy = self._state_of(self._length[at] + 1, self._end[old])
        self._next[copy] = dict(self._next[old])
        self._link[copy], self._link[old] = self._link[old], copy
        while at != -1 and self._next[at].get(token) == old:
            self._next[at][token] = copy
            at = self._link[at]
        return copy

    def _state_of(self, length: int, end: int) -> int:
        self._next.append({})
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

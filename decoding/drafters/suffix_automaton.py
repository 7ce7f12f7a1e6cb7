"""A suffix automaton over a growing sequence: the longest ending that stood there before, in
constant time a token.

It finds matches of any length, where an n-gram table finds those of the lengths it files. Source:
Hu et al. 2024, "SAM Decoding" (arXiv 2411.10666); the automaton is Blumer et al. 1985, built
online.
"""

from collections.abc import Sequence


class SuffixAutomaton:
    """Where the longest matching ending of a sequence was last followed by a token. Each state
    stands for a set of substrings that end at the same places; `link` leads to the longest of their
    suffixes that ends at more places.
    """

    def __init__(self, min_match: int = 1) -> None:
        self.min_match = min_match
        self._next: list[dict[int, int]] = [{}]
        # of a state: suffix link, longest substring, place of its last token
        self._link, self._length, self._end = (
            [-1],
            [0],
            [-1],
        )
        self._last = 0  # the state of the whole sequence
        # of the longest ending that stood there before, and its length
        self._state = self.matched = 0
        self._follows: int | None = None
        self._read = 0

    def find(self, sequence: Sequence[int]) -> int | None:
        """Position of the token that followed the longest ending's earlier occurrence, None below
        `min_match` tokens.

        `sequence` is the one of the last call with tokens added.
        """
        for position in range(self._read, len(sequence)):
            self._match(sequence[position])
            self._append(sequence[position], position)
            self._see(position)
        self._read = len(sequence)
        return self._follows if self.matched >= self.min_match else None

    def _match(self, token: int) -> None:
        """Lengthen the match by a token, or fall back to the longest of its suffixes
        that can be.
        """
        while self._state and token not in self._next[self._state]:
            self._state = self._link[self._state]
            self.matched = self._length[self._state]
        if token in self._next[self._state]:
            self._state, self.matched = self._next[self._state][token], self.matched + 1

    def _see(self, position: int) -> None:
        """Note what followed the match, and that it now ends here too."""
        while self._state and self.matched <= self._length[self._link[self._state]]:
            self._state = self._link[self._state]  # a state was split under the match
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
        """The state of (longest substring of `at`) + token, split off where a longer one shares its
        state.
        """
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

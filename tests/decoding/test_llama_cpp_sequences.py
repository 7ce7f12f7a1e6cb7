"""Trees as sequences: each node sees its ancestors alone, and commits keep what was accepted.

llama.cpp's memory is imitated by the rules of its documentation: a cell has a position and a set of
sequences, and a token sees the cells of its first sequence up to its own position.
"""

import random
from collections.abc import Callable, Sequence

import pytest

from decoding.errors import UserError
from decoding.interfaces import NO_NODE
from decoding.models.llama_cpp.sequences import MOST, Sequences, depths_of, leaves_below

TREES = (
    [-1],
    [-1, 0, 1, 2],
    [-1, 0, 0, 1, 1, 4],
    [-1, 0, 0, 0, 0],
    [-1, 0, NO_NODE, 0, 3, NO_NODE],
    [-1, -1, 0, 1],
)


class Memory:
    """Cells of (position, token) with the sequences that hold them."""

    def __init__(self, copies: bool = True) -> None:
        self.cells: list[tuple[int, int, set[int]]] = []
        self.copies = copies

    def remove(self, sequence: int, start: int) -> None:
        for position, _, held in self.cells:
            if position >= start:
                held.discard(sequence)
        self.cells = [cell for cell in self.cells if cell[2]]

    def copy(self, source: int, destination: int, start: int, end: int) -> None:
        for position, _, held in self.cells:
            if self.copies and source in held and start <= position < end:
                held.add(destination)

    def seen(self, sequence: int, last: int) -> list[int]:
        """Return the tokens of a sequence up to a position, in order, each position once."""
        found = sorted((p, t) for p, t, held in self.cells if sequence in held and p <= last)
        assert [position for position, _ in found] == list(range(last + 1))
        return [token for _, token in found]


class Rows:
    """Rows of `Sequences` over a `Memory`, with the texts that they should hold."""

    def __init__(self, count: int, copies: bool = True) -> None:
        self.memory = Memory(copies)
        self.sequences = Sequences(self.memory.remove, self.memory.copy)
        self.sequences.open(count)
        self.texts: list[list[int]] = [[] for _ in range(count)]
        self.fresh = iter(range(10**6))

    def forward(self, parents_of: dict[int, Sequence[int]]) -> dict[int, list[int]]:
        """Write new tokens, check what each sees, and return them by row."""
        below_of = {row: leaves_below(parents) for row, parents in parents_of.items()}
        ids_of = self.sequences.begin(below_of)
        tokens_of = {row: [next(self.fresh) for _ in p] for row, p in parents_of.items()}
        places = {}
        for row, parents in parents_of.items():
            for node, depth in enumerate(depths_of(parents)):
                if parents[node] != NO_NODE:
                    places[row, node] = len(self.texts[row]) + depth
                    cell = (places[row, node], tokens_of[row][node], set(ids_of[row][node]))
                    self.memory.cells.append(cell)
        for (row, node), position in places.items():
            path, place = [], node
            while place >= 0:
                path.append(tokens_of[row][place])
                place = parents_of[row][place]
            expected = self.texts[row] + path[::-1]
            assert self.memory.seen(ids_of[row][node][0], position) == expected
        return tokens_of

    def commit(self, row: int, path: list[int], tokens: Sequence[int]) -> None:
        self.sequences.commit(row, path)
        self.texts[row] += [tokens[node] for node in path]
        self.check()

    def check(self) -> None:
        assert self.sequences.lengths_B == [len(text) for text in self.texts]
        for row, text in zip(self.sequences.rows, self.texts, strict=True):
            assert self.memory.seen(row.ids[0], len(text) - 1) == text
            if row.below_N is None:
                after = [p for p, _, held in self.memory.cells if held & {*row.ids}]
                assert all(position < len(text) for position in after)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_every_path_of_a_tree_can_be_committed(parents: list[int]) -> None:
    nodes = [node for node, parent in enumerate(parents) if parent != NO_NODE]
    for node in nodes:
        rows = Rows(2)
        for _ in range(3):
            tokens_of = rows.forward({0: parents, 1: [-1, 0]})
            rows.commit(0, path_to(parents, node), tokens_of[0])
            rows.commit(1, [0], tokens_of[1])


def test_random_rounds_keep_the_texts() -> None:
    draw = random.Random(0)
    for _ in range(20):
        rows = Rows(draw.randint(1, 4))
        for _ in range(30):
            chosen = [row for row in range(len(rows.texts)) if draw.random() < 0.8]
            parents_of = {
                row: [-1, *(draw.randrange(node) for node in range(1, draw.randint(2, 9)))]
                for row in chosen
            }
            tokens_of = rows.forward(parents_of)
            for row in chosen:
                if draw.random() < 0.9:  # otherwise the next forward drops it
                    node = draw.randrange(len(parents_of[row]))
                    rows.commit(row, path_to(parents_of[row], node), tokens_of[row])
            if draw.random() < 0.2:
                row = draw.randrange(len(rows.texts))
                kept = draw.randint(0, len(rows.texts[row]))
                rows.sequences.truncate(row, kept)
                del rows.texts[row][kept:]
                rows.check()
            if len(rows.texts) > 1 and draw.random() < 0.1:
                left = draw.sample(range(len(rows.texts)), draw.randint(1, len(rows.texts)))
                rows.sequences.select(left)
                rows.texts = [rows.texts[row] for row in left]
                rows.check()


def test_the_imitation_notices_a_branch_without_the_committed_tokens() -> None:
    rows = Rows(1, copies=False)
    rows.commit(0, [0], rows.forward({0: [-1]})[0])
    with pytest.raises(AssertionError):
        rows.forward({0: [-1, 0, 0]})


def wide(leaves: int) -> list[int]:
    return [-1, *[0] * leaves]


def test_leaves_may_use_all_sequences_and_no_more() -> None:
    rows = Rows(2)
    rows.forward({0: wide(MOST - 1)})
    rows.forward({0: wide(100), 1: wide(MOST - 100)})
    with pytest.raises(UserError, match=f"2 rows have more than {MOST} leaves together"):
        rows.forward({0: wide(100), 1: wide(MOST - 99)})


def test_a_row_takes_idle_branches_of_another() -> None:
    rows = Rows(2)
    tokens_of = rows.forward({0: wide(MOST - 1)})
    rows.commit(0, [0, 3], tokens_of[0])
    tokens_of = rows.forward({0: [-1], 1: wide(200)})
    rows.commit(1, [0, 150], tokens_of[1])
    rows.commit(0, [0], tokens_of[0])


def test_a_row_that_joins_takes_idle_branches_of_another() -> None:
    rows = Rows(1)
    rows.commit(0, [0, 3], rows.forward({0: wide(MOST)})[0])
    rows.sequences.add(1)
    rows.texts.append([])
    rows.check()
    tokens_of = rows.forward({0: [-1], 1: wide(100)})
    rows.commit(0, [0], tokens_of[0])
    rows.commit(1, [0, 50], tokens_of[1])
    with pytest.raises(UserError, match="keeps at most"):
        rows.sequences.add(MOST - 1)


def test_more_rows_than_sequences_are_refused() -> None:
    make: Callable[[], Rows] = lambda: Rows(MOST + 1)  # noqa: E731
    with pytest.raises(UserError, match=f"a batch of {MOST + 1} rows does not fit"):
        make()

"""llama.cpp's sequences of a batch: which hold a row's committed tokens, which a tree's branches.

A token of llama.cpp belongs to a set of sequences and attends to the earlier positions of the first
one. A sequence has one token at each position, so a tree needs one for each leaf, and a node
belongs to the sequences of the leaves below it. All sequences of a row hold its committed tokens.

Shapes: B rows, N nodes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from decoding.errors import UserError
from decoding.interfaces import NO_NODE

MOST = 256  # sequences of a context: LLAMA_MAX_SEQ of llama.cpp


def leaves_below(parents_N: Sequence[int]) -> list[list[int]]:
    """Return for each node the numbers of the leaves below it, in increasing order.

    parents_N: as in `Target.forward`. Leaves are numbered from 0 in the order of the nodes; a leaf
    is below itself. A padding node has none.
    """
    inner = {parent for parent in parents_N if parent >= 0}
    below: list[list[int]] = [[] for _ in parents_N]
    count = 0
    for node, parent in enumerate(parents_N):
        if parent == NO_NODE or node in inner:
            continue
        place = node
        while place >= 0:
            below[place].append(count)
            place = parents_N[place]
        count += 1
    return below


def count_leaves(below_N: Sequence[Sequence[int]]) -> int:
    """Return the number of leaves that `leaves_below` has numbered."""
    return max((below[-1] for below in below_N if below), default=-1) + 1


def depths_of(parents_N: Sequence[int]) -> list[int]:
    """Return each node's depth: 0 for a child of the last committed token, and for padding."""
    depths: list[int] = []
    for parent in parents_N:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


@dataclass(slots=True)
class Row:
    """The sequences of one row."""

    length: int = 0  # committed tokens
    # ids of its sequences; the first holds the committed tokens and the first leaf's branch
    ids: list[int] = field(default_factory=list)
    # committed tokens that each of them holds
    held: list[int] = field(default_factory=list)
    # of a forward that is not committed: the leaves below each token, and their number
    below_N: list[list[int]] | None = None
    leaves: int = 1


class Sequences:
    """The rows' sequences, and the changes of llama.cpp's memory that keep them right.

    remove(id, start): drops a sequence's tokens from this position on. copy(source, destination,
    start, end): adds the source's tokens at these positions to the destination.
    """

    def __init__(
        self, remove: Callable[[int, int], None], copy: Callable[[int, int, int, int], None]
    ) -> None:
        self._remove, self._copy = remove, copy
        self.rows: list[Row] = []
        self._free: list[int] = []

    @property
    def lengths_B(self) -> list[int]:
        """Number of committed tokens of each row."""
        return [row.length for row in self.rows]

    def open(self, batch_size: int) -> None:
        """Start empty rows; the memory is empty too. Raises UserError for more than MOST rows."""
        if batch_size > MOST:
            raise UserError(
                f"a batch of {batch_size} rows does not fit into llama.cpp, which keeps at most "
                f"{MOST} sequences. Use a smaller batch."
            )
        self.rows = [Row(0, [number], [0]) for number in range(batch_size)]
        self._free = list(range(MOST - 1, batch_size - 1, -1))

    def begin(self, below_of: Mapping[int, list[list[int]]]) -> dict[int, list[list[int]]]:
        """Prepare rows for new tokens; return the sequences of each token.

        below_of: the row -> the leaves below each of its new tokens. Tokens of an earlier forward
        that were not committed are dropped. Raises UserError if the trees together have more leaves
        than llama.cpp has sequences.
        """
        for place, row in enumerate(self.rows):
            if row.below_N is not None:
                self._drop(row, row.length)
            # of all rows first, since a row may take the sequences that another does not need
            row.leaves = max(1, count_leaves(below_of.get(place, ())))
        for place, below_N in below_of.items():
            row = self.rows[place]
            row.below_N, leaves = below_N, row.leaves
            while len(row.ids) < leaves:
                row.ids.append(self._take(row))
                row.held.append(0)
            for number in range(1, leaves):
                if row.held[number] < row.length:
                    self._copy(row.ids[0], row.ids[number], row.held[number], row.length)
                    row.held[number] = row.length
        return {
            place: [[self.rows[place].ids[leaf] for leaf in below] for below in below_N]
            for place, below_N in below_of.items()
        }

    def commit(self, place: int, path: Sequence[int]) -> None:
        """Keep the nodes of this path of the last forward, and drop the others."""
        row, length = self.rows[place], self.rows[place].length + len(path)
        if row.below_N is None:
            return
        last = row.below_N[path[-1]][0] if path else 0
        if last:
            self._remove(row.ids[0], row.length)
            self._copy(row.ids[last], row.ids[0], row.length, length)
        for number in range(1, row.leaves):
            self._remove(row.ids[number], length if number == last else row.length)
        if len(path) < len(row.below_N):
            self._remove(row.ids[0], length)
        row.held[0] = row.held[last] = row.length = length
        row.below_N = None

    def truncate(self, place: int, length: int) -> None:
        """Shorten a row to at most `length` committed tokens."""
        row = self.rows[place]
        if row.below_N is not None or length < row.length:
            self._drop(row, length)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for place in {*range(len(self.rows))} - {*rows}:
            for number in self.rows[place].ids:
                self._remove(number, 0)
                self._free.append(number)
        self.rows = [self.rows[place] for place in rows]

    def add(self, count: int) -> None:
        """Add empty rows. Raises UserError if there are more rows than sequences."""
        for row in self.rows:
            if row.below_N is None:  # committed, so no branch needs the row's other sequences
                row.leaves = 1
        for _ in range(count):
            row = Row()
            row.ids, row.held = [self._take(row)], [0]
            self.rows.append(row)

    def fill(self, place: int, length: int) -> None:
        """Record that an empty row's first sequence now holds `length` committed tokens."""
        row = self.rows[place]
        row.length = row.held[0] = length

    def _drop(self, row: Row, length: int) -> None:
        """Shorten a row's sequences to `length` tokens, and drop what was not committed."""
        row.length, row.below_N = min(row.length, length), None
        for number, identity in enumerate(row.ids):
            self._remove(identity, row.length)
            row.held[number] = min(row.held[number], row.length)

    def _take(self, needy: Row) -> int:
        """Return a free sequence, or one that another row does not need now."""
        if self._free:
            return self._free.pop()
        for row in self.rows:
            if row is not needy and len(row.ids) > row.leaves:
                number = row.ids.pop()
                row.held.pop()
                self._remove(number, 0)
                return number
        raise UserError(
            f"the drafted trees of {len(self.rows)} rows have more than {MOST} leaves together, "
            f"and llama.cpp keeps at most {MOST} sequences. Use a smaller batch, or trees of fewer "
            f"nodes."
        )

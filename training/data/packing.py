"""Best-fit packing of documents into rows of one length, and the batches of a step.

Padding is the largest waste in drafter training, as chats differ tenfold in length. Packed rows
waste only the space that no document fits into. Attention stays inside a document
(training/models/attention.py), so packed and separate documents give equal losses and gradients.

Shapes: R rows, T tokens per row, N supervised tokens.
"""

import bisect
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from decoding import devices
from decoding.errors import UserError
from training.data.token_store import Sample as Sample  # part of this module's interface
from training.data.token_store import sample_lengths, supervised_tokens

Rows = Sequence[Sequence[int]]  # the samples of each row


class HostRows(NamedTuple):
    """Arrays of packed rows that stay on the host, where computing indices waits for no device."""

    documents_RT: np.ndarray  # int64, see PackedBatch
    # bool at t: the token at t + 1 is supervised and in the same document
    supervised_RT: np.ndarray


@dataclass(frozen=True)
class PackedBatch:
    """Packed rows on a device; all tensors are int64."""

    rows: list[tuple[int, ...]]  # the samples of each row
    host: HostRows
    ids_RT: Tensor  # 0 outside documents
    positions_RT: Tensor  # position inside the document
    documents_RT: Tensor  # number of the document in its row, from 1; 0 outside
    next_RT: Tensor  # the token at t + 1; 0 where it is not supervised
    places_N: Tensor  # rising indices into the flattened rows where the next token is supervised

    @property
    def device(self) -> torch.device:
        return self.ids_RT.device

    @property
    def tokens(self) -> int:
        return int((self.host.documents_RT > 0).sum())

    @property
    def supervised(self) -> int:
        return int(self.host.supervised_RT.sum())

    def at_supervised(self, values_RTx: Tensor) -> Tensor:
        """Return the values [N, ...] of [R, T, ...] where the next token is supervised.

        The indices are integers, as indexing with a mask would wait for the device.
        """
        return values_RTx.flatten(0, 1)[self.places_N]

    def row(self, index: int) -> "PackedBatch":
        """Return one row as a batch."""
        return self.select([index])

    def select(self, indices: Sequence[int]) -> "PackedBatch":
        """Return one or several rows as a batch, without waiting for the device."""
        length, ends = self.ids_RT.shape[1], self.host.supervised_RT.sum(1).cumsum().tolist()
        places = [
            self.places_N[ends[index - 1] if index else 0 : ends[index]] + (new - index) * length
            for new, index in enumerate(indices)
        ]

        def rows_of(values_RT: Tensor) -> Tensor:
            return torch.cat([values_RT[index : index + 1] for index in indices])

        return PackedBatch(
            [self.rows[index] for index in indices],
            HostRows(*(array[list(indices)] for array in self.host)),
            rows_of(self.ids_RT),
            rows_of(self.positions_RT),
            rows_of(self.documents_RT),
            rows_of(self.next_RT),
            torch.cat(places),
        )


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack samples into rows of at most `capacity` tokens: best fit, decreasing.

    Returns rows of sample indices; every index appears exactly once. Raises UserError for a sample
    longer than a row.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rows: list[list[int]] = []
    # room -> rows with that room (a heap), and the rooms that have one, sorted
    free: dict[int, list[int]] = {}
    rooms: list[int] = []
    for index in order:
        length = lengths[index]
        if length > capacity:
            raise UserError(
                f"sample {index} has {length} tokens, but a packed row holds {capacity}. Raise "
                f"data.max_length or split the sample"
            )
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity - length
            rows.append([index])
        else:
            row, room = heapq.heappop(free[rooms[at]]), rooms[at] - length
            if not free[rooms[at]]:
                del free[rooms.pop(at)]
            rows[row].append(index)
        if room not in free:
            bisect.insort(rooms, room)
            free[room] = []
        heapq.heappush(free[room], row)
    return rows


def split_documents(ids: Sequence[int] | np.ndarray, max_length: int) -> list[Sample]:
    """Split a plain document into supervised samples of at most `max_length` tokens.

    Neighbours share one token, so that every token but the first is predicted.
    """
    array = np.asarray(ids, dtype=np.int32)
    samples = []
    for start in range(0, max(len(array) - 1, 1), max_length - 1):
        piece = array[start : start + max_length]
        mask = np.ones(len(piece), dtype=bool)
        mask[0] = False
        samples.append(Sample(piece, mask))
    return samples


def collate(
    samples: Sequence[Sample],
    rows: Sequence[Sequence[int]],
    capacity: int,
    device: str | torch.device = "cpu",
) -> PackedBatch:
    """Return rows of sample indices as a batch on the device, sent in one asynchronous copy."""
    ids, positions, documents, following, supervised = np.zeros(
        (5, len(rows), capacity), dtype=np.int64
    )
    for r, row in enumerate(rows):
        start = 0
        for number, index in enumerate(row, start=1):
            sample = samples[index]
            end = start + len(sample.ids)
            ids[r, start:end] = sample.ids
            positions[r, start:end] = np.arange(end - start)
            documents[r, start:end] = number
            supervised[r, start : end - 1] = sample.mask[1:]
            following[r, start : end - 1] = np.where(sample.mask[1:], sample.ids[1:], 0)
            start = end
    arrays = (ids, positions, documents, following, np.flatnonzero(supervised))
    return PackedBatch(
        [tuple(row) for row in rows],
        HostRows(documents, supervised.astype(bool)),
        *devices.copy_arrays_to_device(arrays, torch.device(device)),
    )


class PackedData:
    """All samples of a job, packed once; a step's rows are a pure function of (seed, step).

    Nothing is stored between steps, so a run resumes from its step number alone.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        capacity: int,
        rows_per_step: int,
        seed: int,
        rows: list[list[int]] | None = None,
    ) -> None:
        """Pack the samples best fit, or use `rows` of sample indices as they are.

        capacity: tokens per row. Raises UserError if no token is supervised, or for a sample longer
        than a row. The caller adds the configuration's key.
        """
        self.samples = samples
        self.capacity = capacity
        self.rows_per_step = rows_per_step
        self.seed = seed
        lengths = sample_lengths(samples)
        self.rows = best_fit(lengths.tolist(), capacity) if rows is None else rows
        self.tokens = int(lengths.sum())
        self.supervised = supervised_tokens(samples)
        if self.supervised == 0:
            raise UserError(
                f"zero supervised tokens in {len(samples)} samples, so there is nothing to learn "
                f"from. Check the chat template and data.train_on"
            )
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    @property
    def fill(self) -> float:
        """Return the share of the packed positions that hold a token."""
        return self.tokens / (len(self.rows) * self.capacity)

    @property
    def ended(self) -> str:
        """Return why no further step is possible; empty here, as epochs repeat."""
        return ""

    @property
    def steps_per_epoch(self) -> float:
        return len(self.rows) / self.rows_per_step

    def step_rows(self, step: int) -> list[list[int]]:
        """Return the rows of optimizer step `step` (from 0), over all ranks and across epochs."""
        first = step * self.rows_per_step
        return [self.row(position) for position in range(first, first + self.rows_per_step)]

    def row(self, position: int) -> list[int]:
        """Return the row at `position` of the endless order, which is shuffled in every epoch."""
        epoch, offset = divmod(position, len(self.rows))
        if self._order[0] != epoch:
            self._order = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(len(self.rows)),
            )
        return self.rows[int(self._order[1][offset])]

    def state(self) -> dict[str, Any]:
        """Return the data's part of a checkpoint, as JSON; empty here."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned: nothing here."""

    def adapt(self, figures: dict[str, float]) -> dict[str, float]:
        """Adapt the data to held-out figures and return values to log; here nothing is adapted."""
        return {}

    def supervised_in(self, rows: Sequence[Sequence[int]]) -> int:
        """Count the supervised tokens in `rows`, the global divisor of a step's loss.

        Every rank computes it without communication.
        """
        return int(sum(int(self.samples[index].mask[1:].sum()) for row in rows for index in row))


def micro_batches(
    rows: Sequence[Sequence[int]], rank: int, world_size: int, rows_per_micro_batch: int
) -> Iterator[list[Sequence[int]]]:
    """Yield this rank's rows of a step, at most `rows_per_micro_batch` for each forward.

    Every rank gets the same number of forwards; the last one may have no rows on some ranks.
    """
    mine = list(rows[rank::world_size])
    most = math.ceil(len(rows) / world_size)
    forwards = math.ceil(most / rows_per_micro_batch)
    for index in range(forwards):
        yield mine[index * rows_per_micro_batch : (index + 1) * rows_per_micro_batch]

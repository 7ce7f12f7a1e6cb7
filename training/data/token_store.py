"""Samples in one array of tokens, in memory or mapped from disk, and decoded when they are read.

A token that is not supervised is stored as the complement of its id (-1 - id), so that ids and mask
take four bytes a token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

DTYPES = {"tokens": "<i4", "lengths": "<i4", "supervised": "<i4"}


@dataclass
class Sample:
    """One document or chat: its token ids, and a mask of the tokens that are predicted."""

    ids: np.ndarray  # int32 [length]
    mask: np.ndarray  # bool [length]; position 0 is never supervised, as nothing precedes it


class Sink(Protocol):
    """Receiver of arrays in pieces (training/data/mapped_tensors.py)."""

    def append(self, name: str, array: np.ndarray) -> None:
        """Append the values of an array."""


class MemorySink:
    """Arrays that grow in memory."""

    def __init__(self) -> None:
        self._content = {name: bytearray() for name in DTYPES}

    def append(self, name: str, array: np.ndarray) -> None:
        self._content[name] += np.ascontiguousarray(array, dtype=DTYPES[name]).tobytes()

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays, without a copy."""
        return {
            name: np.frombuffer(content, DTYPES[name]) for name, content in self._content.items()
        }


class StoredSamples(Sequence[Sample]):
    """Samples of the arrays `tokens` (all samples in order), `lengths` and `supervised`."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._tokens = arrays["tokens"]
        self.lengths, self.supervised = arrays["lengths"], arrays["supervised"]
        self._ends = np.cumsum(self.lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        end = int(self._ends[index])
        tokens = np.asarray(self._tokens[end - int(self.lengths[index]) : end])
        return Sample(np.where(tokens < 0, ~tokens, tokens).astype(np.int32), tokens >= 0)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))


class JoinedSamples(Sequence[Sample]):
    """Several sequences of samples as one."""

    def __init__(self, parts: Sequence[Sequence[Sample]]) -> None:
        self.parts = list(parts)
        self._ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.parts else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[part][index - (int(self._ends[part - 1]) if part else 0)]

    def __iter__(self) -> Iterator[Sample]:
        return (sample for part in self.parts for sample in part)


def encode_tokens(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return ids with their mask as one int32 array."""
    return np.where(mask, ids, ~ids).astype(np.int32)


def sample_lengths(samples: Sequence[Sample]) -> np.ndarray:
    """Return the tokens of each sample (int64), without reading stored ones."""
    if isinstance(samples, StoredSamples):
        return samples.lengths.astype(np.int64)
    if isinstance(samples, JoinedSamples):
        parts = [sample_lengths(part) for part in samples.parts]
        return np.concatenate([np.empty(0, np.int64), *parts])
    return np.fromiter((len(sample.ids) for sample in samples), np.int64, len(samples))


def supervised_tokens(samples: Sequence[Sample]) -> int:
    """Return the supervised tokens of all samples, without reading stored ones."""
    if isinstance(samples, StoredSamples):
        return int(samples.supervised.sum(dtype=np.int64))
    if isinstance(samples, JoinedSamples):
        return sum(supervised_tokens(part) for part in samples.parts)
    return sum(int(sample.mask.sum()) for sample in samples)

"""A cache of the teacher's distributions at the supervised tokens, so that steps do not run it.

A position holds draws from the distribution, or its likeliest tokens (training/losses/sparse.py).
The cache is written before the first step, in shards of some rows: folders that are complete or
absent, so an interrupted job goes on with the first shard that is missing. Ranks write shards in
turn and map all of them. The name of a cache is a hash of all that its content depends on: the
teacher and its dtype, the temperature, the packed rows, the drafted tokens and the settings.

Shapes: D draws or likeliest tokens of a position, N supervised tokens of a batch, V vocabulary that
the drafter proposes.
"""

import hashlib
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoding import devices
from decoding.errors import UserError
from jobs.amounts import size as amount
from jobs.progress import ProgressBar
from training.data.counts import print_note
from training.data.mapped_tensors import ArrayWriter, check_arrays, lock_path, map_arrays
from training.data.packing import PackedBatch, PackedData, collate
from training.features.teacher_config import SAMPLED, TOP_K, TeacherConfig
from training.losses.chunked import chunk_rows
from training.losses.sparse import TopRows, draw_tokens, estimate, likeliest
from training.losses.teacher import Teacher, TeacherRows
from training.objectives import hidden_states

SHARD_BYTES = 2**26  # least size of a shard that is not the last
MOST_SHARDS = 128  # of which each keeps three files open
FORWARD_TOKENS = 8192  # that the teacher reads in one forward
_VERSION = 2  # of the format, and of what the draws depend on in this code
_PURPOSE = 5  # part of the draws' keys, which differs from those of other random numbers
_REMEDY = "Make room, or set teacher.folder to another disk"

Key = tuple[int, ...]  # the samples in a row


@dataclass(frozen=True)
class CachedTeacher:
    """A frozen teacher, and what its cached distributions depend on."""

    # a Hugging Face causal LM with packed attention, in full on every rank
    model: Any
    # of its folder
    folder_hash: str
    # divides its logits
    temperature: float
    # rising ids that the drafter proposes; None: all
    ids_V: Tensor | None
    # of the draws
    seed: int

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens that the drafter proposes."""
        return int(self.model.config.vocab_size) if self.ids_V is None else len(self.ids_V)


@dataclass(frozen=True)
class Layout:
    """What a position of a cache holds."""

    kind: str
    count: int  # D
    vocabulary: int  # V

    @classmethod
    def of(cls, config: TeacherConfig, vocabulary: int) -> "Layout":
        count = config.draws if config.cache == SAMPLED else min(config.top_k, vocabulary)
        return cls(config.cache, count, vocabulary)

    @property
    def dtypes(self) -> dict[str, str]:
        """Return the dtype of each array."""
        values = ("mass", "negentropy") if self.kind == SAMPLED else ("probabilities", "rest")
        return {"ids": "<u2" if self.vocabulary <= 2**16 else "<i4"} | dict.fromkeys(values, "<f4")

    @property
    def bytes(self) -> int:
        """Return the bytes of a position."""
        return self.count * self._id_bytes + (8 if self.kind == SAMPLED else 4 * self.count + 4)

    @property
    def _id_bytes(self) -> int:
        return np.dtype(self.dtypes["ids"]).itemsize


class TeacherCache:
    """A complete cache, mapped from its files."""

    def __init__(self, folder: Path, layout: Layout, shards: Sequence[Sequence[Key]]) -> None:
        """Map the shards in `folder`; shards: the rows in each."""
        self.layout = layout
        self._arrays: list[dict[str, np.ndarray]] = []
        self._places: dict[Key, tuple[int, int, int]] = {}  # shard, first position, one after last
        for number, keys in enumerate(shards):
            found = map_arrays(folder / _name(number))
            if found is None:
                raise UserError(f"{folder / _name(number)} disappeared. Start the job again")
            arrays, metadata = found
            self._arrays.append(arrays)
            ends = [0, *np.cumsum(metadata["counts"]).tolist()]
            for key, (first, after) in zip(keys, pairwise(ends), strict=True):
                self._places[key] = (number, first, after)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TeacherCache":
        return self

    def rows(self, batch: PackedBatch) -> Callable[[int, int], TeacherRows | TopRows]:
        """Return a function from supervised tokens [start, end) to what the teacher gives them."""
        # a rank may have no row in a step
        parts = {name: [np.empty(0, dtype)] for name, dtype in self.layout.dtypes.items()}
        for key in batch.rows:
            shard, first, after = self._places[tuple(key)]
            for name, array in self._arrays[shard].items():
                width = self.layout.count if name in ("ids", "probabilities") else 1
                parts[name].append(array[first * width : after * width])
        flat_ids, *others = (np.concatenate(part) for part in parts.values())
        ids_ND, *values = (
            devices.copy_to_device(torch.from_numpy(array), batch.device)
            for array in (flat_ids.astype(np.int64).reshape(-1, self.layout.count), *others)
        )
        if self.layout.kind == TOP_K:
            p_NK, rest_N = values[0].view(-1, self.layout.count), values[1]
            return lambda start, end: TopRows(ids_ND[start:end], p_NK[start:end], rest_N[start:end])
        mass_N, negentropy_N = values
        return lambda start, end: estimate(
            ids_ND[start:end], mass_N[start:end], negentropy_N[start:end], self.layout.vocabulary
        )


def teacher_cache(
    config: TeacherConfig, teacher: CachedTeacher, data: PackedData, parallel: Any
) -> TeacherCache:
    """Return the cache for a frozen teacher and packed rows, and write the shards that it lacks.

    All ranks call it together. Raises UserError if the disk is too small, for an altered shard, and
    for a teacher whose logits are not finite.
    """
    layout = Layout.of(config, teacher.vocabulary)
    keys = sorted(tuple(row) for row in data.rows)
    counts = [data.supervised_in([key]) for key in keys]
    shards = _split(keys, counts, layout.bytes)
    folder = Path(config.folder) / _digest(layout, teacher, data, shards)
    if parallel.is_main:
        _announce(folder, layout, sum(counts), [_name(number) for number in range(len(shards))])
    parallel.wait()
    mine = range(parallel.rank, len(shards), parallel.world_size)
    rows = sum(len(shards[number]) for number in mine)
    with ProgressBar("teacher cache", rows, show=parallel.is_main) as bar:
        done = 0
        for number in mine:
            shard, keys = folder / _name(number), shards[number]
            advance = partial(lambda before, row: bar.update(before + row), done)
            with lock_path(shard, _REMEDY):
                if map_arrays(shard) is None:
                    _write(shard, layout, teacher, data, keys, advance)
                else:
                    check_arrays(shard, f"Delete {shard}; it is written again")
                    advance(len(keys))
            done += len(keys)
    parallel.wait()
    return TeacherCache(folder, layout, shards)


def _write(
    shard: Path,
    layout: Layout,
    teacher: CachedTeacher,
    data: PackedData,
    keys: Sequence[Key],
    advance: Callable[[int], None],
) -> None:
    """Write a shard, some rows of packed text at a time. advance: receives the rows written."""
    model = teacher.model
    device = next(model.parameters()).device
    together = max(1, FORWARD_TOKENS // data.capacity)
    with ArrayWriter(shard, layout.dtypes, _REMEDY) as writer, torch.no_grad():
        for first in range(0, len(keys), together):
            read = keys[first : first + together]
            batch = collate(data.samples, read, data.capacity, device)
            states_NG = batch.at_supervised(hidden_states(model, batch))
            known = Teacher(states_NG, model.lm_head.weight, teacher.temperature, teacher.ids_V)
            uniforms = np.random.default_rng([teacher.seed, _PURPOSE, *read[0]])
            step = chunk_rows(model.config.vocab_size)
            for start in range(0, len(states_NG), step):
                rows = known.at(start, min(start + step, len(states_NG)))
                if not bool(torch.isfinite(rows.negentropy_C).all()):
                    raise UserError(
                        f"the teacher's logits hold NaN or infinity in rows {first + 1} to "
                        f"{first + len(read)} of {shard}, of which nothing was kept. Try "
                        f"loop.dtype=float32, and check the weights of the target"
                    )
                for name, tensor in _content(rows, layout, uniforms).items():
                    writer.append(name, tensor.cpu().numpy())
            advance(first + len(read))
        writer.finish({"counts": [data.supervised_in([key]) for key in keys]})


def _content(rows: TeacherRows, layout: Layout, uniforms: np.random.Generator) -> dict[str, Tensor]:
    """Return the arrays of some positions, by name."""
    if layout.kind == TOP_K:
        top = likeliest(rows, layout.count)
        return {"ids": top.ids_CK, "probabilities": top.p_CK, "rest": top.rest_C}
    numbers = torch.from_numpy(uniforms.random((len(rows.mass_C), layout.count)))
    ids_CD = draw_tokens(rows.p_CV, numbers.to(rows.p_CV.device))
    return {"ids": ids_CD, "mass": rows.mass_C, "negentropy": rows.negentropy_C}


def _digest(
    layout: Layout, teacher: CachedTeacher, data: PackedData, shards: Sequence[Sequence[Key]]
) -> str:
    """Return the name of a cache."""
    of_teacher = (teacher.folder_hash, teacher.model.dtype, teacher.temperature)
    known = (_VERSION, *of_teacher, layout, data.capacity)
    draws = (teacher.seed, FORWARD_TOKENS) if layout.kind == SAMPLED else ()
    digest = hashlib.sha256(repr((known, draws, shards)).encode())
    if teacher.ids_V is not None:
        digest.update(teacher.ids_V.cpu().numpy().tobytes())
    for sample in data.samples:
        digest.update(np.ascontiguousarray(sample.ids).tobytes() + sample.mask.tobytes())
    return digest.hexdigest()[:16]


def _split(keys: Sequence[Key], counts: Sequence[int], width: int) -> list[list[Key]]:
    """Divide rows among shards of at least SHARD_BYTES, at most MOST_SHARDS of them."""
    shards: list[list[Key]] = [[]]
    least, held = max(SHARD_BYTES, math.ceil(sum(counts) * width / MOST_SHARDS)), 0
    for key, count in zip(keys, counts, strict=True):
        if held >= least:
            shards.append([])
            held = 0
        shards[-1].append(key)
        held += count * width
    return shards


def _announce(folder: Path, layout: Layout, positions: int, names: Sequence[str]) -> None:
    """Print the size of a cache. Raises UserError if the disk is too small for what is missing."""
    size = positions * layout.bytes
    written = sum(map_arrays(folder / name) is not None for name in names)
    for name in names:
        if (folder / name).exists() and map_arrays(folder / name) is None:
            print_note(f"{folder / name} is incomplete and is written again")
    parent = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(parent).free
    print(
        f"teacher cache: {positions:,} supervised tokens of {layout.bytes} bytes, {amount(size)} "
        f"in {folder} ({written} of {len(names)} shards are there, {amount(free)} free)"
    )
    if size * (len(names) - written) / len(names) > free:
        raise UserError(f"{folder} needs {amount(size)}, but {amount(free)} are free. {_REMEDY}")


def _name(number: int) -> str:
    return f"shard_{number:05d}"

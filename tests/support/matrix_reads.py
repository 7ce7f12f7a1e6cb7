"""A record of the matrices that the operations of PyTorch read."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OURS = ("decoding", "heads", "recurrent_drafting")
ROTATIONS = ("_rope", "tables")  # computed, not trained
Part = tuple[Any, ...]  # a part of a matrix: its storage and place, or a row of it


class MatrixReads(TorchDispatchMode):
    """Count the reads of matrices, by part.

    Views of a matrix read nothing; an embedding reads each different row once.
    """

    def __init__(self, matrices: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {_storage(matrix) for matrix in matrices}
        self.reads: dict[Part, int] = {}
        self.sizes: dict[Part, int] = {}  # in bytes
        self.written: set[int] = set()  # storages, as those of caches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        schema = func._schema
        writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        if any(each.alias_info is not None for each in schema.returns) and not any(writes):
            return found  # a view
        for given, is_written in zip(args, writes):
            if is_written and isinstance(given, Tensor):
                self.written.add(_storage(given))
        for given in tree_leaves(args):
            if isinstance(given, Tensor) and _storage(given) in self._known:
                self._add(func.overloadpacket.__name__, given, args)
        return found

    def _add(self, name: str, matrix: Tensor, args: Any) -> None:
        part, size = (_storage(matrix), matrix.storage_offset()), matrix.numel()
        parts: list[Part] = [(*part, size)]
        if name in ("embedding", "index"):
            (indices,) = tree_leaves(args[1])
            parts, size = [(*part, row) for row in indices.unique().tolist()], matrix[0].numel()
        for each in parts:
            self.reads[each] = self.reads.get(each, 0) + 1
            self.sizes[each] = size * matrix.element_size()

    def size(self, most: int, without: "MatrixReads | None" = None) -> int:
        """Return the bytes read, each part at most `most` times.

        without: another record, whose parts do not count.
        """
        left_out = without.reads if without else {}
        return sum(
            min(count, most) * self.sizes[part]
            for part, count in self.reads.items()
            if part not in left_out and part[0] not in self.written
        )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def matrices_in(thing: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the matrices that an object of this project, a module or a collection holds."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.squeeze().dim() > 1 and thing.is_floating_point():
            yield thing
        return
    if isinstance(thing, nn.Module):
        parts: Iterable[Any] = thing.parameters()
    elif isinstance(thing, dict):
        parts = thing.values()
    elif isinstance(thing, list | tuple):
        parts = thing
    elif type(thing).__module__.partition(".")[0] in OURS:
        names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
        parts = [getattr(thing, name) for name in names if name not in ROTATIONS]
    else:
        return
    for part in parts:
        yield from matrices_in(part, seen)

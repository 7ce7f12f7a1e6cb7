"""Counter of the host's waits for the device, and the settings and rows of the tests with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.trees.graph import GraphDrafter
from decoding.drafters.trees.ranked import RankedTree
from decoding.drafters.with_lookup import LookupFirst
from decoding.interfaces import RoundCosts, Target
from decoding.rounds.settings import Settings
from tests.decoding.rows import COSTS, PICKED, ROWS, DrafterRow
from tests.support.tiny_targets import hf_model, native_of

READERS = (
    "tolist",
    "item",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
)
INDEXERS = ("__getitem__", "__setitem__")  # wait if the index is a list or a mask


class Waits:
    """Counter of the host's waits for the device in a block of `counting`.

    `meant` counts calls of `devices.read`, and `timed` those of `devices.synchronize`. `stray`
    lists the names of all other functions that waited.
    """

    def __init__(self) -> None:
        self.meant = self.timed = 0
        self.stray: list[str] = []
        self._meaning = False

    @contextmanager
    def counting(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Count the waits of the block."""
        with patch.context() as context:
            for name in READERS:
                context.setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))
            for name in INDEXERS:
                context.setattr(Tensor, name, self._looked_at(name, getattr(Tensor, name)))
            context.setattr(torch, "tensor", self._counted("torch.tensor", torch.tensor))
            context.setattr(
                torch, "from_numpy", self._counted("torch.from_numpy", torch.from_numpy)
            )
            for name in ("tensor", "fill", "copy_to_device", "copy_arrays_to_device"):
                context.setattr(devices, name, self._free(getattr(devices, name)))
            context.setattr(devices, "read", self._read)
            context.setattr(devices, "synchronize", self._synchronize)
            yield

    def _counted(self, name: str, real: Any) -> Any:
        def reader(*given: Any, **named: Any) -> Any:
            nothing = isinstance(given[0], list) and not given[0]  # makes no copy
            if not self._meaning and not nothing:
                self.stray.append(name)
            return real(*given, **named)

        return reader

    def _looked_at(self, name: str, real: Any) -> Any:
        def indexer(tensor: Tensor, index: Any, *given: Any) -> Any:
            for part in index if isinstance(index, tuple) else (index,):
                if isinstance(part, list) or (
                    isinstance(part, Tensor) and part.dtype == torch.bool
                ):
                    self.stray.append(name)
            return real(tensor, index, *given)

        return indexer

    def _free(self, real: Any) -> Any:
        def function(*given: Any) -> Any:
            before, self._meaning = self._meaning, True
            result = real(*given)
            self._meaning = before
            return result

        return function

    def _read(self, *tensors: Tensor, real: Any = devices.read) -> Any:
        self.meant += 1
        return self._free(real)(*tensors)

    def _synchronize(self, device: torch.device) -> None:
        self.timed += 1


def models(device: str = "cpu") -> tuple[Target, Target]:
    """Return a random target and its draft model, a copy with noise in its weights."""
    model = hf_model("llama")
    return native_of(model, device=device), native_of(model, noise=0.05, device=device)


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"verify": "token"},
    {"verify": "token", "top_k": 5, "top_p": 0.9},
    {"verify": "coupled"},
    {"verify": "coupled", "top_p": 0.8, "min_p": 0.01},
    {"verify": "block"},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"verify": "token", "top_k": 5, "repetition_penalty": 1.3},
    {"verify": "token", "stopping": "cost_ratio", "costs": RoundCosts(0.2, (1.0, 1.1, 1.2, 1.3))},
]


TREE_RULES = ("greedy", "token", "coupled")
REAL = [row for row in ROWS if not row.name.startswith("oracle")]  # without the tests' oracles
REAL += [
    *PICKED,
    DrafterRow(
        "graph_with_early_lookup",
        make=lambda kit: LookupFirst(GraphDrafter(model=kit.draft_model, frontier=3), min_match=1),
        rules=TREE_RULES,
    ),
    DrafterRow(
        "budget_tree_with_early_lookup",
        make=lambda kit: LookupFirst(
            RankedTree(model=kit.draft_model, frontier=3, by_cost=True), min_match=1
        ),
        rules=TREE_RULES,
    ),
]


def settings_of(rule: str, **fields: Any) -> Settings:
    """Return settings under a verification rule."""
    sampled: dict[str, Any] = {} if rule == "greedy" else {"temperature": 1.0, "verify": rule}
    return Settings(
        **{
            "max_new_tokens": 16,
            "num_draft_tokens": 3,
            "stopping": "fixed",
            "costs": COSTS,
            **sampled,
            **fields,
        }
    )


PENALTY = 1.3
# Drafters and rules tested with a repetition penalty, which depends on the row's text and on the
# path to the node.
PENALISED = [
    ("static_tree", "greedy"),
    ("ranked_tree", "token"),
    ("graph", "coupled"),
    ("multi_candidate", "token"),
]
PENALISED += [
    ("recurrent", "greedy"),
    ("self_speculation", "token"),
    ("chain_with_lookup", "coupled"),
]
NAMED = {row.name: row for row in REAL}

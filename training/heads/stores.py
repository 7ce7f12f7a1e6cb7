"""The store of the target's states that a head trains on, and filling it before training."""

import time
from pathlib import Path

import numpy as np
import torch

from decoding.models.folder import hash_input
from jobs.progress import ProgressBar
from training.data.packing import PackedData, collate
from training.features.layer_stores import LayerStores, layers_on_disk
from training.features.stores import MemoryStore, Store, StoreLayout, states_on_disk
from training.heads.config import StatesConfig
from training.heads.objective import HeadObjective
from training.heads.positions import count_kept
from training.parallel.strategy import Parallel


def make_store(
    settings: StatesConfig,
    layout: StoreLayout,
    hidden_size: int,
    target_folder: Path,
    data: PackedData,
    show: bool,
) -> Store | LayerStores | None:
    """Return the store for the target's states that states.cache selects; None: no store.

    layout: the states that the job needs. hidden_size: of the target. show: print the size of
    files. Raises UserError if they do not fit on the disk.
    """
    if settings.cache == "none":
        return None
    if settings.cache == "memory":
        return MemoryStore(settings.memory_mb * 10**6)

    def count(mask_T: np.ndarray) -> int:
        return count_kept(mask_T, layout.heads, layout.uses_teacher, layout.context)

    root, target_hash = Path(settings.folder), hash_input(target_folder)
    if settings.layers:
        sizes = hidden_size, layout.dtype
        return layers_on_disk(root, target_hash, data, layout.taps, *sizes, show)
    return states_on_disk(root, target_hash, data, layout, count, show)


def fill_store(objective: HeadObjective, data: PackedData, parallel: Parallel) -> None:
    """Store the target's states in all rows of the data, each rank those of its share."""
    rows, began = data.rows[parallel.rank :: parallel.world_size], time.perf_counter()
    with ProgressBar("states", len(rows), show=parallel.is_main) as bar, torch.no_grad():
        for number, row in enumerate(rows, start=1):
            objective.read_target(collate(data.samples, [row], data.capacity, parallel.device))
            bar.update(number)
    # every rank waits here for the others
    tokens = sum(parallel.gather(objective.states.tokens_read))
    if parallel.is_main:
        seconds = time.perf_counter() - began
        read = f"the target read {tokens:,} tokens in {seconds:.1f} s, before training"
        print(f"states: {read if tokens else 'all were stored before; the target read none'}")

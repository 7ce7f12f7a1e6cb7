"""Loading of the target that a job's settings describe."""

import json
from pathlib import Path
from typing import Any

import torch

from decoding.costs.timing import choose_threads
from decoding.interfaces import Target
from decoding.models.load import AUTO, load_target
from decoding.values import is_int
from jobs import ranks
from jobs.config import TargetConfig
from jobs.files import write_text
from jobs.run_files import read_object
from jobs.run_lock import MANIFEST, THREADS


def load_job_target(
    settings: TargetConfig,
    folder: Path,
    threads: object = 0,
    run: Path | None = None,
    **changes: Any,
) -> Target:
    """Load the target in `folder`, and with threads=auto choose their number by timing it.

    run: the run folder, which keeps this choice for the time when the run is resumed; None: the job
    has none. changes: arguments of `load_target` that the settings lack, or that replace theirs.
    Raises UserError as `load_target` does, and for a damaged file of the choice.
    """
    asked = {
        "backend": settings.backend,
        "execution": settings.execution,
        "dtype": settings.dtype,
        "device": settings.device,
        "max_length": settings.max_length or None,
        "parallel": settings.parallel,
        "processes": settings.processes,
        "trust_remote_code": settings.trust_remote_code,
    }
    target = load_target(folder, **asked | changes)  # type: ignore[arg-type]
    if threads == AUTO:
        _set_threads(target, run)
    return target


def _set_threads(target: Target, run: Path | None) -> None:
    """Set the number of threads that the run chose before or, without one, that is the fastest.

    Choices are kept by PyTorch's default, which is smaller in shards while others run. Without a
    manifest the folder belongs to no configuration yet, so a file there is of a failed start.
    """
    most, known = torch.get_num_threads(), dict[int, int]()
    file = run / THREADS.format(rank=ranks.rank()) if run is not None else None
    if file is not None and file.is_file() and (file.parent / MANIFEST).is_file():
        remedy = "Delete it: the number of threads is chosen again by timing the target"
        known = read_object(file, remedy, _choices_of)
    if most in known:
        torch.set_num_threads(known[most])
        print(f"threads: {known[most]} of {most}, as this run chose when it started")
        return
    chosen = choose_threads(target)
    print(f"threads: a step of the target is fastest with {chosen} of {most}")
    if file is not None:
        write_text(file, json.dumps(known | {most: chosen}))


def _choices_of(values: dict[str, Any]) -> dict[int, int]:
    """Return the chosen numbers of threads by PyTorch's default. Raises ValueError for others."""
    for most, chosen in values.items():
        if not is_int(chosen) or not 1 <= chosen <= int(most):
            raise ValueError(f"found {chosen!r} of {most} threads, expected 1 to {most}")
    return {int(most): chosen for most, chosen in values.items()}

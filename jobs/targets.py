"""Loading of the target that a job's settings describe."""

from pathlib import Path
from typing import Any

import torch

from decoding.costs.timing import choose_threads
from decoding.interfaces import Target
from decoding.models.load import AUTO, load_target
from jobs.config import TargetConfig


def load_job_target(
    settings: TargetConfig, folder: Path, threads: object = 0, **changes: Any
) -> Target:
    """Load the target in `folder`, and with threads=auto choose their number by timing it.

    changes: arguments of `load_target` that the settings lack, or that replace theirs. Raises
    UserError as `load_target` does.
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
        most = torch.get_num_threads()
        print(f"threads: a step of the target is fastest with {choose_threads(target)} of {most}")
    return target

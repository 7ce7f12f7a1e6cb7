"""Additions of training jobs to jobs/protocol.py: the frozen target and the recorded loop."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from decoding.models.model_check import check_model
from jobs.protocol import Config, Job, Run
from jobs.tracker import track_run
from training.bounds import Progress
from training.config import TrainingJobConfig
from training.data.packing import PackedData
from training.loop import fit
from training.models.build import check_context, find_target_folder, target_config
from training.parallel.strategy import Parallel


class TargetJob(Job[Config]):
    """A job on a frozen target, whose dry run needs only the target's published configuration."""

    def __init__(self, config: Any) -> None:
        """Store the job's configuration, which has `target` and `data`, and read the target's.

        Raises UserError if the target's folder is missing (except in a dry run) or invalid.
        """
        super().__init__(config)
        self.target = target_config(config.target)
        self.target_folder = find_target_folder(config.target, config.dry_run)

    def prepare(self, run: Run) -> None:
        config: Any = self.config
        check_model(self.target_folder)
        check_context(config.target, config.data, self.target)


def fit_recorded(
    title: str,
    objective: Any,
    model: Any,
    data: PackedData,
    config: TrainingJobConfig,
    run: Run,
    parallel: Parallel,
    evaluate: Callable[[], dict[str, float]],
) -> Progress:
    """Train `model` with `training.loop.fit`, record metrics on rank 0, and return the progress."""
    is_main = parallel.is_main
    with track_run(run.folder, config, run.inputs) if is_main else nullcontext() as tracker:
        return fit(
            title, objective, model, data, config.loop, parallel, run.path, tracker, evaluate
        )

"""Protocol of a job that writes one artefact, in one or several ranks.

The job checks its configuration, opens the run folder, and then skips finished work, prints the
plan of a dry run, or does the work.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from jobs.amounts import PLANNED
from jobs.config import JobConfig
from jobs.launch import count_processes, launch
from jobs.ranks import is_rank
from jobs.run_folder import RunFolder

Config = TypeVar("Config", bound=JobConfig)


@dataclass(frozen=True)
class Run:
    """Open run folder with its artefact and inputs."""

    folder: RunFolder
    artefact: Path  # a file or a model folder in it
    inputs: list[Path]  # files and folders, for the manifest

    @property
    def path(self) -> Path:
        """Path of the run folder."""
        return self.folder.path


class Job(ABC, Generic[Config]):
    """One run of a job.

    `__init__` raises UserError for a configuration that the job cannot run, before the run folder
    is opened for it. `work` ends by writing a manifest that is marked as finished.
    """

    artefact: ClassVar[str]  # name in the run folder
    also: ClassVar[tuple[str, ...]] = ()  # names of further files whose hashes are recorded

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def inputs(self) -> list[Path]:
        """Return the files and folders that the job reads. Raises UserError for a missing one."""

    @abstractmethod
    def dry_run(self, run: Run) -> float | None:
        """Print the cost of a run, and write what needs neither weights nor data.

        Returns the number of floating-point operations: 0 if it depends on the data, None if it is
        not counted.
        """

    def prepare(self, run: Run) -> None:
        """Check what a real run needs, in the process that starts it and in each rank."""

    @abstractmethod
    def work(self, run: Run) -> None:
        """Do the work of one rank."""

    def run(self) -> Path:
        """Run the job, or the rest of an interrupted run. Returns the path of the artefact."""
        folder = RunFolder(self.config)
        artefact = folder.path / self.artefact
        if folder.finished(artefact, also=[folder.path / name for name in self.also]):
            print(f"finished before: {artefact}")
            return artefact
        run = Run(folder, artefact, self.inputs())
        if self.config.dry_run:
            folder.write_manifest(run.inputs, {}, finished=False)
            planned = self.dry_run(run)
            counted = {} if planned is None else {PLANNED: planned}
            folder.write_manifest(run.inputs, counted, finished=False)
            return artefact
        self.prepare(run)
        parallel = vars(self.config).get("parallel")
        processes = 1 if parallel is None else count_processes(parallel)
        if processes > 1 and not is_rank():
            launch(self.config.job, folder.path / "config.yaml", processes)
        else:
            self.work(run)
        return artefact

"""Start of every job: composition by Hydra, checks, and the call of the job's function.

A single run uses this process. Members of a sweep (`-m`) and stages of an experiment are fresh
processes, each on a saved config.yaml. They cannot disturb each other, and a user can repeat each.
"""

import errno
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from decoding.errors import UserError
from jobs import ranks
from jobs.aliases import current_arguments
from jobs.composing import (
    CONF,
    explain_missing,
    keep_search_path,
    register,
    search_folders,
    translate_errors,
)
from jobs.config import JobConfig, check_key, typed
from jobs.config_checks import check_job
from jobs.files import disk_error
from jobs.help import print_help
from jobs.interrupts import INTERRUPTED, REFUSED, Interrupted, Terminated, raise_on_signals
from jobs.malloc import keep_memory
from jobs.run_lock import lock_folder
from jobs.saved_config import upgrade_config
from jobs.stages import ON_FILE, check_required_settings, name_sweep_member, run_on_file, run_stages
from jobs.syntax import check_syntax
from jobs.tracker import check_tracker

Config = TypeVar("Config", bound=JobConfig)
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def job_main(
    job: str,
    schema: type[Config],
    function: Callable[[Config], Any],
    check: Callable[[Config], None] | None = None,
) -> None:
    """Run `python -m <job>` with Hydra overrides, or with `--config-file config.yaml`.

    check: raises UserError for a configuration that the job cannot run; called before the stages
    of an experiment, which may take hours.

    A UserError is printed without a traceback, with exit status 2. The status after a signal is
    130.
    """
    # A rank that waits in native code for another rank never raises the exception of SIGTERM.
    with raise_on_signals(by_sigterm=not ranks.is_rank()):
        exit_on_errors(lambda: _command(job, schema, function, check))


def _command(
    job: str,
    schema: type[Config],
    function: Callable[[Config], Any],
    check: Callable[[Config], None] | None,
) -> None:
    given = ranks.take_local_rank(sys.argv[1:])
    # Hydra takes -m only before or after all overrides; people type it anywhere.
    arguments = sorted(given, key=lambda argument: argument not in ("-m", "--multirun"))
    sys.argv[1:] = arguments
    if arguments[:1] == [ON_FILE]:
        if len(arguments) != 2:
            sys.exit(
                f"error: {ON_FILE} is followed by {arguments[1:]}, expected one file and no "
                f"overrides"
            )
        saved = OmegaConf.to_container(OmegaConf.load(arguments[1]))
        assert isinstance(saved, dict)
        run_typed(OmegaConf.create(upgrade_config(saved)), job, schema, function, check)
        return
    sys.argv[1:] = arguments = current_arguments(job, arguments)
    check_arguments(arguments, job, schema)
    if {"--help", "-h"} & {*arguments}:
        print_help(job, schema, _only_overrides(arguments))
        return
    register(job, schema)
    sweep = Sweep(job, schema, arguments)
    single: list[DictConfig] = []
    notes: list[str] = []

    def task(composed: DictConfig) -> None:
        keep_search_path(composed, HydraConfig.get().searchpath)
        is_member = HydraConfig.get().mode == RunMode.MULTIRUN
        notes.append(explain_missing(composed, HydraConfig.get().runtime.choices))
        (sweep.run if is_member else single.append)(composed)

    started = hydra.main(
        version_base="1.3", config_path=str(CONF), config_name=job.replace(".", "_")
    )(task)
    # Makes Hydra raise its errors instead of printing them with advice.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    translate_errors(started)
    if sweep.stopped is not None:
        raise sweep.stopped
    if single:  # outside of Hydra, whose frames would fill every traceback
        run_typed(single[0], job, schema, function, check, notes[0])
    if sweep.failed:
        sys.exit(
            f"error: {len(sweep.failed)} of the sweep's members failed: {'; '.join(sweep.failed)}. "
            f"Run the same command again"
        )


def run_typed(
    composed: DictConfig,
    job: str,
    schema: type[Config],
    function: Callable[[Config], Any],
    check: Callable[[Config], None] | None = None,
    note: str = "",
) -> Any:
    """Check a composed configuration, then run the job or its stages.

    check: see `job_main`. note: see `typed`.
    """
    config = typed(composed, schema, note)
    check_required_settings(composed)
    if config.job != job:
        raise wrong_job(config.experiment, config.job, job)
    check_job(config)
    prepare_process(config)
    ranks.adopt_slurm_rank(config)
    check_tracker(config)
    if config.stages:
        ranks.refuse_idle(config)
    elif ranks.is_idle_rank(config):
        return None
    if config.stages and check is not None:
        check(config)
    try:
        if not config.stages:
            return function(config)
        with lock_folder(Path(config.output_dir)):
            return run_stages(config, composed)
    except OSError as error:  # any file of the run: its log, its records, its report
        if error.errno not in _NO_ROOM:
            raise
        raise disk_error(Path(error.filename or config.output_dir), error) from error


def prepare_process(config: JobConfig) -> None:
    """Configure malloc, threads and progress bars before the first tensor exists."""
    keep_memory()
    # Without this DeepSpeed warns at every start that it found no GPU.
    if shutil.which("nvidia-smi") is None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    from transformers.utils import logging

    logging.disable_progress_bar()
    if config.threads not in (0, "auto"):
        import torch

        torch.set_num_threads(config.threads)


def check_arguments(arguments: list[str], job: str, schema: type[Any]) -> None:
    """Raise UserError for malformed overrides, unknown keys and an experiment of another job.

    The messages of Hydra give neither the position nor the nearest key.
    """
    check_syntax(arguments)
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    for argument in arguments:
        match = re.match(r"^(\+\+|\+|~)?([\w./@:]+)=", argument)
        if argument.startswith("-") or not match:
            continue
        key = match.group(2)
        if key == "experiment":
            if not match.group(1):
                raise UserError(f"an experiment needs a plus: +{argument}")
            folders = [CONF, *search_folders(arguments)]
            _check_experiment(argument.split("=", 1)[1], job, folders)
        elif key == "hydra/launcher" and argument.endswith("=slurm"):
            _check_slurm()
        elif not key.startswith(("hydra.", "hydra/")) and not (match.group(1) and key in groups):
            check_key(schema, key.split("."))


def _check_slurm() -> None:
    """Raise UserError if Hydra cannot submit the members of a sweep to Slurm."""
    if importlib.util.find_spec("submitit") is None:
        raise UserError(
            "hydra/launcher=slurm needs Hydra's submitit launcher. Run pip install -e '.[slurm]'"
        )
    if shutil.which("srun") is None:
        raise UserError(
            "hydra/launcher=slurm submits every member to Slurm, but srun is not on the PATH here. "
            "Run the same command on a node of the cluster, or remove hydra/launcher= to run the "
            "members here, one after another"
        )


def _check_experiment(name: str, job: str, folders: Sequence[Path]) -> None:
    for one in name.split(","):
        paths = [folder / "experiment" / f"{one}.yaml" for folder in folders]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            files = (file for path in paths for file in path.parent.glob("*.yaml"))
            known = sorted({file.stem for file in files})
            raise UserError(f"experiment '{one}' is unknown, expected one of {', '.join(known)}")
        try:
            belongs = OmegaConf.to_container(OmegaConf.load(path)).get("job")  # type: ignore[union-attr]
        except yaml.YAMLError as error:
            raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        if belongs is not None and belongs != job:  # a file without a job suits several
            raise wrong_job(one, str(belongs), job)


def wrong_job(experiment: str, right: str, called: str) -> UserError:
    """Return the error for an experiment that belongs to another job."""
    return UserError(
        f"experiment '{experiment}' belongs to {right}, not to {called}. Run python -m {right} "
        f"+experiment={experiment}"
    )


class Sweep:
    """Members of a sweep, run one after another; several ranks run each member together."""

    def __init__(self, job: str, schema: type[JobConfig], arguments: list[str]) -> None:
        self.job, self.schema = job, schema
        self.failed: list[str] = []  # descriptions of the failed members
        overrides = OverridesParser.create().parse_overrides(_only_overrides(arguments))
        self._varying = {one.key_or_group for one in overrides if one.is_sweep_override()}
        self.stopped: Interrupted | None = None  # by a signal
        self._count = 0
        self._barrier: ranks.RankBarrier | None = None

    def run(self, composed: DictConfig) -> None:
        """Run one member in a new folder and process. A failure does not stop the other members.

        A signal does, but Hydra would report it as an error of the job, so it is kept in `stopped`.
        Under a launcher other than Hydra's default, such as submitit, members do not share the list
        of failures, so a failure raises UserError.
        """
        if self.stopped is not None:
            return
        try:
            self._run(composed)
        except Interrupted as stop:
            if not _is_local():
                raise
            self.stopped = stop

    def _run(self, composed: DictConfig) -> None:
        varying = [
            text
            for text in HydraConfig.get().overrides.task
            if text.lstrip("+").split("=")[0] in self._varying
        ]
        plain = composed.copy()
        # Hydra's record of the sweep is not needed: every member has its config.yaml.
        Path(str(plain["output_dir"]), "multirun.yaml").unlink(missing_ok=True)
        name_sweep_member(plain, varying)
        config = typed(plain, self.schema)
        if self._barrier is None:
            ranks.adopt_slurm_rank(config)
            ranks.refuse_idle(config)
            self._barrier = ranks.RankBarrier()
        self._count += 1
        status = run_on_file(plain, self.job, self._barrier.environment(self._count))
        self._barrier.wait(f"member {self._count}")
        if status == 0:
            return
        folder = Path(config.output_dir)
        self.failed.append(f"'{folder.name}' with status {status} ({folder})")
        if not _is_local():
            raise UserError(f"a member of the sweep failed: {self.failed[-1]}")


def _is_local() -> bool:
    """Whether Hydra's default launcher runs the members of a sweep, all in this process."""
    return str(HydraConfig.get().launcher._target_).endswith("BasicLauncher")


def _only_overrides(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if "=" in argument and not argument.startswith("-")]


def exit_on_errors(action: Callable[[], Any]) -> Any:
    """Call `action` and return its result; print a UserError or an interrupt, and exit."""
    try:
        return action()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    except Interrupted as stop:
        print(f"interrupted: {stop}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt as stop:
        # Outside of the training loop all files are complete.
        by = " (SIGTERM)" if isinstance(stop, Terminated) else ""
        print(
            f"interrupted: finished work is kept. Run the same command to continue{by}",
            file=sys.stderr,
        )
        sys.exit(INTERRUPTED)

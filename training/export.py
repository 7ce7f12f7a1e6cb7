"""Write the drafter folder of a named checkpoint, without training."""

from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from decoding.errors import UserError
from jobs.config import typed
from jobs.run_lock import CONFIG
from jobs.saved_config import read_config, upgrade_config
from training.bounds import Progress
from training.checkpoint import STATE, Checkpoint, load

Config = TypeVar("Config")


def saved_run(config: Config, checkpoint: str) -> tuple[Config, Path]:
    """Return the configuration of the run that wrote a checkpoint, and the folder to export to.

    config: the configuration of this command, of the same job. checkpoint: RUN/checkpoints/STEP.
    Raises UserError if it is no checkpoint, or belongs to another job.
    """
    path = Path(checkpoint)
    if not (path / STATE).is_file():
        names = sorted(each.parent.name for each in path.parent.glob(f"step_*/{STATE}"))
        beside = f"; {path.parent} has {', '.join(names)}" if names else ""
        raise UserError(
            f"checkpoint={checkpoint} is not a complete checkpoint{beside}. Name one as "
            f"checkpoint=RUN/checkpoints/step_000100"
        )
    run = path.absolute().parent.parent
    saved = read_config(run / CONFIG, "Restore it: it describes the model of the checkpoints")
    given: Any = config
    if saved["job"] != given.job:
        raise UserError(
            f"checkpoint={checkpoint} belongs to a run of {saved['job']}, expected {given.job}. "
            f"Run python -m {saved['job']} checkpoint={checkpoint}"
        )
    if saved.get("kind") != vars(given).get("kind"):
        raise UserError(
            f"checkpoint={checkpoint} belongs to a head of kind {saved.get('kind')}. Add "
            f"head={saved.get('kind')}"
        )
    found = typed(OmegaConf.create(upgrade_config(saved)), type(config))
    return found, run / "exports" / path.name


def refuse_stages(checkpoint: str) -> None:
    """Raise UserError if an experiment of several stages is given a checkpoint to export."""
    if checkpoint:
        raise UserError(
            f"checkpoint={checkpoint} writes one drafter folder and runs no stages. Remove "
            f"+experiment: the settings are those of the checkpoint's run"
        )


def load_checkpoint(checkpoint: str) -> tuple[Checkpoint, Progress, dict[str, float]]:
    """Return a checkpoint, its progress and its held-out figures, which are empty if it has none.

    Raises UserError for a damaged checkpoint.
    """
    found = load(Path(checkpoint))
    progress = Progress(**found.state)
    return found, progress, progress.figures_of(progress.step) or {}

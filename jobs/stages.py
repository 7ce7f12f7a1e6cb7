"""Experiments of several jobs: each stage is `python -m <stage>` in a separate process.

Stages communicate only through folders. A stage inherits every key that it shares with the
experiment (jobs/inheritance.py) and writes to OUTPUT_DIR/<stage>. Its `stage_overrides` hold the
differences. A group for which they choose a file of conf/ (`parallel=single`, `head=medusa`) is not
inherited.

All stages are composed before the first one starts, so an error in the last one is found at once.
The manifest of a finished stage makes it skip its work. Where several ranks run an experiment
(torchrun, Slurm), they start every stage together, and rank 0 runs a stage of one process.
"""

import functools
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from decoding.errors import UserError
from jobs.amounts import PLANNED, collect_planned_seconds, hours, operations
from jobs.composing import (
    CONF,
    compose_job,
    search_folders,
    search_path_overrides,
    translate_errors,
)
from jobs.config import JobConfig, leaves, typed
from jobs.inheritance import inherited_keys
from jobs.launch import run_child
from jobs.ranks import RankBarrier
from jobs.schemas import schema_of

ON_FILE = "--config-file"
SWEEP = "-m"
# stands for the experiment's folder while Hydra, whose grammar may reject its name, parses
_FOLDER = "_output_dir_of_the_experiment_"


@dataclass(frozen=True)
class Stage:
    """Stage of an experiment: a job and its configurations, one per member of a sweep."""

    name: str
    job: str
    schema: type[JobConfig]  # of the last member; a sweep over kinds of heads has several
    members: list[DictConfig]


@dataclass(frozen=True)
class StageOverride:
    """Override of a stage."""

    key: str
    values: list[tuple[str, Any]]  # (text, value) pairs, several in a sweep
    replaces: bool = False  # the value replaces a group instead of being merged into it

    @property
    def chooses_file(self) -> bool:
        """Whether the override chooses a file of conf/."""
        (text, value), *_ = self.values
        return text.startswith("~") or (isinstance(value, str) and (CONF / self.key).is_dir())


def run_stages(config: JobConfig, composed: DictConfig) -> None:
    """Run `config.stages` in order. Raises UserError, which names the stage, if one fails."""
    stages = [compose_stage(name, config, composed) for name in config.stages]
    if not config.dry_run:
        _run_all(stages, RankBarrier())
        return
    barrier, started = RankBarrier(), time.time()
    with collect_planned_seconds() as file:
        _run_all(stages, barrier)
        answers = sum(map(float, file.read_text().split()))
    if barrier.rank == 0:
        folders = [str(member.output_dir) for stage in stages for member in stage.members]
        _print_total([config.output_dir, *folders], started, answers)


def _run_all(stages: Sequence[Stage], barrier: RankBarrier) -> None:
    number = 0
    for position, stage in enumerate(stages, start=1):
        if barrier.rank == 0:
            print(f"[{position}/{len(stages)}] {stage.name}", flush=True)
        failed = []
        for member in stage.members:
            number += 1
            status = run_on_file(member, stage.job, barrier.environment(number))
            if status != 0:
                failed.append(f"status {status} ({member.output_dir})")
            if status == 0 or len(stage.members) > 1:  # other members of a sweep still run
                barrier.wait(f"stage {number}")
        if failed:
            raise UserError(
                f"stage {position} ({stage.name}) ended with {', '.join(failed)}. Fix the cause "
                f"and run the same command: finished stages are skipped"
            )


def compose_stage(name: str, config: JobConfig, composed: DictConfig) -> Stage:
    """Compose a stage from its job's defaults, its files of conf/, inherited keys and overrides.

    name: a job, or `job:label` if a job occurs twice. Raises UserError, which names the stage, if
    the configuration does not compose or is invalid.
    """
    job, _, label = name.partition(":")
    try:
        given = _parse_overrides(name, config, composed)
        files = [one for one in given if one.chooses_file]
        others = [one for one in given if not one.chooses_file]
        sweeps = SWEEP in config.stage_overrides.get(name, [])
        schema, members = type(config), []
        for texts in itertools.product(*([text for text, _ in one.values] for one in files)):
            chosen = dict(zip((one.key for one in files), texts, strict=True))
            base, schema = _compose_base(job, config, composed, chosen)
            base.output_dir = os.path.join(config.output_dir, label or name)
            varying = [text for one, text in zip(files, texts, strict=True) if len(one.values) > 1]
            found = [*_sweep_members(base, others, sweeps, varying)]
            for member in found:
                typed(member, schema)
            members += found
    except UserError as error:
        raise UserError(f"stage {name}: {error}") from error
    return Stage(name, job, schema, members)


def _compose_base(
    job: str, config: JobConfig, composed: DictConfig, chosen: Mapping[str, str]
) -> tuple[DictConfig, type[JobConfig]]:
    """Compose a stage without its other overrides, and return its configuration class too.

    chosen: group -> override that chooses its file of conf/.
    """
    texts = [*chosen.values(), *search_path_overrides(composed)]
    is_called_job, has_own_experiment = job == config.job, "experiment" in chosen
    schema = type(config) if is_called_job and not chosen else schema_of(job, texts)
    base = compose_job(job, schema, texts)
    OmegaConf.set_struct(base, False)
    folders = (CONF, *search_folders(texts))
    keys = [key for one in chosen.items() for key in _keys_written_by(*one, folders)]
    written = {key: OmegaConf.select(base, key) for key in keys}
    # A stage of the called job keeps unresolved values (`${...}`) as they are written.
    resolved = has_own_experiment or not is_called_job
    found: Any = OmegaConf.to_container(composed, resolve=resolved)
    for key in inherited_keys(type(config), schema, is_called_job, has_own_experiment):
        group, *inner = key.split(".")
        if group not in chosen:
            value = functools.reduce(dict.__getitem__, inner, found[group])
            OmegaConf.update(base, key, value, merge=False)
    for key, value in written.items():
        OmegaConf.update(base, key, value, merge=False)
    base.stages, base.stage_overrides = [], {}
    return base, schema


def _parse_overrides(name: str, config: JobConfig, composed: DictConfig) -> list[StageOverride]:
    """Parse the overrides of a stage; `-m` among them allows several values (`key=1,2`).

    In an override, `{output_dir}` means the experiment's folder, `${key}` the experiment's value of
    a key, and `@{key}` the stage's value.
    """
    written: Any = OmegaConf.to_container(composed.stage_overrides, resolve=False)
    raw, given = written.get(name, []), []
    for text, resolved in zip(raw, config.stage_overrides.get(name, []), strict=True):
        forwarded = re.fullmatch(r"\+*([\w.]+)=\$\{([\w.]+)\}", text)
        node = OmegaConf.select(composed, forwarded[2]) if forwarded else None
        if forwarded and OmegaConf.is_config(node):
            value = OmegaConf.to_container(node, resolve=True)
            given.append(StageOverride(forwarded[1], [(text, value)], replaces=True))
        elif text != SWEEP:
            given.append(_parse_override(resolved, config.output_dir, SWEEP in raw))
    return given


def _keys_written_by(group: str, text: str, folders: Sequence[Path]) -> Iterator[str]:
    """Yield the dotted keys that a file with `@package _global_` sets, such as a head's loss.

    Those of the files of the same group in its defaults are included. text: override that chooses
    the file. folders: conf/ and the folders that are searched after it.
    """
    paths = (folder / group / f"{text.partition('=')[2]}.yaml" for folder in folders)
    file = next((path for path in paths if path.is_file()), None)
    if group == "experiment" or file is None or "@package _global_" not in file.read_text():
        return
    written = yaml.safe_load(file.read_text())
    for one in written.pop("defaults", None) or []:
        if isinstance(one, str) and one != "_self_":
            yield from _keys_written_by(group, f"={one.rpartition('/')[2]}", folders)
    yield from (".".join(path) for path, _ in leaves(written))


def _parse_override(text: str, folder: str, sweeps: bool) -> StageOverride:
    """Parse one override with Hydra's grammar."""
    parser = OverridesParser.create()
    text = text.replace("{output_dir}", _FOLDER).replace("@{", "${")
    override = translate_errors(lambda: parser.parse_override(text))
    texts = [text]
    if override.is_sweep_override():
        if not sweeps:
            raise UserError(
                f"'{text}' has several values: add {SWEEP} to the overrides of the stage"
            )
        texts = [f"{override.get_key_element()}={one}" for one in override.sweep_string_iterator()]
    values = [_insert_folder(parser.parse_override(one).value(), folder) for one in texts]
    texts = [one.replace(_FOLDER, folder) for one in texts]
    return StageOverride(override.key_or_group, list(zip(texts, values, strict=True)))


def _insert_folder(value: Any, folder: str) -> Any:
    if isinstance(value, list):
        return [_insert_folder(one, folder) for one in value]
    if isinstance(value, dict):
        return {key: _insert_folder(one, folder) for key, one in value.items()}
    return value.replace(_FOLDER, folder) if isinstance(value, str) else value


def _sweep_members(
    base: DictConfig, given: Sequence[StageOverride], sweeps: bool, varying: Sequence[str]
) -> Iterator[DictConfig]:
    """Yield one configuration for each combination of the overrides' values.

    varying: overrides of files that differ between members, whose folders are named after them too.
    """
    for values in itertools.product(*(one.values for one in given)):
        member = base.copy()
        for one, (_, value) in zip(given, values, strict=True):
            OmegaConf.update(member, one.key, value, merge=not one.replaces)
        texts = [text for one, (text, _) in zip(given, values, strict=True) if len(one.values) > 1]
        yield name_sweep_member(member, [*varying, *texts]) if sweeps else member


def name_sweep_member(config: DictConfig, varying: Sequence[str]) -> DictConfig:
    """Set the folder of a sweep's member, and its group in Weights & Biases.

    varying: the overrides that differ between members; the folder is named after them. A group that
    is already set is kept.
    """
    name = ",".join(text.lstrip("+") for text in varying) or "member"
    config.output_dir = os.path.join(str(config.output_dir), re.sub(r"[^\w.,=+-]+", "_", name))
    if "tracker" in config and not config.tracker.group:
        config.tracker.group = str(config.experiment)
    return config


def _print_total(folders: Sequence[str], started: float, answers: float) -> None:
    """Print the total cost of the dry runs of all stages and sweep members.

    folders: run folders, searched for manifests with all folders inside them. started: time in
    seconds since the epoch before the first dry run; older manifests do not count. Each cost is
    converted to hours with the assumed_tflops of its run. answers: seconds of the target's answers.
    """
    found = {path.resolve() for folder in folders for path in Path(folder).glob("**/manifest.json")}
    costs, unknown = [], 0  # (operations, assumed TFLOP/s) of a dry run
    for path in found:
        if path.stat().st_mtime < started:
            continue
        planned = json.loads(path.read_text())["metrics"].get(PLANNED)
        pace = yaml.safe_load(path.with_name("config.yaml").read_text()).get("assumed_tflops")
        unknown += planned == 0.0
        if planned and pace:
            costs.append((planned, pace))
    parts = []
    if costs:
        missing = f", without {unknown} whose tokens depend on the data" if unknown else ""
        seconds = sum(planned / pace / 1e12 for planned, pace in costs)
        at = " and ".join(f"{pace:g}" for pace in sorted({pace for _, pace in costs}))
        parts = [
            f"{operations(sum(planned for planned, _ in costs))}, {hours(seconds)} at {at} TFLOP/s "
            f"(assumed_tflops){missing}"
        ]
    if answers:
        parts.append(f"at most {hours(answers)} for the target's answers")
    if parts:
        print(f"all stages together: {', and '.join(parts)}; evaluations are not counted")


def check_required_settings(composed: DictConfig) -> None:
    """Raise UserError for an empty setting that the experiment needs.

    Such a setting is empty by default, and the experiment refers to it as `${key}`.
    """
    written = str(OmegaConf.to_container(composed, resolve=False))
    for key in dict.fromkeys(re.findall(r"\$\{(\w+)\}", written)):
        if key in composed and composed[key] == "":
            raise UserError(
                f"{key} is empty, but experiment '{composed.experiment}' needs it. Set {key}=...; "
                f"the top of its file in conf/experiment describes it."
            )


def run_on_file(composed: DictConfig, job: str, environment: dict[str, str] | None = None) -> int:
    """Run `python -m <job>` on a saved configuration in a fresh process. Returns its exit status.

    environment: variables of the new process; None: as in this one. Raises Interrupted if a signal
    stopped it.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        file.write(OmegaConf.to_yaml(composed))
    try:
        return run_child([sys.executable, "-m", job, ON_FILE, file.name], job, environment)
    finally:
        os.unlink(file.name)

"""Experiments that span several jobs: each stage is `python -m <stage>` in a process of its own,
folder to folder.

Stages talk only through folders. A stage that is the called job itself runs on the composed
configuration, so overrides and sweeps reach it, with its own values put in; the others, and stages
with more than values (`-m`, `+experiment=...`) among their overrides, are given by these alone. A
finished stage passes over its work by itself (its manifest says so). Where several ranks run an
experiment (torchrun, Slurm), all start every stage together, and a stage of one process is rank
0's.
"""

import ast
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from decoding.errors import UserError
from jobs.amounts import PLANNED, hours, operations
from jobs.config import JobConfig
from jobs.launch import run_child
from jobs.ranks import Meeting

ON_FILE = "--config-file"


def run_stages(config: JobConfig, composed: DictConfig) -> None:
    """Run `config.stages` in order; a stage is a job, or `job:label` where a job comes twice.

    `stage_overrides[stage]` are a stage's overrides; `{output_dir}` in them is this run's folder,
    and `@{key}` the stage's own value of a key (as `${key}` is this job's). Raises UserError naming
    the stage that failed.
    """
    meeting, started, given = Meeting(), time.time(), []
    for number, stage in enumerate(config.stages, start=1):
        if meeting.rank == 0:
            print(f"[{number}/{len(config.stages)}] {stage}", flush=True)
        job, _, label = stage.partition(":")
        overrides = [
            text.replace("{output_dir}", config.output_dir).replace("@{", "${")
            for text in config.stage_overrides.get(stage, [])
        ]
        given.append(overrides)
        if job == config.job and all(re.match(r"[\w.]+=", text) for text in overrides):
            own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
            own.stages, own.stage_overrides, own.output_dir = (
                [],
                {},
                os.path.join(config.output_dir, label or stage),
            )
            for text in overrides:
                key, _, value = text.partition("=")
                OmegaConf.update(own, key, yaml.safe_load(value))
            status = run_on_file(own, job, meeting.environment(number))
        else:
            shared = [
                f"seed={config.seed}",
                f"threads={config.threads}",
                f"dry_run={str(config.dry_run).lower()}",
            ]
            command = [sys.executable, "-m", job, *map(_hydras, overrides), *shared]
            status = run_child(command, stage, meeting.environment(number))
        if status != 0:
            raise UserError(
                f"stage {number} ({stage}) ended with status {status}; mend it and run the same "
                f"command: finished stages are passed over"
            )
        meeting.wait(f"stage {number}")
    if config.dry_run and meeting.rank == 0:
        _say_total(_output_dirs(config, given), started)


def _say_total(folders: Sequence[str], started: float) -> None:
    """What the dry runs of all stages, and of all members of their sweeps, counted together, each
    at the pace that it assumes.
    """
    found = {path.resolve() for folder in folders for path in Path(folder).glob("**/manifest.json")}
    planned = {
        path: json.loads(path.read_text())["metrics"].get(PLANNED)
        for path in found
        if path.stat().st_mtime >= started
    }
    paces = {
        path: yaml.safe_load(path.with_name("config.yaml").read_text()).get("assumed_tflops")
        for path in planned
    }
    counted = {path: flops for path, flops in planned.items() if flops and paces[path]}
    if counted:
        unknown = [*planned.values()].count(0.0)
        missing = f", without {unknown} whose data alone tells its tokens" if unknown else ""
        seconds = sum(flops / paces[path] / 1e12 for path, flops in counted.items())
        at = " and ".join(f"{pace:g}" for pace in sorted({paces[path] for path in counted}))
        told = (
            f"{operations(sum(counted.values()))}, {hours(seconds)} at {at} TFLOP/s "
            f"(assumed_tflops)"
        )
        print(f"all stages together: {told}{missing}; evaluations are not counted")


def _output_dirs(config: JobConfig, stages: Sequence[Sequence[str]]) -> list[str]:
    """The folders that an experiment's stages write to: its own, and those that overrides name."""
    named = [
        text.partition("=")[2]
        for overrides in stages
        for text in overrides
        if text.startswith("output_dir=")
    ]
    return [config.output_dir, *named]


def _hydras(override: str) -> str:
    """An override whose value was interpolated from a mapping, which OmegaConf writes as Python
    does, as Hydra reads it.
    """
    key, equals, value = override.partition("=")
    if not value.startswith("{"):
        return override
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):  # Hydra's own form
        return override
    return f"{key}{equals}{_hydra_value(found)}"


def _hydra_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra_value, value)) + "]"
    return json.dumps(value)


def check_given(composed: DictConfig) -> None:
    """Raise UserError for a setting that the experiment asks of its caller (`${key}`, empty by
    default) and that was not given.
    """
    written = str(OmegaConf.to_container(composed, resolve=False))
    for key in dict.fromkeys(re.findall(r"\$\{(\w+)\}", written)):
        if key in composed and composed[key] == "":
            raise UserError(
                f"{key} is empty, but experiment '{composed.experiment}' builds on it: give "
                f"{key}=... (its head in conf/experiment says what)."
            )


def run_on_file(composed: DictConfig, job: str, environment: dict[str, str] | None = None) -> int:
    """`python -m <job>` on a saved configuration, in a fresh process; environment None: ours.
    Returns its exit status.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        file.write(OmegaConf.to_yaml(composed))
    try:
        return run_child([sys.executable, "-m", job, ON_FILE, file.name], job, environment)
    finally:
        os.unlink(file.name)

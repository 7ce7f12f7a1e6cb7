"""Typed configuration: one dataclass for each job.

Hydra composes plain YAML, and `typed` checks the result against the job's dataclass. This also
catches unknown keys given as `+key=` and those in experiment files, which Hydra accepts. The error
for an unknown key suggests the nearest valid one.
"""

import dataclasses
import difflib
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from decoding.errors import UserError
from jobs.aliases import current_config

Schema = TypeVar("Schema")


@dataclass
class JobConfig:
    """Settings that every job has."""

    SHARED: ClassVar = ("seed", "dry_run", "threads")  # what stages inherit (jobs/inheritance.py)

    job: str = MISSING  # the module that runs this configuration, such as distill.train
    experiment: str = "default"  # name of the experiment file, and of the run folder
    output_dir: str = MISSING  # run folder: configuration, manifest, metrics, checkpoints, artefact
    seed: int = 0  # seeds weights, data order and drafting noise
    # say what would be done and what it costs, write what needs no weights or data
    dry_run: bool = False
    threads: int = 0  # CPU threads of PyTorch; 0 leaves PyTorch's own choice
    # jobs to run one after another, folder to folder, instead of this one
    stages: list[str] = field(default_factory=list)
    # of a stage in `stages`: what it sees otherwise than this experiment
    stage_overrides: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class TargetConfig:
    """Target, which stays exact in decoding and frozen in training."""

    path: str = MISSING  # model folder in Hugging Face form
    # its published config.json (conf/target); a dry run takes it where `path` is not there
    config: dict[str, Any] = field(default_factory=dict)
    backend: str = "native"  # native | hf
    # eager | compiled | graph (native alone); empty: graph where it can be, on a GPU, else eager
    execution: str = ""
    dtype: str = "float32"  # float32 | bfloat16 | float16 | float64
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    max_length: int = 0  # context in tokens; 0 takes the model's own
    # none | tp (cut every layer) | layers (some each): how processes share it, in eval.run
    parallel: str = "none"
    # that share a parallel target; 0: one a visible GPU; on a CPU it wants a number
    processes: int = 0
    # run Python that lies in the target's folder (backend=hf), where you trust it
    trust_remote_code: bool = False


@dataclass
class ParallelConfig:
    """Number of training processes, and how they share the work."""

    # single | ddp | zero1 | zero2 | zero3 (DeepSpeed) | fsdp (torch): what ranks share
    kind: str = "single"
    # ranks to start on this machine; 0: one a visible GPU; on a CPU it wants a number
    processes: int = 0
    # auto: our own ranks, or those that torchrun started | slurm: the tasks of srun
    launcher: str = "auto"
    timeout_seconds: int = 600  # a collective that waits longer ends the job


@dataclass
class TrackerConfig:
    """Mirrors of metrics.jsonl."""

    wandb: str = "disabled"  # online | offline | disabled
    project: str = "shallow-draft"  # Weights & Biases project
    group: str = ""  # Weights & Biases group, one a sweep
    name: str = ""  # of the Weights & Biases run; empty: the experiment's
    tensorboard: bool = False  # write tensorboard event files beside the metrics


# Groups that say where and on what a job works, and where it reports; not what it does.
SETTING = (TargetConfig, ParallelConfig, TrackerConfig)


def typed(composed: DictConfig, schema: type[Schema]) -> Schema:
    """Convert a composed configuration to an instance of `schema`.

    Raises UserError for unknown keys (with the nearest valid one), wrong types and missing values.
    """
    container = OmegaConf.to_container(composed, resolve=False)
    if not isinstance(container, dict):
        raise UserError(f"a configuration is a mapping of keys, found {type(container).__name__}")
    plain = current_config({key: value for key, value in container.items() if key != "hydra"})
    _check_keys(plain, schema, "")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(plain))
        OmegaConf.resolve(merged)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(
                f"no value for {', '.join(missing)}: give it on the command line, such as "
                f"{missing[0]}=..."
            )
        return typing.cast(Schema, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "?"
        if "is not a ListConfig" in str(error):
            found = OmegaConf.select(OmegaConf.create(plain), key)
            raise UserError(
                f"configuration key '{key}' is {found}, expected a list: {key}=[{found}]"
            ) from error
        raise UserError(f"configuration key '{key}': {str(error).splitlines()[0]}") from error


def refuse_parallel(target: TargetConfig) -> None:
    """Raise UserError for a job that cannot use a target in several processes."""
    if target.parallel != "none" or target.processes > 1:
        raise UserError(
            f"target.parallel is {target.parallel} with target.processes={target.processes}, "
            f"expected none and 0: this job loads the target in one piece; eval.run is the one "
            f"that splits it"
        )


def valid_keys(schema: type[Any], prefix: str = "") -> list[str]:
    """Return all dotted keys of `schema`, groups included."""
    keys = []
    for name, kind in fields_of(schema).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(kind):
            keys += valid_keys(typing.cast(type[Any], kind), prefix + name + ".")
    return keys


def open_fields(schema: type[Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> entry type for all fields that hold a mapping or a list."""
    found: dict[str, Any] = {}
    for name, kind in fields_of(schema).items():
        if dataclasses.is_dataclass(kind):
            found |= open_fields(typing.cast(type[Any], kind), prefix + name + ".")
        elif typing.get_origin(kind) in (dict, list):
            found[prefix + name] = typing.get_args(kind)[-1]
    return found


def unknown_key(key: str, choices: list[str]) -> UserError:
    """Return the error for an unknown key, with the nearest valid one."""
    near = difflib.get_close_matches(key, choices, n=1, cutoff=0.0)
    leaf = [choice for choice in choices if choice.split(".")[-1] == key.split(".")[-1]]
    best = (leaf or near or [""])[0]
    return UserError(
        f"unknown configuration key '{key}'; the nearest valid key is '{best}' (--help lists all)"
    )


def plain(config: Any) -> dict[str, Any]:
    """Convert a dataclass configuration to dicts and lists, ready for YAML and JSON."""
    return dataclasses.asdict(config)


def fields_of(schema: type[Any]) -> dict[str, Any]:
    """Return the names and types of a dataclass's fields, in order."""
    hints = typing.get_type_hints(schema)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(schema)}


def _check_keys(node: Any, schema: type[Any], prefix: str) -> None:
    kinds = fields_of(schema)
    for key, value in node.items():
        if key not in kinds:
            raise unknown_key(prefix + str(key), [prefix + name for name in valid_keys(schema)])
        kind = kinds[key]
        if dataclasses.is_dataclass(kind) and isinstance(value, dict | DictConfig):
            _check_keys(value, typing.cast(type[Any], kind), f"{prefix}{key}.")
        inner = typing.get_args(kind)[-1] if typing.get_origin(kind) is dict else None
        if dataclasses.is_dataclass(inner) and isinstance(value, dict):  # name -> dataclass
            for name, entry in value.items():
                if isinstance(entry, dict):
                    _check_keys(entry, typing.cast(type[Any], inner), f"{prefix}{key}.{name}.")

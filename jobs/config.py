"""Typed configuration: one dataclass for each job.

Hydra composes plain YAML, and `typed` checks the result against the job's dataclass. The check also
finds unknown keys in experiment files and in `+key=`, which Hydra accepts.
"""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
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

    # Stages inherit these (jobs/inheritance.py).
    SHARED: ClassVar = ("seed", "dry_run", "threads")
    UNREAD: ClassVar[tuple[str, ...]] = ()  # keys that the job ignores: they may differ on resume
    OPTIONAL_PATHS: ClassVar[tuple[str, ...]] = ()  # paths that may be empty

    # module that runs this configuration, such as distill.train
    job: str = MISSING
    # name of the experiment file and of the run folder
    experiment: str = "default"
    # run folder: configuration, manifest, metrics, checkpoints, artefact
    output_dir: str = MISSING
    # seed of weights, data order and drafting noise
    seed: int = 0
    # print the plan and its cost, and write what needs neither weights nor data
    dry_run: bool = False
    # CPU threads; 0: PyTorch's default; auto: jobs that decode time the target with one and with
    # the default, and take the faster; a resumed run keeps its choice
    threads: Any = 0
    # jobs to run one after another, folder to folder, instead of this one
    stages: list[str] = field(default_factory=list)
    # stage -> overrides in which it differs from this experiment
    stage_overrides: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class TargetConfig:
    """Target, which stays exact in decoding and frozen in training."""

    # model folder in Hugging Face form, a GGUF file (eval.run, eval.replay, distill.regenerate,
    # recurrent_drafting.generate), or a name on the Hub: OWNER/NAME or OWNER/NAME@REVISION
    path: str = MISSING
    # its published config.json (conf/target), for a dry run where `path` does not exist
    config: dict[str, Any] = field(default_factory=dict)
    # native | hf; a GGUF file runs in llama.cpp (llama_cpp)
    backend: str = "native"
    # eager | fused (native on a CPU) | graph (native on a GPU) | compiled | auto: the fastest
    execution: str = "auto"
    # float32 | bfloat16 | float16 | float64; of a GGUF file, the dtype of its cache
    dtype: str = "float32"
    # auto | cpu | cuda | cuda:N
    device: str = "auto"
    # context in tokens; 0: the model's own
    max_length: int = 0
    # none | tp (split every layer) | layers (split by layers): sharing among processes (eval.run)
    parallel: str = "none"
    # number of processes of a parallel target; 0: one per visible GPU; required on a CPU
    processes: int = 0
    # run the Python files in the target's folder (backend=hf); set it only if you trust them
    trust_remote_code: bool = False


@dataclass
class ParallelConfig:
    """Number of training processes, and how they share the work."""

    # single | ddp | zero1 | zero2 | zero3 (DeepSpeed) | fsdp (torch)
    kind: str = "single"
    # ranks to start on this machine; 0: one per visible GPU; required on a CPU
    processes: int = 0
    # auto: ranks of the job itself or of torchrun | slurm: the tasks of srun
    launcher: str = "auto"
    # longest wait of a collective before the job ends
    timeout_seconds: int = 600


@dataclass
class TrackerConfig:
    """Mirrors of metrics.jsonl."""

    # online | offline | disabled
    wandb: str = "disabled"
    # Weights & Biases project
    project: str = "shallow-draft"
    # Weights & Biases group, one per sweep
    group: str = ""
    # name of the Weights & Biases run; empty: the experiment's name
    name: str = ""
    # write tensorboard event files next to metrics.jsonl
    tensorboard: bool = False


# Groups that describe a job's target, processes and tracker, not its task.
SETTING = (TargetConfig, ParallelConfig, TrackerConfig)


def typed(composed: DictConfig, schema: type[Schema], note: str = "") -> Schema:
    """Convert a composed configuration to an instance of `schema`.

    note: what an error for missing values adds, with a space before it. Raises UserError for
    unknown keys (naming the nearest valid one), wrong types and missing values.
    """
    container = OmegaConf.to_container(composed, resolve=False)
    if not isinstance(container, dict):
        raise UserError(
            f"the configuration is a {type(container).__name__}, expected a mapping of keys"
        )
    plain = current_config({key: value for key, value in container.items() if key != "hydra"})
    for path, value in leaves(plain):
        check_key(schema, path, value)
    try:
        merged = OmegaConf.merge(structured(schema), OmegaConf.create(plain))  # type: ignore[arg-type]
        OmegaConf.resolve(merged)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise UserError(
                f"no value for {', '.join(missing)}. Set it on the command line, such as "
                f"{missing[0]}=VALUE{note and '.'}{note}"
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


@functools.cache
def structured(schema: type[Any]) -> DictConfig:
    """Return a schema as a configuration to merge into, which copies it.

    Reading a dataclass takes OmegaConf 30 ms.
    """
    found = OmegaConf.structured(schema)
    assert isinstance(found, DictConfig)
    return found


def refuse_parallel(target: TargetConfig) -> None:
    """Raise UserError if a target is split among processes, which only eval.run supports."""
    if target.parallel != "none" or target.processes > 1:
        raise UserError(
            f"target.parallel is {target.parallel} with target.processes={target.processes}, "
            f"expected none and 0. Only eval.run splits the target among processes"
        )


def valid_keys(schema: type[Any], prefix: str = "") -> list[str]:
    """Return all dotted keys of `schema`, groups included."""
    keys = []
    for name, kind in fields_of(schema).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(kind):
            keys += valid_keys(typing.cast(type[Any], kind), f"{prefix}{name}.")
    return keys


def check_key(schema: type[Any], path: Sequence[str], value: Any = None, prefix: str = "") -> None:
    """Raise UserError, with the nearest valid key, for a key that `schema` does not have.

    path: parts of the dotted key. value: its value; a group of keys has none. prefix: dotted key of
    `schema` inside the job's, with its dot. The entries of a mapping or a list may have any name.
    """
    name, *rest = path
    kind = fields_of(schema).get(name)
    if type(None) in typing.get_args(kind):  # an optional field
        (kind,) = (one for one in typing.get_args(kind) if one is not type(None))
    inner = f"{prefix}{name}."
    if dataclasses.is_dataclass(kind):
        group = typing.cast(type[Any], kind)
        if rest:
            check_key(group, rest, value, inner)
        elif value is not None and not isinstance(value, Mapping):
            raise UserError(
                f"configuration key '{prefix}{name}' is {value}, but it is a group of keys. Set "
                f"one of them: {', '.join(inner + key for key in fields_of(group))}"
            )
    elif rest and typing.get_origin(kind) in (dict, list):
        entry = typing.get_args(kind)[-1]
        if len(rest) > 1 and dataclasses.is_dataclass(entry):
            check_key(typing.cast(type[Any], entry), rest[1:], value, f"{inner}{rest[0]}.")
    elif rest or kind is None:
        choices = [prefix + key for key in valid_keys(schema)]
        key = prefix + ".".join(path)
        same = [choice for choice in choices if choice.split(".")[-1] == path[-1]]
        near = difflib.get_close_matches(key, choices, n=1, cutoff=0.0)
        raise UserError(
            f"unknown configuration key '{key}'; the nearest valid key is '{(same or near)[0]}' "
            f"(--help lists all)"
        )


def leaves(
    node: Mapping[Any, Any], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each leaf of nested mappings; an empty mapping is a leaf."""
    for key, value in node.items():
        path = (*prefix, str(key))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def plain(config: Any) -> dict[str, Any]:
    """Convert a dataclass configuration to dicts and lists, ready for YAML and JSON."""
    return dataclasses.asdict(config)


def fields_of(schema: type[Any]) -> Mapping[str, Any]:
    """Return the names and types of a dataclass's fields, in order."""
    return _fields_of(schema)  # type: ignore[arg-type]  # mypy takes type[Any] for unhashable


@functools.cache
def _fields_of(schema: type[Any]) -> Mapping[str, Any]:
    hints = typing.get_type_hints(schema)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(schema)}

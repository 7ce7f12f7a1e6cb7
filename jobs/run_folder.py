"""Folder of a run, with its configuration and manifest. Two configurations never share one."""

import functools
import json
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf

from decoding import __version__, devices
from decoding.errors import UserError
from decoding.models.folder import INDEX, WEIGHTS, hash_input
from decoding.models.hub import revision_of
from jobs import ranks
from jobs.config import JobConfig, plain
from jobs.files import write_text
from jobs.paths import ROOT, data_folder, model_is_here
from jobs.run_files import read_object
from jobs.run_lock import CONFIG, MANIFEST, hold
from jobs.saved_config import add_stamp, read_config, upgrade_config

# keys that may differ when a run resumes, as they change results only by the order of additions
_FREE_KEYS = (
    "threads",
    "dry_run",
    "assumed_tflops",
    "doctor",
    "tracker",
    "output_dir",
    "parallel",
    "data.cache",
    "data.cache_folder",
    "teacher.folder",
    "loop.micro_batch_tokens",
    "loop.activation_checkpointing",
    "loop.compile",
    "server",  # the job compares the model that it serves
    "server_requests",
    "server_timeout_s",
    "server_retries",
    "server_retry_s",
)
_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "hydra-core",
    "safetensors",
    "sentencepiece",
    "wandb",
    "deepspeed",
)


class RunFolder:
    """Run folder that is open for one configuration, and locked as long as the object lives.

    Raises UserError if another command uses the folder (jobs/run_lock.py), and if the folder
    belongs to another configuration, with the keys that differ.
    """

    def __init__(self, config: JobConfig) -> None:
        self.path = Path(config.output_dir)
        self._schema = type(config)
        self.config = _drop_unused_target_config(plain(config))
        self.was_dry = False  # True where only a dry run has written here
        self._lock = hold(self.path)
        self._artefacts: tuple[Path, ...] = ()
        self._refuse_other_config()
        if ranks.rank() == 0:
            write_text(
                self.path / CONFIG, add_stamp(OmegaConf.to_yaml(OmegaConf.create(self.config)))
            )
        self.started = time.time()

    @property
    def manifest(self) -> dict[str, Any]:
        """Content of manifest.json; empty before the first write. Raises UserError for damage."""
        path = self.path / MANIFEST
        return read_manifest(path) if path.is_file() else {}

    def finished(self, *artefacts: Path, also: Sequence[Path] = ()) -> bool:
        """Return whether the run is finished and its artefacts are unchanged.

        Prints the artefacts that the run must write again. artefacts: files or model folders. also:
        further files whose hashes are recorded; runs of earlier versions may lack them. Raises
        UserError if an input has changed since the run finished.
        """
        self._artefacts = (*artefacts, *also)
        manifest = self.manifest
        if not manifest.get("finished"):
            return False
        for path, digest in manifest["inputs"].items():
            if hash_input(Path(path)) not in (digest, "absent"):
                raise UserError(
                    f"{path} has changed since the run finished: its hash differs from the one in "
                    f"{self.path / 'manifest.json'}. Set another output_dir=, or delete the "
                    f"folder to start over"
                )
        wrong = changed_artefacts(self.path, manifest) or [
            f"{artefact} is missing from a finished run"
            for artefact in artefacts
            if not _is_complete(artefact)
        ]
        for what in wrong:
            print(f"{what}: it is written again")
        return not wrong

    def write_manifest(self, inputs: list[Path], metrics: dict[str, Any], finished: bool) -> None:
        """Write manifest.json.

        inputs: files or folders that the run reads, recorded with their hashes; a dry run does not
        read them. metrics: results so far. finished: whether to record the artefacts' hashes too.
        """
        dry = self.config["dry_run"]
        revisions = self._pin_revisions(inputs)
        manifest = {
            "job": self.config["job"],
            "experiment": self.config["experiment"],
            "finished": finished,
            "command": self.command(),
            "inputs": {
                str(path): "not read (dry run)" if dry else hash_input(path) for path in inputs
            },
            **({"revisions": revisions} if revisions else {}),
            **({"artefacts": hash_artefacts(self.path, self._artefacts)} if finished else {}),
            "git_revision": git_revision(),
            "versions": versions(),
            "hardware": hardware(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self.started)),
            "seconds": round(time.time() - self.started, 1),
            "metrics": metrics,
        }
        write_text(self.path / MANIFEST, json.dumps(manifest, indent=1))

    def _pin_revisions(self, inputs: list[Path]) -> dict[str, str]:
        """Return the commits of the inputs in the Hub's cache, by the names of their repositories.

        Raises UserError if the run started with another commit.
        """
        found = dict(filter(None, map(revision_of, inputs)))
        for name, commit in self.manifest.get("revisions", {}).items():
            if not self.was_dry and found.get(name, commit) != commit:
                raise UserError(
                    f"{name} is at commit {found[name]} in the Hub's cache, but the run in "
                    f"{self.path} started with {commit}. Set another output_dir=, or delete the "
                    f"folder to start over; {name}@{commit} names the commit that it used"
                )
        return found

    def command(self) -> str:
        """Return the command line that repeats this run."""
        arguments = sys.argv[1:]
        # The configuration of a stage, a sweep member or a rank was a temporary file.
        if arguments[:1] == ["--config-file"]:
            arguments = ["--config-file", str(self.path / "config.yaml")]
        return shlex.join(["python", "-m", self.config["job"], *arguments])

    def _refuse_other_config(self) -> None:
        path = self.path / CONFIG
        if not path.is_file() or not (self.path / MANIFEST).is_file():
            return  # a start that failed before the manifest does not keep the folder
        before = read_config(
            path,
            f"If this command started {self.path}, delete the file and run the command again. "
            f"Otherwise set another output_dir=",
        )
        # A configuration of an earlier version lacks the newer keys.
        merged = OmegaConf.merge(plain(self._schema()), upgrade_config(before))
        before = cast(dict[str, Any], OmegaConf.to_container(merged))
        begun = self.manifest.get("finished") or (self.path / "checkpoints").exists()
        self.was_dry = bool(before.get("dry_run")) and not begun
        if self.was_dry:
            return  # another dry run may differ
        free = {*_FREE_KEYS, *self._schema.UNREAD}
        differing = list(_differences(before, self.config, free))
        if differing:
            raise UserError(
                f"{self.path} belongs to another configuration; different: {', '.join(differing)}. "
                "Set another output_dir=, or delete the folder to start over"
            )


def _drop_unused_target_config(config: dict[str, Any]) -> dict[str, Any]:
    """Remove the target's published configuration if the target's folder exists and replaces it."""
    target = config.get("target")
    if (
        not isinstance(target, dict)
        or not target.get("config")
        or not model_is_here(target["path"])
    ):
        return config
    return {**config, "target": {**target, "config": {}}}


def _differences(before: Any, now: Any, free: Collection[str], key: str = "") -> Iterator[str]:
    """Yield each key of two configurations that differs, with both values, except the free ones."""
    if key in free or before == now:
        return
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            inner = f"{key}.{name}" if key else str(name)
            yield from _differences(before.get(name), now.get(name), free, inner)
    else:
        yield f"{key} ({before} -> {now})"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the object in a manifest.json. Raises UserError for a damaged one."""

    def check(manifest: dict[str, Any]) -> dict[str, Any]:
        for key in ("inputs", "artefacts"):
            if not isinstance(manifest.get(key, {}), dict):
                raise ValueError(
                    f"{key} is {manifest[key]!r:.40}, expected an object of paths and hashes"
                )
        if "job" not in manifest or (manifest.get("finished") and "inputs" not in manifest):
            raise ValueError(
                f"expected the keys job and inputs, found {', '.join(manifest) or 'nothing'}"
            )
        return manifest

    remedy = f"Delete it and run the command of {path.parent} again. The rest of the folder is kept"
    return read_object(path, remedy, check)


def hash_artefacts(root: Path, artefacts: Sequence[Path]) -> dict[str, str]:
    """Return path in the run folder -> hash for each file of the artefacts.

    The README.md of a model folder is skipped, as people edit it.
    """
    files = [
        file
        for artefact in artefacts
        for file in (sorted(artefact.iterdir()) if artefact.is_dir() else [artefact])
        if file.is_file() and file.name != "README.md"
    ]
    return {str(file.relative_to(root)): hash_input(file) for file in files}


def changed_artefacts(
    root: Path, manifest: dict[str, Any], names: Sequence[str] | None = None
) -> list[str]:
    """Describe the artefacts in a manifest that are missing or changed.

    Runs of earlier versions list no artefacts. names: the artefacts to check; None checks all.
    """
    wrong = []
    for name, digest in manifest.get("artefacts", {}).items():
        if names is not None and name not in names:
            continue
        found = hash_input(root / name)
        if found == "absent":
            wrong.append(f"{root / name} is missing from a finished run")
        elif found != digest:
            wrong.append(f"{root / name} has changed since the run was finished")
    return wrong


def _is_complete(artefact: Path) -> bool:
    """Return whether a file exists, or a model folder has its configuration and weights."""
    if artefact.suffix:
        return artefact.is_file()
    return (artefact / "config.json").is_file() and any(
        (artefact / name).is_file() for name in (WEIGHTS, INDEX)
    )


@functools.cache
def git_revision() -> str:
    """Return the git revision of this code, with `+changes` if tracked files differ from it.

    Returns `unknown` outside of a checkout.
    """
    # An installation may lie inside another project's checkout.
    if data_folder("conf").parent != ROOT:
        return "unknown"
    describe = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(
            describe, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """Return the versions of this project, of Python, and of the packages that affect results."""
    found = {"shallow-draft": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def hardware() -> dict[str, Any]:
    """Return the names of the processor and the GPUs, and the number of PyTorch's threads."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    named = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    cpu = named[1].strip() if named else platform.processor() or platform.machine()
    return {"cpu": cpu, "threads": torch.get_num_threads(), "gpus": devices.gpu_names()}

"""Folder of a run, with its configuration and manifest.

Two configurations never share a folder.
"""

import functools
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from decoding import __version__, devices
from decoding.errors import UserError
from decoding.models.folder import INDEX, WEIGHTS, hash_file, hash_input
from jobs import ranks
from jobs.config import JobConfig, plain
from jobs.files import write_text
from jobs.paths import ROOT, data_folder, is_here
from jobs.run_files import read_object
from jobs.run_lock import CONFIG, hold
from jobs.saved_config import add_stamp, fill_defaults, read_config, upgrade_config

# Keys that may differ when a run resumes, also on another machine: they change results only by the
# order of additions.
_FREE_KEYS = (
    "threads",
    "dry_run",
    "assumed_tflops",
    "tracker",
    "output_dir",
    "parallel",
    "loop.micro_batch_tokens",
    "loop.activation_checkpointing",
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
    """Run folder that is open for one configuration.

    It stays locked as long as the object lives. Raises UserError when another command uses the
    folder (jobs/run_lock.py), and when it belongs to another configuration, with the keys that
    differ.
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
        """Content of manifest.json; empty before the first write.

        Raises UserError for a damaged file.
        """
        path = self.path / "manifest.json"
        return read_manifest(path) if path.is_file() else {}

    def finished(self, *artefacts: Path, also: Sequence[Path] = ()) -> bool:
        """Check whether the run is done and its artefacts are unchanged.

        Prints the artefacts that have to be made again.

        artefacts: files or model folders. also: further files whose hashes are recorded; runs of
        earlier versions may lack them. Raises UserError when an input of the run has changed since.
        """
        self._artefacts = (*artefacts, *also)
        manifest = self.manifest
        if not manifest.get("finished"):
            return False
        for path, digest in manifest["inputs"].items():
            if hash_input(Path(path)) not in (digest, "absent"):
                raise UserError(
                    f"{path} has changed since the run finished: its hash differs from the one in "
                    f"{self.path / 'manifest.json'}. Give another output_dir=, or delete the "
                    f"folder to start over"
                )
        wrong = changed_artefacts(self.path, manifest) or [
            f"{artefact} is missing from a finished run"
            for artefact in artefacts
            if not _is_whole(artefact)
        ]
        for what in wrong:
            print(f"{what}: it is written again")
        return not wrong

    def write_manifest(self, inputs: list[Path], metrics: dict[str, Any], finished: bool) -> None:
        """Write manifest.json.

        inputs: files or folders that the run read, recorded with their hashes. A dry run reads
        none.
        """
        dry = self.config["dry_run"]
        manifest = {
            "job": self.config["job"],
            "experiment": self.config["experiment"],
            "finished": finished,
            "command": self.command(),
            "inputs": {
                str(path): "not read (dry run)" if dry else hash_input(path) for path in inputs
            },
            **({"artefacts": hash_artefacts(self.path, self._artefacts)} if finished else {}),
            "git_revision": git_revision(),
            "versions": versions(),
            "hardware": hardware(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self.started)),
            "seconds": round(time.time() - self.started, 1),
            "metrics": metrics,
        }
        write_text(self.path / "manifest.json", json.dumps(manifest, indent=1))

    def command(self) -> str:
        """Return the command line that repeats this run."""
        arguments = sys.argv[1:]
        # The file of a stage, a sweep member or a rank was temporary.
        if arguments[:1] == ["--config-file"]:
            arguments = ["--config-file", str(self.path / "config.yaml")]
        return shlex.join(["python", "-m", self.config["job"], *arguments])

    def _refuse_other_config(self) -> None:
        path = self.path / CONFIG
        if not path.is_file() or not (self.path / "manifest.json").is_file():
            # Without a manifest nothing has started, so a failed start does not keep the folder.
            return
        before = read_config(
            path,
            f"If this command started {self.path}, delete the file and run the command again. "
            f"Otherwise give another output_dir=",
        )
        before = fill_defaults(upgrade_config(before), plain(self._schema()))
        begun = self.manifest.get("finished") or (self.path / "checkpoints").exists()
        self.was_dry = bool(before.get("dry_run")) and not begun
        if self.was_dry:
            return  # another dry run may differ
        differing = [
            key for key in _differences(before, self.config) if not _is_free(key.split(" ")[0])
        ]
        if differing:
            raise UserError(
                f"{self.path} belongs to another configuration; different: {', '.join(differing)}. "
                "Give another output_dir=, or delete the folder to start over"
            )


def _drop_unused_target_config(config: dict[str, Any]) -> dict[str, Any]:
    """Remove the target's published configuration where the target's folder exists.

    Nothing reads it then.
    """
    target = config.get("target")
    if not isinstance(target, dict) or not target.get("config") or not is_here(target["path"]):
        return config
    return {**config, "target": {**target, "config": {}}}


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in _FREE_KEYS)


def _differences(before: Any, now: Any, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [
            name
            for key in keys
            for name in _differences(before.get(key), now.get(key), f"{prefix}{key}.")
        ]
    return [] if before == now else [f"{prefix[:-1]} ({before} -> {now})"]


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

    A model folder's README.md is left out, as people edit it.
    """
    files = [
        file
        for artefact in artefacts
        for file in (sorted(artefact.iterdir()) if artefact.is_dir() else [artefact])
        if file.is_file() and file.name != "README.md"
    ]
    return {str(file.relative_to(root)): hash_file(file) for file in files}


def changed_artefacts(
    root: Path, manifest: dict[str, Any], names: Sequence[str] | None = None
) -> list[str]:
    """Describe the artefacts in a manifest that are missing or changed.

    Runs of earlier versions list none. names: the artefacts to check; None checks all.
    """
    wrong = []
    for name, digest in manifest.get("artefacts", {}).items():
        if names is not None and name not in names:
            continue
        if not (root / name).is_file():
            wrong.append(f"{root / name} is missing from a finished run")
        elif hash_file(root / name) != digest:
            wrong.append(f"{root / name} has changed since the run was finished")
    return wrong


def _is_whole(artefact: Path) -> bool:
    """Check whether a file exists, or a model folder's configuration and weights."""
    if artefact.suffix:
        return artefact.is_file()
    return (artefact / "config.json").is_file() and any(
        (artefact / name).is_file() for name in (WEIGHTS, INDEX)
    )


@functools.cache
def git_revision() -> str:
    """Return the revision of the checkout that this code runs from.

    `+changes` follows when tracked files differ; the revision is `unknown` outside a checkout.
    """
    # An installation may lie in somebody else's checkout.
    if data_folder("conf").parent != ROOT:
        return "unknown"
    try:
        revision = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision + ("+changes" if dirty else "")


def versions() -> dict[str, str]:
    """Return the versions of this project, of Python, and of packages that results depend on."""
    found = {"shallow-draft": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def hardware() -> dict[str, Any]:
    """Processor, threads and cards, for manifests and tables."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [
            line.split(":", 1)[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {"cpu": model, "threads": torch.get_num_threads(), "gpus": devices.gpu_names()}

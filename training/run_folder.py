"""The folder of a run: its configuration, its manifest, and the refusal to mix two configurations in one folder."""

import functools
import json
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from decoding import cuda
from decoding.errors import UserError
from training.checkpoint import sha256, write_text
from training.config import JobConfig, plain
from training.paths import is_here
from training.saved import as_of_now, with_defaults

# What may differ when a run is continued: nothing of it changes the result but by the order of additions, so that a run may move to
# another machine.
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
_LARGE = 64 * 2**20  # bytes of a file that is not hashed twice
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
    """A run folder that is open for one configuration.

    Raises UserError when the folder belongs to another configuration, naming the keys that differ.
    """

    def __init__(self, config: JobConfig) -> None:
        self.path = Path(config.output_dir)
        self.config = _read_alone(plain(config))
        self.was_dry = False  # whether all that the folder holds is of a dry run
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"output_dir={self.path} is no folder: {error.filename} is a file. Give another output_dir="
            ) from error
        except PermissionError as error:
            raise UserError(f"output_dir={self.path} cannot be made: {error}. Give another output_dir=") from error
        self._refuse_other_config(type(config))
        write_text(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(self.config)))
        self.started = time.time()

    @property
    def manifest(self) -> dict[str, Any]:
        """What manifest.json says so far; empty before the first write."""
        path = self.path / "manifest.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def finished(self, *artefacts: Path) -> bool:
        """True when the run is done and its artefacts are there; those that are missing are made again from what the folder holds.

        Raises UserError when something that the run read has changed since.
        """
        manifest = self.manifest
        if not manifest.get("finished"):
            return False
        for artefact in artefacts:
            if not artefact.exists():
                print(f"{artefact} is missing from a finished run: it is made again")
                return False
        for path, digest in manifest["inputs"].items():
            if hash_input(Path(path)) not in (digest, "absent"):
                raise UserError(
                    f"{path} has changed since {self.path} was finished with it. Give another output_dir=, or delete the folder to start over"
                )
        return True

    def write_manifest(self, inputs: list[Path], metrics: dict[str, Any], finished: bool) -> None:
        """inputs: files or folders that the run read; their hashes are recorded. A dry run has read none."""
        dry = self.config["dry_run"]
        manifest = {
            "job": self.config["job"],
            "experiment": self.config["experiment"],
            "finished": finished,
            "command": self.command(),
            "inputs": {str(path): "not read (dry run)" if dry else hash_input(path) for path in inputs},
            "git_revision": git_revision(),
            "versions": versions(),
            "hardware": hardware(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self.started)),
            "seconds": round(time.time() - self.started, 1),
            "metrics": metrics,
        }
        write_text(self.path / "manifest.json", json.dumps(manifest, indent=1))

    def command(self) -> str:
        """The command line that makes this run again."""
        arguments = sys.argv[1:]
        if arguments[:1] == ["--config-file"]:  # a stage, a member of a sweep or a rank: its file was a temporary one
            arguments = ["--config-file", str(self.path / "config.yaml")]
        return shlex.join(["python", "-m", self.config["job"], *arguments])

    def _refuse_other_config(self, schema: type[JobConfig]) -> None:
        path = self.path / "config.yaml"
        if not path.is_file() or not (self.path / "manifest.json").is_file():
            return  # without a manifest nothing was begun: a start that failed does not hold the folder
        before = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(before, dict)
        begun = self.manifest.get("finished") or (self.path / "checkpoints").exists()
        self.was_dry = bool(before.get("dry_run")) and not begun
        if self.was_dry:
            return  # a dry run is a question: the next one may differ
        before = with_defaults(as_of_now(before), schema)
        differing = [key for key in _differences(before, self.config) if not _is_free(key.split(" ")[0])]
        if differing:
            raise UserError(
                f"{self.path} belongs to another configuration; different: {', '.join(differing)}. "
                "Give another output_dir=, or delete the folder to start over"
            )


def _read_alone(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the target's published one where the target's folder is there: nothing reads it then."""
    target = config.get("target")
    if not isinstance(target, dict) or not target.get("config") or not is_here(target["path"]):
        return config
    return {**config, "target": {**target, "config": {}}}


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in _FREE_KEYS)


def _differences(before: Any, now: Any, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [name for key in keys for name in _differences(before.get(key), now.get(key), f"{prefix}{key}.")]
    return [] if before == now else [f"{prefix[:-1]} ({before} -> {now})"]


def hash_input(path: Path) -> str:
    """SHA-256 of a file, or of the names and hashes of a model folder's weights, configuration and tokenizer (its card left out)."""
    if path.is_file():
        return _hash_file(path)
    if not path.exists():
        return "absent"
    import hashlib

    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.is_file() and file.name not in ("drafter_card.json", "README.md"):
            digest.update(f"{file.name}:{_hash_file(file)}\n".encode())
    return digest.hexdigest()


def _hash_file(path: Path) -> str:
    """A large file is read once a process, however often it is asked for: a job names its target's hash in several places."""
    stat = path.stat()
    if stat.st_size < _LARGE:
        return sha256(path)
    return _hash_large(path.resolve(), stat.st_size, stat.st_mtime_ns)


@functools.cache
def _hash_large(path: Path, size: int, changed_ns: int) -> str:
    return sha256(path)


def git_revision() -> str:
    """Revision of the checkout this code runs from, with `+changes` when the tree is dirty; `unknown` outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        revision = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision + ("+changes" if dirty else "")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a result may depend on."""
    found = {"python": platform.python_version()}
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
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {"cpu": model, "threads": torch.get_num_threads(), "gpus": cuda.names()}

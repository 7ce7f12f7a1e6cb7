"""Models in the formats of other engines, converted once and kept in a cache folder."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from decoding.errors import UserError
from decoding.models.draft_vocabulary import D2T, check_full_vocabulary, draft_vocab_size, ids_of
from decoding.models.folder import WEIGHTS, hash_input, is_gguf, load_state, read_config
from decoding.models.gguf.writer import write_gguf
from heads.export import target_ends
from jobs.files import write_tensors
from serving.engines.heads import DFLASH
from serving.engines.interface import EngineConfig
from training.heads.published import LM_HEAD_COPY

ROOT = Path(__file__).resolve().parents[2]
LLAMA_CPP = ROOT / "build" / "llama_cpp" / "bin"
OPENVINO_MODEL = "openvino_model.xml"
TAIL = 15  # lines of an exporter's output in an error


def llama_server() -> Path:
    """Return llama.cpp's server: the one of LLAMA_SERVER, of this project, or on the PATH.

    Raises UserError if there is none.
    """
    named = os.environ.get("LLAMA_SERVER")
    found = named or next(
        (str(path) for path in (LLAMA_CPP / "llama-server",) if path.is_file()),
        shutil.which("llama-server"),
    )
    if found is None or not Path(found).is_file():
        raise UserError(
            f"llama-server is {f'not at {named}' if named else 'not installed'}. Run "
            f"./scripts/engines/llama_cpp.sh, or set LLAMA_SERVER to its program."
        )
    return Path(found)


def prepare(
    engine: str, config: EngineConfig, cache: Path, python: str
) -> tuple[EngineConfig, dict[str, str]]:
    """Return a configuration in an engine's own format of models, and variables of its process.

    cache: folder of converted models. python: interpreter of the engine's environment. Raises
    UserError if a model cannot be converted or the engine's program is missing.
    """
    if engine == "llama_cpp":
        server = llama_server()
        return for_llama_cpp(config, cache), {"LLAMA_SERVER": str(server)}
    if engine == "openvino":
        return for_openvino(config, cache, Path(python)), {}
    if engine == "vllm":
        return for_vllm(config, cache), {}
    return config, {}


def for_llama_cpp(config: EngineConfig, cache: Path) -> EngineConfig:
    """Return a configuration whose target and drafter are GGUF files in its dtype.

    A GGUF file stays as it is.
    """
    return _convert(config, lambda folder: gguf_of(folder, config.dtype, cache))


def for_openvino(config: EngineConfig, cache: Path, python: Path) -> EngineConfig:
    """Return a configuration whose target and drafter are exported to OpenVINO.

    A model that was exported before stays as it is.
    """
    return _convert(config, lambda folder: openvino_of(folder, cache, python))


def for_vllm(config: EngineConfig, cache: Path) -> EngineConfig:
    """Return a configuration whose DFlash head holds the output rows of its draft vocabulary.

    vLLM takes the rows of a head without them from the target's lm_head only if it drafts all
    tokens. Raises UserError for an invalid draft vocabulary, or if the copy cannot be written.
    """
    folder, target = Path(config.method.drafter), config.target
    if config.method.name != DFLASH or not draft_vocab_size(folder):
        return config
    path = cache / f"{_name(folder)}.{DFLASH}" / WEIGHTS
    if not path.exists():
        state = load_state(folder)
        ids_N = ids_of(state[D2T], int(read_config(target)["vocab_size"]), folder)
        ends = target_ends(Path(target), {LM_HEAD_COPY}, ids_N)
        write_tensors(path, state | ends, {"format": "pt"})
    shutil.copy(folder / "config.json", path.parent)
    return replace(config, method=replace(config.method, drafter=str(path.parent)))


def _convert(config: EngineConfig, convert: Callable[[str], Path]) -> EngineConfig:
    def converted(model: str) -> str:
        ready = is_gguf(model) or (Path(model) / OPENVINO_MODEL).is_file()
        return model if ready else str(convert(model))

    method = config.method
    if method.drafter:
        method = replace(method, drafter=converted(method.drafter))
    return replace(config, target=converted(config.target), method=method)


def gguf_of(folder: str | Path, dtype: str, cache: Path) -> Path:
    """Return the GGUF file of a model folder, converting it if the cache does not have it.

    dtype: float32 | bfloat16 | float16. Raises UserError as `write_gguf` does.
    """
    path = cache / f"{_name(Path(folder))}.{dtype}.gguf"
    if not path.exists():
        write_gguf(folder, path, dtype)
    return path


def openvino_of(folder: str | Path, cache: Path, python: Path) -> Path:
    """Return the OpenVINO folder of a model folder, exporting it if the cache does not have it.

    python: interpreter of OpenVINO's environment. Raises UserError as `export_openvino` does.
    """
    path = cache / f"{_name(Path(folder))}.openvino"
    if not path.exists():
        export_openvino(folder, path, python)
    return path


def export_openvino(folder: str | Path, path: Path, python: Path) -> None:
    """Export a model folder with optimum-intel, weights in float32.

    The engine converts weights to the precision that it runs in when it loads them. Raises
    UserError if the folder cannot be read, `path` exists, or the export fails, with its words.
    """
    read_config(folder)
    check_full_vocabulary(folder, "OpenVINO")
    if path.exists():
        raise UserError(f"{path} exists already. Delete it to export again.")
    program = python.parent / "optimum-cli"
    if not program.is_file():
        raise UserError(
            f"optimum-intel, which exports to OpenVINO, is not installed: {program} does not "
            f"exist. Run ./scripts/engines/openvino.sh."
        )
    print(f"exporting {folder} to OpenVINO, which takes minutes", file=sys.stderr)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [
            *(program, "export", "openvino", "--model", folder),
            *("--task", "text-generation-with-past", "--weight-format", "fp32", partial),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode or not (partial / OPENVINO_MODEL).is_file():
        shutil.rmtree(partial, ignore_errors=True)
        lines = (done.stdout + done.stderr).strip().splitlines()[-TAIL:]
        raise UserError(
            f"{folder} cannot be exported to OpenVINO. The exporter's words:\n"
            + "\n".join(f"  {line}" for line in lines)
        )
    partial.replace(path)


def _name(folder: Path) -> str:
    """Return a name that differs for every content of a folder."""
    return f"{folder.resolve().name}-{hashlib.sha256(hash_input(folder).encode()).hexdigest()[:12]}"

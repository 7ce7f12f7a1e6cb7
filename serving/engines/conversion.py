"""Models in the formats of other engines, converted once and kept in a cache folder."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from decoding.errors import UserError
from decoding.models.folder import hash_input
from decoding.models.gguf.writer import write_gguf

ROOT = Path(__file__).resolve().parents[2]
LLAMA_CPP = ROOT / "build" / "llama_cpp" / "bin"
OPENVINO = ROOT / ".venv-openvino" / "bin" / "python"


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


def openvino_python(python: str = "") -> Path:
    """Return the interpreter of OpenVINO's environment; raise UserError if there is none."""
    path = Path(python) if python else OPENVINO
    if not path.is_file():
        raise UserError(
            f"OpenVINO is not installed: {path} does not exist. Run ./scripts/engines/openvino.sh, "
            f"or name an interpreter that has openvino-genai and optimum-intel."
        )
    return path


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

    python: interpreter with optimum-intel. The weights are kept in float32, and the engine converts
    them when it loads the model. Raises UserError with the exporter's words if it fails.
    """
    path = cache / f"{_name(Path(folder))}.openvino"
    if path.exists():
        return path
    script = ROOT / "scripts" / "to_openvino.py"
    done = subprocess.run(
        [python, script, folder, path], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()[-15:]
        raise UserError(
            f"{folder} cannot be exported to OpenVINO:\n" + "\n".join(f"  {line}" for line in lines)
        )
    return path


def _name(folder: Path) -> str:
    """Return a name that differs for every content of a folder."""
    return f"{folder.resolve().name}-{hashlib.sha256(hash_input(folder).encode()).hexdigest()[:12]}"

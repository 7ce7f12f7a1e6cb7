"""Convert a GGUF file of the Llama family to a Hugging Face model folder.

    python scripts/from_gguf.py MODEL.gguf FOLDER [bfloat16 | float16 | float32 | float64]

Quantized weights are dequantized, so the folder's model is exactly the model that the file
describes, rounded to the dtype. FOLDER gets config.json, model.safetensors, the tokenizer with the
chat template, generation_config.json, gguf.json with the hash of the source, and a README.md with
the licence that the file states. It appears under its name when it is complete.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import yaml
from transformers import GenerationConfig, LlamaConfig

from decoding.errors import UserError
from decoding.models.folder import WEIGHTS, read_json, sha256
from decoding.models.gguf.file import TEXT, GgufFile
from decoding.models.gguf.model import config_of, weights_of
from decoding.models.gguf.tokenizer import tokenizer_of
from decoding.models.load import DTYPES
from decoding.models.model_check import check_model
from decoding.models.paths import exists
from decoding.models.text.tokenizer import load_tokenizer
from decoding.models.text.tokenizer_repair import SETTINGS
from jobs.files import disk_error, save_tensors, write_text
from scripts.usage import run_script, show_usage

DTYPE = "bfloat16"
SOURCE = "gguf.json"


def convert(source: Path, folder: Path, dtype: str = DTYPE) -> None:
    """Write the model of a GGUF file to a new folder.

    Raises UserError for a folder that is not empty, a file that cannot be converted, an unknown
    dtype, and a failed write.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype '{dtype}' is unknown, expected one of {', '.join(DTYPES)}.")
    if exists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} is not empty, expected a new folder. Remove it, or use another name."
        )
    file = GgufFile(source)
    config = config_of(file)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what an interrupted conversion left
        partial.mkdir(parents=True)
        _write(file, config, partial, dtype)
        partial.replace(folder)
    except OSError as error:
        raise disk_error(folder, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(file: GgufFile, config: dict[str, Any], folder: Path, dtype: str) -> None:
    """Write every file of the model folder, and check that the folder loads."""
    tokenizer_of(file).save_pretrained(folder)
    # transformers 5 writes a class that version 4 does not know
    settings = read_json(folder / SETTINGS) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.pop("backend", None)
    write_text(folder / SETTINGS, json.dumps(settings, indent=1) + "\n")
    LlamaConfig(**config, dtype=dtype).save_pretrained(folder)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**special).save_pretrained(folder)
    save_tensors(weights_of(file, config, DTYPES[dtype]), folder / WEIGHTS, {"format": "pt"})
    origin = {"file": file.path.name, "sha256": sha256(file.path), "dtype": dtype}
    write_text(folder / SOURCE, json.dumps(origin, indent=1) + "\n")
    if stated := license_in(file):
        front = yaml.safe_dump(stated, sort_keys=False)
        text = f"---\n{front}---\nConverted from `{file.path.name}`, in {dtype}.\n"
        write_text(folder / "README.md", text)
    check_model(folder)
    load_tokenizer(folder)


def license_in(file: GgufFile) -> dict[str, str]:
    """Return the licence that a file states, as keys of a README's front matter."""
    keys = {"": "license", ".name": "license_name", ".link": "license_link"}
    found = {key: file.value(f"general.license{end}", TEXT, "") for end, key in keys.items()}
    return {key: value for key, value in found.items() if value} if found["license"] else {}


def main() -> None:
    """Convert the file named on the command line."""
    show_usage(__doc__)
    if len(sys.argv) not in (3, 4):
        sys.exit(f"usage: python {sys.argv[0]} MODEL.gguf FOLDER [{' | '.join(DTYPES)}]")
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    convert(source, folder, *sys.argv[3:])
    print(f"{folder}: the model of {source.name}")


if __name__ == "__main__":
    run_script(main)

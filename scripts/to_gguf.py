"""Convert a Llama model folder, target or drafter, to a GGUF file for llama.cpp.

    python scripts/to_gguf.py FOLDER OUT.gguf [--dtype bfloat16]

The file holds the weights, the tokenizer, the special tokens and the chat template. Needs the extra
`gguf`. docs/gguf_and_openvino.md has the commands that serve it with a draft model.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decoding.models.gguf.writer import DTYPES, write_gguf
from jobs.paths import resolve_model
from scripts.usage import run_script


def main() -> None:
    """Convert the folder named on the command line."""
    parser = argparse.ArgumentParser(description="Convert a Llama model folder to a GGUF file.")
    parser.add_argument("folder", help="model folder, or a name on the Hugging Face Hub")
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="of matrices")
    arguments = parser.parse_args()
    for note in write_gguf(resolve_model(arguments.folder), arguments.path, arguments.dtype):
        print(f"note: {note}", file=sys.stderr)
    print(arguments.path)


if __name__ == "__main__":
    run_script(main)

"""Export a model folder, target or drafter, to OpenVINO.

    python scripts/to_openvino.py FOLDER OUT [PYTHON]

Runs optimum-intel in the environment that scripts/engines/openvino.sh makes, or in that of PYTHON.
docs/gguf_and_openvino.md has the lines that run the folder with a draft model.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs.paths import resolve_model
from scripts.usage import run_script, show_usage
from serving.engines.conversion import export_openvino
from serving.engines.registry import python_of


def main() -> None:
    """Export the folder named on the command line."""
    show_usage(__doc__)
    if len(sys.argv) not in (3, 4):
        sys.exit(f"usage: python {sys.argv[0]} FOLDER OUT [PYTHON]")
    folder, path = sys.argv[1], Path(sys.argv[2])
    python = python_of("openvino", {"openvino": "".join(sys.argv[3:])})
    export_openvino(resolve_model(folder), path, Path(python))
    print(path)


if __name__ == "__main__":
    run_script(main)

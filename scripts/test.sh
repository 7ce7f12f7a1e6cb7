#!/usr/bin/env bash
# Style, types and tests; --all adds the long suite. Makes .venv and installs the dev, train and slurm extras when needed. Other arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
cd "$ROOT"
ensure_environment "dev,train,slurm"

markers="not long"
if [ "${1:-}" = "--all" ]; then markers=""; shift; fi
say "ruff"  # two commands: behind `&&` a failure of the first would not end the script
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
say "mypy";   "$VENV/bin/mypy"
say "pytest"; OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$VENV/bin/python" -m pytest -n "${PYTEST_WORKERS:-2}" -m "$markers" "$@"

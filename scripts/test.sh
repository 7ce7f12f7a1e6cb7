#!/usr/bin/env bash
# Style, types and tests, in tiers. Makes .venv and installs the dev, train and slurm extras when needed,
# with --all and --exhaustive also web and browser. Without Chromium the tests of pages are skipped, or
# fail if SHALLOW_DRAFT_BROWSER=required.
#   (none)        the short suite: before every commit
#   --all         the long tests too, and law 3 with 20,000 draws for each drafter and rule, not 5,000
#   --exhaustive  before a release: law 3 with a million draws per case, and a hundred kills; hours
#   --engines     the tests that run other engines, which it installs first; the other tiers leave them out
# Other arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_usage "$@"
cd "$ROOT"
extras="dev,train,slurm"
case "${1:-}" in
  --all|--exhaustive) extras="$extras,web,browser" ;;
  --engines) extras="$extras,llamacpp" ;;
esac
ensure_environment "$extras"

markers="not long and not exhaustive and not engines"
case "${1:-}" in
  --all)        markers="not exhaustive and not engines"; draws=20000; shift ;;
  --exhaustive) markers="not engines"; draws=1000000; shift ;;
  --engines)    markers="engines"; PYTEST_WORKERS="${PYTEST_WORKERS:-0}"
                for engine in vllm llama_cpp openvino; do "./scripts/engines/$engine.sh"; done; shift ;;
esac
export SHALLOW_DRAFT_DRAWS="${SHALLOW_DRAFT_DRAWS:-${draws:-5000}}"
say "ruff"  # two commands, as a failure before `&&` would not end the script
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
say "mypy";   "$VENV/bin/mypy" & types=$!  # takes minutes, on one core
trap 'kill "$types" 2>/dev/null || true' EXIT
say "imports"; "$VENV/bin/lint-imports" --no-logo --no-cache
say "docs";   NO_MKDOCS_2_WARNING=1 "$VENV/bin/mkdocs" build --strict --quiet --site-dir build/site
wait "$types"
trap - EXIT
say "pytest"; OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$VENV/bin/python" -m pytest -n "${PYTEST_WORKERS:-2}" -m "$markers" "$@"

#!/usr/bin/env bash
# Makes .venv-speculators, an environment of its own with speculators, in which a test loads exported
# heads (tests/heads/test_speculators.py). It pins versions of transformers and datasets. Five minutes,
# 1.5 GB. Does nothing if this version is installed.
#
#   PYTHON, TORCH, TORCH_INDEX   as in scripts/environment.sh
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
show_usage "$@"
VENV="$ROOT/.venv-speculators"
check_python

# It names torchvision and torchaudio too, which need a build of their own for each torch and are not used
# here. So the other packages that it names are listed.
PACKAGES=(speculators==0.9.0 hs-connectors==0.9.0)
NEEDED=("transformers==5.19.0" "datasets==5.1.0" numpy safetensors pydantic pydantic-settings loguru==0.7.3
  "tqdm<=4.70.1" typer click rich httpx aiohttp openai protobuf psutil)

stamp="$VENV/.installed"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "${PACKAGES[*]}" ]; then exit 0; fi
say "Installing ${PACKAGES[0]} into .venv-speculators, which takes some minutes"
make_venv
install_torch
"$VENV/bin/pip" install --quiet "${NEEDED[@]}"
"$VENV/bin/pip" install --quiet --no-deps "${PACKAGES[@]}"
"$VENV/bin/python" -c 'import speculators'
echo "${PACKAGES[*]}" > "$stamp"
say "Installed ${PACKAGES[*]} in .venv-speculators"

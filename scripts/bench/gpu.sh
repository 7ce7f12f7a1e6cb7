#!/usr/bin/env bash
# Benchmarks for a GPU, in parts planned for under eight minutes each:
#   gpu.sh exact|decode|train|recurrent|losses|heads|all
#
#   exact      equality of drafted and autoregressive text on the card, as graphs and eager; noise
#              equal to the CPU's; one wait per round
#   decode     LLaMA-7B and drafters of 1 to 12 layers against the card's bandwidth, complete rounds,
#              V(n) at contexts of 1k, 8k and 32k
#   train      distillation of a drafter of 796 M parameters from LLaMA-7B against Hugging Face's
#              Trainer; about 50 GB of the card, by estimate
#   recurrent  a recurrent head of LLaMA-7B: training tokens/s and the hours of ShareGPT,
#              milliseconds of a round by beam width and length, and the published command's setting,
#              batch 8 and 45 beams; about 30 GB of the card, by estimate
#   losses     memory and milliseconds of each loss at a vocabulary of 128,256, in chunks and eager;
#              about 30 GB of the card, by estimate
#   heads      EAGLE-3, P-EAGLE, DFlash, DSpark and SpecDiff of an 8B target: training tokens/s and memory, milliseconds of a
#              round as graphs and eager; about 50 GB of the card, by estimate
#
# All parts import only torch, transformers, accelerate, safetensors and numpy. They write
# scripts/bench/results/gpu_PART.json.
#   DEVICE   cuda (default), cuda:N, or cpu for a trial (TOY=true for seconds instead of hours);
#            part losses: meta counts the memory from sizes, in seconds and without a GPU
#   LAST     seconds after which a part starts no figure (default 400)
#   ONLY     regular expression of the figures to measure (default all)
#   EXECUTIONS  those of part decode (default graph,eager,compiled)
#   PYTHON   Python interpreter
#   OUT      folder for a copy of the figures
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
show_usage "$@"
cd "$(dirname "$0")/../.."
parts="${1:-all}" status=0
if [ "$parts" = all ]; then parts="exact decode train recurrent losses heads"; fi
for part in $parts; do
  case "$part" in
    exact | decode | train | recurrent | losses | heads) ;;
    *) echo "error: part '$part' is unknown, expected exact, decode, train, recurrent, losses, heads or all" >&2; exit 2 ;;
  esac
  "${PYTHON:-python3}" scripts/bench/gpu.py "part=$part" "device=${DEVICE:-cuda}" "toy=${TOY:-false}" \
    "last_start=${LAST:-400}" "only=${ONLY:-}" "executions=${EXECUTIONS:-graph,eager,compiled}" || status=$?
done
if [ -n "${OUT:-}" ]; then
  mkdir -p "$OUT"
  find scripts/bench/results -name "*gpu*.json" -exec cp {} "$OUT/" \;
fi
exit $status

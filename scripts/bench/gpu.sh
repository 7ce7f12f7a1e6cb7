#!/usr/bin/env bash
# Everything that wants a GPU, in one command: a drafter made there, exactness in three dtypes, and the benchmarks beside Hugging Face.
# Needs the project's packages in the present Python (PYTHON names another). Figures: scripts/bench/results/*_gpu.json and runs/gpu/.
#
#   DEVICE   cuda (default), cuda:N, or cpu to try the script itself
#   OUT      a folder that gets a copy of the figures and reports
set -euo pipefail
cd "$(dirname "$0")/../.."
device="${DEVICE:-cuda}" python="${PYTHON:-python}"
drafter=runs/gpu/quickstart/distill.train/drafter

"$python" -m distill.train +experiment=quickstart output_dir=runs/gpu/quickstart "target.device=$device"

# Coupled and greedy decoding against our own without a drafter: token by token in float64, and counted with the gaps below that.
for dtype in float64 float32 bfloat16; do
  "$python" -m eval.run "drafters=[$drafter]" verify=coupled "target.device=$device" target.dtype=$dtype \
    num_draft_tokens=[4] sweep=[] max_prompts=64 max_new_tokens=128 output_dir=runs/gpu/exact_$dtype
done

"$python" scripts/bench/decoding.py "device=$device" drafter=$drafter num_draft_tokens=3 name=decoding_gpu
"$python" scripts/bench/distillation.py "device=$device" steps=20 name=distillation_gpu
shape="layers=32 hidden_size=4096 intermediate_size=11008 heads=32 kv_heads=32 dtypes=[bfloat16]" # LLaMA-7B's
if [ "$device" = cpu ]; then shape="dtypes=[bfloat16]"; fi
# shellcheck disable=SC2086  # words are options
"$python" scripts/bench/bandwidth.py "device=$device" $shape name=bandwidth_gpu
"$python" -m pytest -q tests/decoding/test_sampling.py

if [ -n "${OUT:-}" ]; then
  mkdir -p "$OUT"
  cp scripts/bench/results/*_gpu.json "$OUT/"
  for run in runs/gpu/*/; do
    mkdir -p "$OUT/$(basename "$run")"
    cp "$run"/results.jsonl "$run"/report.html "$run"/manifest.json "$OUT/$(basename "$run")/"
  done
fi

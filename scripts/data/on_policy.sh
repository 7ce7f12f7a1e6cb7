#!/usr/bin/env bash
# The target's own answers to chats, on which drafters and heads then train:
#   on_policy.sh TARGET OUT CHATS.json... [OPTION=VALUE...]
#
#   ./scripts/data/on_policy.sh models/smollm2_135m runs/distill.regenerate/smollm2_135m data/chat/*.json batch_size=64
#
# Writes OUT/chats.json: in every turn the target sees its own earlier answers. Options are those of
# distill.regenerate. A run that was interrupted goes on where it ended. Afterwards, for example:
#   python -m distill.train ... data.chats=[OUT/chats.json]
#   python -m recurrent_drafting.train ... data.chats=[OUT/chats.json] states.cache=disk states.fill=true
# A recipe would let the target answer these chats again. With the folder above, which is that of SmolLM2's
# recipes, leave its first stage out:
#   python -m distill.train +experiment=smollm2_135m stages=[distill.prune,distill.train,eval.run,eval.compare]
set -euo pipefail
source "$(dirname "$0")/../environment.sh"
show_usage "$@"
if [ $# -lt 3 ]; then
  (show_usage --help)
  exit 2
fi
target="$1" out="$2" chats="" options=()
shift 2
for word in "$@"; do
  case "$word" in
    *=*) options+=("$word") ;;
    *)   chats="${chats:+$chats,}$(realpath "$word")" ;;
  esac
done
if [ -z "$chats" ]; then
  echo "error: no chats are given; expected ShareGPT files after $out" >&2
  exit 2
fi
target="$([ -d "$target" ] && realpath "$target" || echo "$target")" out="$(realpath -m "$out")"
cd "$ROOT"
ensure_environment train
exec "$VENV/bin/python" -m distill.regenerate "target.path=$target" "data.chats=[$chats]" "data.texts=[]" \
  data.max_length=1024 max_new_tokens=192 on_length=go_on drop_duplicates=true "output_dir=$out" \
  ${options[@]+"${options[@]}"}

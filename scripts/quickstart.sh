#!/usr/bin/env bash
# From a fresh clone to a measured drafter: installs, distils a one-layer drafter for the embedded
# target, decodes with it and writes a report, in at most 10 minutes after the install on two CPU
# cores. Slower cores train fewer steps and measure fewer prompts. Finished parts are reused. Extra
# arguments are Hydra overrides.
set -euo pipefail
source "$(dirname "$0")/environment.sh"
show_usage "$@"
cd "$ROOT"
ensure_environment ""

say "Distilling a drafter and decoding with it"
"$VENV/bin/python" -m distill.train +experiment=quickstart "$@"

folder=runs/quickstart
for override in "$@"; do
  [[ $override != output_dir=* ]] || folder=${override#output_dir=}
done
cat <<EOF

The report: $folder/report.html   (opens in any browser, offline)
The drafter: $folder/distill.train/drafter

Next steps:
  .venv/bin/python -m distill.train +experiment=quickstart student.num_hidden_layers=2 output_dir=runs/two_layers
  .venv/bin/python -m eval.run "drafters=[$folder/distill.train/drafter]" "temperatures=[0.5]" "num_draft_tokens=[2,4,6]" output_dir=runs/half_as_hot
  .venv/bin/python -m distill.train target.path=/path/to/your/model "data.chats=[/path/to/sharegpt.json]" dry_run=true
EOF

"""Distil a one-layer drafter for the embedded target in less than a minute.

    python examples/distil_a_drafter.py [KEY=VALUE ...]

The settings below are small, so the drafter is poor. For your model set `target.path`,
`data.chats`, `held_out.prompts` and longer bounds; `python -m distill.train --help` lists all keys.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "output_dir": "runs/examples/distil",
    # The target has 14 layers.
    "student.num_hidden_layers": "1",
    "data.max_samples": "1000",
    # The first of these bounds that is reached ends the run.
    "loop.max_seconds": "40",
    "loop.max_steps": "120",
    "loop.tokens_per_step": "2048",
    "loop.micro_batch_tokens": "2048",
    "loop.eval_every": "60",
    "loop.dtype": "bfloat16",
    "loop.optimizer.lr": "1e-2",
    "loop.optimizer.warmup_steps": "5",
    # Acceptance on these prompts, answered by the target, chooses the checkpoint.
    "held_out.max_prompts": "8",
    "held_out.max_new_tokens": "32",
}


def main(arguments: list[str]) -> None:
    """Distil, then list the files and the card of the drafter."""
    settings = SETTINGS | dict(one.split("=", 1) for one in arguments)
    overrides = [f"{key}={value}" for key, value in settings.items()]
    # A job is a command. A second run resumes it, or does nothing if it is finished.
    subprocess.run([sys.executable, "-m", "distill.train", *overrides], cwd=ROOT, check=True)

    drafter = ROOT / settings["output_dir"] / "drafter"
    card = json.loads((drafter / "drafter_card.json").read_text())
    print(f"\n{drafter} is a complete model folder:")
    print("\n".join(f"  {path.name}" for path in sorted(drafter.iterdir())))
    print(f"its card has {', '.join(card)}")


if __name__ == "__main__":
    main(sys.argv[1:])

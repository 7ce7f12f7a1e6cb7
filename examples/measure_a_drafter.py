"""Measure the acceptance, cost and speedup of a drafter, with intervals and a control.

    python examples/measure_a_drafter.py                                # prompt lookup alone
    python examples/measure_a_drafter.py runs/examples/distil/drafter   # and a drafter

Arguments with a "=" are settings of eval.run. The example reads few prompts, so the intervals are
wide. The report has plots and every definition.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "output_dir": "runs/examples/measure",
    "max_seconds": "40",
    "max_prompts": "16",
    "max_new_tokens": "48",
    "temperatures": "[0.0,1.0]",
    # Draft lengths to choose from, on prompts that are not measured afterwards.
    "sweep": "[2,4]",
    "sweep_prompts": "2",
}


def main(arguments: list[str]) -> None:
    """Run the evaluation, then print some columns of its results."""
    drafters = [one for one in arguments if "=" not in one]
    settings = SETTINGS | dict(one.split("=", 1) for one in arguments if "=" in one)
    overrides = [f"{key}={value}" for key, value in settings.items()]
    # A second run with the same settings measures nothing and prints the same table.
    subprocess.run(
        [sys.executable, "-m", "eval.run", f"drafters=[{','.join(drafters)}]", *overrides],
        cwd=ROOT,
        check=True,
    )

    # The file for programs has a line for each drafter, benchmark and setting.
    folder = ROOT / settings["output_dir"]
    names = ("drafter", "temperature", "speedup", "speedup_low", "speedup_high")
    names += ("alpha", "tau", "cost_ratio", "lossless")
    print("\n" + "".join(f"{name:<15}" for name in names))
    for line in (folder / "results.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["part"] == "main":
            print("".join(f"{format_value(row[name]):<15}" for name in names))


def format_value(value: object) -> str:
    """Return a value as text; `-` for a figure that needs more prompts."""
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main(sys.argv[1:])

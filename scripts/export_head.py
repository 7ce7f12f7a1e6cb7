"""Write a head folder in the layout of a server or trainer.

    python scripts/export_head.py HEAD LAYOUT OUT [TARGET]

The weights keep their bits. It prints where the layers are in config.json and in which numbers, and
what servers ignore. With TARGET a block drafter's folder also holds copies of the target's
embedding and output rows, which servers need for a draft vocabulary. Layouts:
heads/{eagle,block,medusa}/layouts.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from heads.export import export
from jobs.paths import resolve_model
from scripts.usage import run_script, show_usage


def main() -> None:
    """Export the folder named on the command line."""
    show_usage(__doc__)
    if len(sys.argv) not in (4, 5):
        sys.exit(f"usage: python {sys.argv[0]} HEAD LAYOUT OUT [TARGET]")
    head, layout, out, *targets = sys.argv[1:]
    target = resolve_model(targets[0]) if targets else None
    notes = export(resolve_model(head), layout, Path(out), target)
    print("\n".join([f"{out} has the layout {layout}", *notes]))


if __name__ == "__main__":
    run_script(main)

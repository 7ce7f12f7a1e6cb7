"""Write a head folder in the layout of a server or trainer.

    python scripts/export_head.py HEAD LAYOUT OUT [TARGET] [layout=fill_in | anchor_first]

The weights keep their bits. It prints where the layers are in config.json and in which numbers, and
what servers ignore. With TARGET a block drafter's folder also holds copies of the target's
embedding and output rows, which servers need for a draft vocabulary. Layouts:
heads/{eagle,block,medusa}/layouts.py. A block drafter whose config.json has no sample_from_anchor
needs `layout=`, which scripts/check_head.py finds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from heads.export import export
from jobs.paths import resolve_model
from scripts.usage import run_script, show_usage, split_option


def main() -> None:
    """Export the folder named on the command line."""
    show_usage(__doc__)
    arguments, block_layout = split_option("layout")
    if len(arguments) not in (3, 4):
        sys.exit(f"usage: python {sys.argv[0]} HEAD LAYOUT OUT [TARGET] [layout=BLOCK_LAYOUT]")
    head, layout, out, *targets = arguments
    target = resolve_model(targets[0]) if targets else None
    notes = export(resolve_model(head), layout, Path(out), target, block_layout)
    print("\n".join([f"{out} has the layout {layout}", *notes]))


if __name__ == "__main__":
    run_script(main)

"""Write a head folder in the layout of a server or trainer.

    python scripts/export_head.py HEAD LAYOUT OUT

The weights keep their bits. It prints where the layers are in config.json and in which numbers, and
what servers ignore. Layouts: heads/eagle/layouts.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decoding.errors import UserError
from heads.export import export
from jobs.paths import resolve_model
from scripts.usage import show_usage


def main() -> None:
    """Export the folder named on the command line."""
    show_usage(__doc__)
    if len(sys.argv) != 4:
        sys.exit(f"usage: python {sys.argv[0]} HEAD LAYOUT OUT")
    try:
        notes = export(resolve_model(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    except UserError as error:
        sys.exit(f"error: {error}")
    print("\n".join([f"{sys.argv[3]} has the layout {sys.argv[2]}", *notes]))


if __name__ == "__main__":
    main()

"""Usage of a script: its docstring."""

import sys


def show_usage(docstring: str | None) -> None:
    """Print a script's docstring and end the script if its arguments ask for help."""
    if {"--help", "-h"} & {*sys.argv[1:]}:
        print((docstring or "").strip())
        sys.exit()

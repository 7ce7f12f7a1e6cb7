"""How scripts begin and end: their usage, and a user error in one line."""

import sys
from collections.abc import Callable

from decoding.errors import UserError


def show_usage(docstring: str | None) -> None:
    """Print a script's docstring and end the script if its arguments ask for help."""
    if {"--help", "-h"} & {*sys.argv[1:]}:
        print((docstring or "").strip())
        sys.exit()


def run_script(main: Callable[[], None]) -> None:
    """Run a script, and end it with one line for a user error."""
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")

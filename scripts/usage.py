"""How scripts begin and end: their usage, an option, and a user error in one line."""

import sys
from collections.abc import Callable

from decoding.errors import UserError


def show_usage(docstring: str | None) -> None:
    """Print a script's docstring and end the script if its arguments ask for help."""
    if {"--help", "-h"} & {*sys.argv[1:]}:
        print((docstring or "").strip())
        sys.exit()


def split_option(name: str) -> tuple[list[str], str | None]:
    """Return the arguments of the command line but `name=VALUE`, and the value; None without it."""
    start = f"{name}="
    others = [each for each in sys.argv[1:] if not each.startswith(start)]
    values = [each.removeprefix(start) for each in sys.argv[1:] if each.startswith(start)]
    return others, values[-1] if values else None


def run_script(main: Callable[[], None]) -> None:
    """Run a script, and end it with one line for a user error."""
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")

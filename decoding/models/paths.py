"""Paths of models, as far as nothing of the model is read."""

from pathlib import Path

from decoding.errors import UserError


def exists(path: Path) -> bool:
    """Return whether a file or folder exists at this path.

    Raises UserError for an invalid path, and for one without read permission.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        name = ascii(str(path))
        shown = name if len(name) <= 80 else f"{name[:77]}..."
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{shown} cannot be opened ({reason}), expected the path of a file or folder. Check "
            f"the path and its permissions."
        ) from error
    return True

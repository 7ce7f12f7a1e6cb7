"""Messages to the user beside the output: the exception for wrong input, and notes on stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

NOTE_SECONDS = 1.0  # after which a note names what takes so long


class UserError(ValueError):
    """An error in the user's input; its message names what was found and expected, and a remedy.

    Jobs print it without a traceback.
    """


def without_stop(words: object) -> str:
    """Return an exception's words, or others, without the full stop at their end.

    So they can stand inside a sentence. An ellipsis is kept.
    """
    text = str(words).rstrip()
    return text if text.endswith("..") else text.removesuffix(".")


def print_note(note: str) -> None:
    """Print a note on stderr."""
    print(f"note: {note}", file=sys.stderr, flush=True)


@contextmanager
def note_if_slow(note: str) -> Iterator[None]:
    """Print a note if the block takes longer than NOTE_SECONDS."""
    timer = Timer(NOTE_SECONDS, print_note, (note,))
    timer.daemon = True  # an interrupted process does not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

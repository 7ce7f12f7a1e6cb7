"""llama.cpp's shared library, through the low-level functions of llama-cpp-python.

llama.cpp reports the reason of a failure only in its log, so the log is caught here: nothing is
printed, and an error quotes the last lines.
"""

from collections import deque
from typing import Any, NamedTuple

from decoding.errors import UserError

INSTALL = "pip install -e '.[llamacpp]' in the project's folder, or pip install llama-cpp-python"
_ERROR, _CONTINUED = 4, 5  # levels of the log: an error; the rest of the line before
_SHOWN = 2  # lines of the log that an error quotes
# functions that older versions lack
_NEEDED = ("llama_memory_seq_rm", "llama_get_memory", "llama_model_is_hybrid")


class Library(NamedTuple):
    """The loaded library: its functions, and the last errors that it logged."""

    functions: Any  # the module llama_cpp.llama_cpp
    errors: deque[str]
    callback: Any  # kept, since the library calls it

    def reason(self) -> str:
        """Return the last errors that were logged as one line, and forget them."""
        lines = [" ".join(line.split()) for line in self.errors]
        self.errors.clear()
        return "; ".join(line for line in lines[-_SHOWN:] if line) or "no reason was given"


_loaded: list[Library] = []


def load_library() -> Library:
    """Return llama.cpp's library, loaded once a process.

    Raises UserError if llama-cpp-python is not installed, is too old or cannot be loaded.
    """
    if not _loaded:
        _loaded.append(_load())
    return _loaded[0]


def _load() -> Library:
    try:
        from llama_cpp import llama_cpp as functions
    except ModuleNotFoundError as error:
        found = "is not installed" if error.name == "llama_cpp" else f"lacks {error.name}"
        raise UserError(
            f"GGUF models run in llama.cpp through llama-cpp-python, which {found}. Run {INSTALL}."
        ) from error
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # it does not load
        raise UserError(
            f"llama-cpp-python cannot load llama.cpp's library ({' '.join(str(error).split())}). "
            f"Install it again: pip install --force-reinstall --no-cache-dir llama-cpp-python."
        ) from error
    missing = [name for name in _NEEDED if not hasattr(functions, name)]
    if missing:
        raise UserError(
            f"llama-cpp-python is too old: it has no {missing[0]}. Run pip install --upgrade "
            f"llama-cpp-python."
        )
    errors: deque[str] = deque(maxlen=8)
    of_error = False  # whether the last line was part of an error

    def keep(level: int, text: bytes, _data: Any) -> None:
        nonlocal of_error
        line = text.decode(errors="replace")
        of_error = level == _ERROR or (level == _CONTINUED and of_error)
        if of_error and level == _CONTINUED and errors:
            errors[-1] += line
        elif of_error:
            errors.append(line)

    callback = functions.llama_log_callback(keep)
    functions.llama_log_set(callback, None)
    functions.llama_backend_init()
    return Library(functions, errors, callback)

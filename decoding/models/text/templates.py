"""Rendering of chats by a model's template: untrusted code, with limits on time and output.

One thread watches all renderings. If a rendering takes too long, an exception is raised in its
thread (`PyThreadState_SetAsyncExc`), so a chat needs no process and a quick rendering costs two
dictionary entries. The output and each operation have further limits
(decoding/models/text/template_sandbox.py).
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jinja2 import Template
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from decoding.errors import UserError
from decoding.models.text.template_sandbox import TooLargeError, compile_bounded
from decoding.values import lone_surrogate

MAX_SECONDS = 5.0  # CPU time of the rendering thread
_CHECK_SECONDS = 0.25  # between two checks by the watching thread

# raised by a template's code
_FAILURES = (TypeError, AttributeError, LookupError, ArithmeticError, ValueError)

Result = TypeVar("Result")


class _RenderState(threading.local):
    """A flag for each thread: whether it is rendering a template."""

    rendering = False


class _TooLongError(BaseException):
    """An error raised in a thread that renders too long; `except Exception` does not catch it."""

    def __str__(self) -> str:
        return f"took more than {MAX_SECONDS:g} seconds for one chat"


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Any],
    source: str | None = None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Render a chat with a chat template.

    source: the template's source; None takes the tokenizer's template. Raises UserError with the
    tokenizer's folder for a template that runs too long, writes too much or fails in its code, and
    jinja2.TemplateError if the template is not valid Jinja or itself rejects the messages.
    """
    where = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    source = default_template(tokenizer) if source is None else source

    def apply() -> Any:
        _here.rendering = True
        try:
            return tokenizer.apply_chat_template(
                list(messages),
                chat_template=source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        finally:
            _here.rendering = False

    try:
        text = str(_watch.run(apply, MAX_SECONDS))
    except (_TooLongError, TooLargeError) as error:
        raise UserError(f"{where} {error}, expected less. Correct the template.") from None
    except (*_FAILURES, RecursionError, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{where} fails on this chat ({reason}), expected a string. Correct the template."
        ) from error
    at = lone_surrogate(text)
    if at is not None:
        raise UserError(
            f"{where} writes half a surrogate pair ({text[at]!a}), expected text that UTF-8 can "
            f"encode. Correct the template."
        )
    return text


def default_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a tokenizer's chat template; of several by name, the one named `default`.

    Raises UserError if none of several templates has that name.
    """
    found = tokenizer.chat_template
    if isinstance(found, dict) and "default" not in found:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has the chat templates "
            f"{', '.join(map(repr, found))}, expected one named 'default'. Rename the one to use."
        )
    return str(tokenizer.get_chat_template())


def _seconds_of(thread: int) -> float:
    """Return the CPU seconds of a thread; elsewhere than on Linux, the seconds of a wall clock."""
    if sys.platform == "linux":
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def _compile(source: str) -> Template:
    """Compile a template, with limits if this thread renders a chat, else like `transformers`."""
    return compile_bounded(source) if _here.rendering else _compile_plain(source)


class _Watch:
    """The deadlines of the current renderings by thread, and the thread that enforces them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self._deadlines: dict[int, float] = {}
        self._fired: set[int] = set()
        self._thread: threading.Thread | None = None

    def run(self, action: Callable[[], Result], seconds: float) -> Result:
        """Return the action's result; raise _TooLongError if it takes longer."""
        thread = threading.get_ident()
        with self._lock:
            self._deadlines[thread] = _seconds_of(thread) + seconds
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._keep, name="chat templates", daemon=True
                )
                self._thread.start()
        if not self._wanted.is_set():
            self._wanted.set()
        try:
            return action()
        finally:
            with self._lock:
                self._deadlines.pop(thread, None)
                # finished in time or already raised: nothing may be raised after this block
                if thread in self._fired:
                    self._fired.discard(thread)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    def _keep(self) -> None:
        while True:
            self._wanted.wait()
            time.sleep(_CHECK_SECONDS)
            with self._lock:
                for thread, deadline in list(self._deadlines.items()):
                    if _seconds_of(thread) > deadline:
                        del self._deadlines[thread]
                        self._fired.add(thread)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(_TooLongError)
                        )
                if not self._deadlines:
                    self._wanted.clear()


def _new_watch() -> None:
    """Replace the watch, since a forked process has no watching thread and may inherit a lock."""
    global _watch
    _watch = _Watch()


_watch = _Watch()
os.register_at_fork(after_in_child=_new_watch)
_here = _RenderState()
# Compiling a template computes its constant parts, so limits must be set before it.
_compile_plain = chat_template_utils._compile_jinja_template
chat_template_utils._compile_jinja_template = _compile  # type: ignore[assignment]  # a function without a cache

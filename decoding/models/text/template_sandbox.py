"""Compilation of chat templates with limits on the sizes of results and of the output.

A thread cannot be interrupted within a long operation (`'x' * 10**10`), so a result's size is
computed before the result. The size of a list includes its items, also repeated ones: they share
their memory, but not the text that is written for them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, wraps
from itertools import chain
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Environment, Template, nodes, pass_environment, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from transformers.utils.chat_template_utils import _cached_compile_jinja_template

MAX_CHARACTERS = 16_000_000
MAX_BITS = 8192  # of a whole number
_MOST_DIGITS = 1000  # to round to
_MOST_ITEMS = 10_000  # levels and items that an indent may be multiplied by
_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")
_NUMBER = re.compile(r"\d+")

_SEQUENCE = (str, bytes, list, tuple)
_METHOD = (BuiltinMethodType, MethodType)

Size = Callable[..., int]


class TooLargeError(Exception):
    """An error for a result or output that is too large; its message names it and the limit."""


@lru_cache(maxsize=128)
def compile_bounded(source: str) -> Template:
    """Return the template as `transformers` compiles it, with limits."""
    # The empty template provides the environment; another template's constant parts would be
    # computed during compilation.
    environment = _cached_compile_jinja_template("").environment
    environment.__class__ = _BoundedEnvironment
    environment.code_generator_class = _CodeGenerator
    # joins the output, also of blocks and macros
    environment.concat = _join
    for name, size in _FILTERS.items():
        environment.filters[name] = _bounded(environment.filters[name], size)
    environment.filters |= {"join": _join_filter, "list": _list_filter, "sum": _sum_filter}
    template: Template = environment.from_string(source)
    return template


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of `transformers`, whose operators and methods have limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Return an operator's result; raise TooLargeError if it would be too large."""
        if operator == "+":
            if isinstance(left, _SEQUENCE) and isinstance(right, _SEQUENCE):
                _check(_size(left) + _size(right))
        elif operator == "%":
            if isinstance(left, str | bytes):
                _check(_size_of_percent(left, right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if abs(left) > 1 else 1
            if operator == "*":
                bits = left.bit_length() + right.bit_length() - 1
            if bits > MAX_BITS:
                raise TooLargeError(f"computes a whole number of more than {MAX_BITS:,} bits")
        elif operator == "*":
            for repeated, count in ((left, right), (right, left)):
                if isinstance(repeated, _SEQUENCE):
                    _check(_size(repeated) * _as_int(count))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # as jinja2 does
        """Call a function or method; raise TooLargeError if its result would be too large."""
        if isinstance(__obj, _METHOD):
            owner: Any = __obj.__self__
            if __obj.__name__ == "join" and isinstance(owner, (str, bytes)):
                args = tuple(_counted(pieces, len(owner)) for pieces in args)
            elif isinstance(owner, (str, bytes, int)) and (size := _METHODS.get(__obj.__name__)):
                _check(size(owner, *args, **kwargs))
        return __self.bounded(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a `str.format` method with limits on its fields, and None for other values."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, takes_map = str(value.__self__), value.__name__ == "format_map"

        def bounded(*args: Any, **kwargs: Any) -> str:
            # The first pass, without escapes, has the fields' sizes.
            _Formatter(self).vformat(
                text, () if takes_map else args, args[0] if takes_map and args else kwargs
            )
            return wrapped(*args, **kwargs)

        return bounded

    def check_pieces(self, pieces: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the pieces that `~` joins; raise TooLargeError if they are too long together."""
        _check(sum(map(_size, pieces)))
        return pieces

    def bounded(self, value: Any) -> Any:
        """Return a value; raise TooLargeError for a list or mapping that is too large."""
        _check(_size(value))
        return value


class _CodeGenerator(CodeGenerator):
    """A compiler that limits `~`, lists and mappings, which the sandbox does not intercept."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write(
            "(markup_join if context.eval_ctx.autoescape else str_join)(environment.check_pieces(("
        )
        for piece in node.nodes:
            self.visit(piece, frame)
            self.write(", ")
        self.write(")))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._write_bounded(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._write_bounded(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._write_bounded(super().visit_Tuple, node, frame)
        else:  # the targets of an assignment
            super().visit_Tuple(node, frame)

    def _write_bounded(self, visit: Callable[..., None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.bounded(")
        visit(node, frame)
        self.write(")")


class _Formatter(SandboxedFormatter):
    """A formatter with limits on the width of each field and on their sum."""

    def __init__(self, environment: ImmutableSandboxedEnvironment) -> None:
        super().__init__(environment)
        self._written = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        _check(sum(map(_number, _NUMBER.findall(format_spec))))
        text = str(super().format_field(value, format_spec))
        self._written += len(text)
        _check(self._written)
        return text


def _join(pieces: Iterable[str]) -> str:
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise TooLargeError(f"wrote more than {MAX_CHARACTERS:,} characters for one chat")
        kept.append(piece)
    return "".join(kept)


def _check(size: int) -> None:
    """Raise TooLargeError if the size of a string or list exceeds the limit."""
    if size > MAX_CHARACTERS:
        raise TooLargeError(
            f"computes a string or list of more than {MAX_CHARACTERS:,} characters or items in one "
            f"operation"
        )


def _size(value: Any, known: dict[int, int] | None = None) -> int:
    """Return the number of characters and items in a value, each as often as it is written.

    known: the sizes of the containers found so far by identity, so that each is counted once.
    """
    if isinstance(value, str | bytes):
        return len(value)
    parts: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, dict):
        parts = chain.from_iterable(value.items())
    elif isinstance(value, Namespace):
        parts = (value._Namespace__attrs,)
    else:
        return 1
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(value)]


def _bounded(function: Callable[..., Any], size: Size) -> Callable[..., Any]:
    """Return a filter that raises TooLargeError if its result would be too large.

    size: returns the result's size from the filter's arguments, without the extra first argument
    that jinja2 passes to some filters.
    """
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check(size(*args[skipped:], **kwargs))
        return function(*args, **kwargs)

    return checked


def _as_int(value: Any) -> int:
    """Return the value if it is a whole number, else 0; the operation itself then fails."""
    return value if isinstance(value, int) else 0


def _number(digits: str) -> int:
    """Return the number that the digits spell; for 20 digits or more, one above all limits."""
    return int(digits) if len(digits) < 20 else 10**20


def _length(value: Any) -> int:
    return len(value if isinstance(value, str | bytes) else str(value))


def _size_of_percent(form: Any, values: Any) -> int:
    """Return an upper bound for the characters that printf-style formatting writes."""
    text = form.decode("latin-1") if isinstance(form, bytes) else str(form)
    items = values if isinstance(values, tuple) else (values,)
    if isinstance(values, Mapping):
        items = tuple(values.values())
    widths = [width for found in _PERCENT.findall(text) for width in found if width]
    size = sum(_number(width) for width in widths if width != "*")
    if "*" in widths:
        size += sum(abs(_as_int(item)) for item in items)
    longest = max(map(_size, items), default=0)
    return size + len(text) + text.count("%") * longest


def _size_of_replace(s: Any, old: Any = "", new: Any = "", count: int | None = None) -> int:
    found = s.count(old) if isinstance(s, bytes) else str(s).count(str(old))
    return _length(s) + (found if count is None or count < 0 else min(found, count)) * _length(new)


def _size_of_round(value: Any, precision: Any = 0, method: str = "common") -> int:
    if abs(_as_int(precision)) > _MOST_DIGITS:
        raise TooLargeError(f"computes a number rounded to more than {_MOST_DIGITS:,} digits")
    return 0


def _size_of_translate(text: Any, table: Any = None) -> int:
    values = table.values() if isinstance(table, Mapping) else ()
    return len(text) * max((len(value) for value in values if isinstance(value, str)), default=1)


def _width_of(indent: Any) -> int:
    """Return the width of an indent, which is a string or a number of blanks."""
    return len(indent) if isinstance(indent, str) else _as_int(indent)


@pass_eval_context
def _join_filter(
    context: EvalContext, value: Iterable[Any], d: Any = "", attribute: Any = None
) -> Any:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    return FILTERS["join"](context, _counted(value, _length(d)), d)


def _list_filter(value: Any) -> list[Any]:
    return list(value if isinstance(value, str) else _counted(value, 0))


@pass_environment
def _sum_filter(
    environment: Environment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0
) -> Any:
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    return FILTERS["sum"](environment, _counted(iterable, 0), start=start)


def _counted(pieces: Iterable[Any], each: int) -> Iterator[Any]:
    """Yield the pieces; raise TooLargeError once their total size exceeds the limit.

    each: the size of the separator that follows each piece; 0 for pieces that are summed.
    """
    size = 0
    for piece in pieces:
        size += each + max(_size(piece), 1)
        _check(size)
        yield piece


_FILTERS: dict[str, Size] = {
    "batch": lambda value, linecount=0, fill_with=None: (
        0 if fill_with is None else _as_int(linecount) * _size(fill_with)
    ),
    "center": lambda value, width=80: _as_int(width),
    "format": lambda value, *args, **kwargs: _size_of_percent(str(value), kwargs or args),
    "indent": lambda s, width=4, *_, **__: (
        _length(s) + _width_of(width) * (len(str(s).splitlines()) + 1)
    ),
    "replace": _size_of_replace,
    "round": _size_of_round,
    # every line needs an item, and is indented once for each level of the item
    "tojson": lambda value, ensure_ascii=False, indent=None, *_, **__: (
        _MOST_ITEMS * _width_of(indent)
    ),
    "wordwrap": lambda s, width=79, long=True, wrapstring="", *_, **__: (
        _length(s) * (1 + _length(wrapstring or ""))
    ),
}
_METHODS: dict[str, Size] = {
    **dict.fromkeys(
        ("center", "ljust", "rjust", "zfill"), lambda text, width=0, *_: _as_int(width)
    ),
    "expandtabs": lambda text, tabsize=8: (
        len(text) + text.count("\t" if isinstance(text, str) else b"\t") * _as_int(tabsize)
    ),
    "replace": _size_of_replace,
    "to_bytes": lambda number, length=1, *_, **__: _as_int(length),
    "translate": _size_of_translate,
}

"""Real text that every machine with Python has: the sources of the standard library.

The embedded target is trained on it, and the embedded chats and prompts come from it. A stable hash
of a module's dotted name chooses its split, so a module is held out on every machine and for every
Python version, or on none. A function makes a chat: its signature and docstring are the request,
its body is the answer.
"""

import ast
import hashlib
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

Split = Literal["train", "held_out"]
Messages = list[dict[str, str]]

HELD_OUT_PERCENT = 8
MAX_BODY_CHARACTERS = 1200
MAX_REQUEST_CHARACTERS = 900
MAX_TURNS = 3
# Tests are long lists of cases, and installed packages are not the standard library.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
# A file with a larger share of literal data is a table, not a program.
MAX_TABLE_SHARE = 0.5
_LITERALS = (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Constant, ast.BinOp)


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name (`email.message`) and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Function:
    """One function or method, cut from its module and dedented.

    signature: the `def` with its colon. docstring: the literal in the source, indented by four
    spaces ("" if there is none). body: the rest, dedented to column 0.
    """

    module: str
    name: str
    signature: str
    docstring: str
    body: str

    @property
    def scope(self) -> str:
        """Return the dotted name of the module or class that defines the function."""
        return f"{self.module}.{self.name.rpartition('.')[0]}"

    @property
    def request(self) -> str:
        """Return the user's turn: the signature, and the docstring if there is one."""
        return f"{self.signature}\n{self.docstring}" if self.docstring else self.signature


def split_of(module: str) -> Split:
    """Return the split of a module, chosen from the SHA-256 of its dotted name."""
    number = int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "big")
    return "held_out" if number % 100 < HELD_OUT_PERCENT else "train"


def documents(split: Split) -> list[str]:
    """Return the source text of every module of `split`, sorted by the modules' names."""
    return [module.text for module in _modules(split)]


@lru_cache
def functions(split: Split) -> tuple[Function, ...]:
    """Return the distinct functions of `split` whose request and body are not too long.

    A held-out function whose body also occurs in a training module (copied code) is left out.
    """
    seen = {function.body for function in functions("train")} if split == "held_out" else set()
    found: dict[tuple[str, str], Function] = {}
    for module in _modules(split):
        for function in _functions_of(module):
            if function.body not in seen:
                found.setdefault((function.request, function.body), function)
    return tuple(found.values())


def chats(split: Split) -> list[Messages]:
    """Return the functions of `split` as chats.

    A chat holds one function, or up to 3 in every tenth module or class. Each function is a request
    and an answer.
    """
    conversations: list[list[Function]] = []
    for function in functions(split):
        last = conversations[-1] if conversations else []
        joins = last and function.scope == last[-1].scope and len(last) < MAX_TURNS
        if joins and hashlib.sha256(function.scope.encode()).digest()[0] % 10 == 0:
            last.append(function)
        else:
            conversations.append([function])
    return [
        [
            {"role": role, "content": content}
            for function in turns
            for role, content in (("user", function.request), ("assistant", function.body))
        ]
        for turns in conversations
    ]


def held_out_text() -> str:
    """Return the held-out modules of the standard library in one string, sorted by name."""
    return "\n".join(documents("held_out"))


def _modules(split: Split) -> list[Module]:
    return [module for module in _library() if split_of(module.name) == split]


@lru_cache
def _library() -> tuple[Module, ...]:
    """Read every module once, sorted by name, without tables and unreadable files."""
    folder = Path(sysconfig.get_path("stdlib"))
    return tuple(sorted(_walk(folder), key=lambda module: module.name))


def _walk(folder: Path) -> Iterator[Module]:
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts):
            continue
        try:
            with tokenize.open(path) as file:
                text = file.read()
            with warnings.catch_warnings():  # such as "invalid escape sequence"
                warnings.simplefilter("ignore")
                table = _is_table(text, ast.parse(text))
        # templates and codec samples are not Python of this version
        except (SyntaxError, UnicodeDecodeError):
            continue
        if text.strip() and not table:
            yield Module(".".join(parts).removesuffix(".__init__"), text)


def _is_table(text: str, tree: ast.Module) -> bool:
    """Return whether most of a file is literal data, such as character maps and help topics."""
    lines = text.splitlines()
    characters = sum(
        len(line) + 1
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, _LITERALS)
        for line in lines[node.lineno - 1 : node.end_lineno]
    )
    return characters > MAX_TABLE_SHARE * len(text) and len(text) > 2000


def _functions_of(module: Module) -> Iterator[Function]:
    lines = module.text.splitlines()
    for name, node in _definitions(ast.parse(module.text), ""):
        function = _cut(module.name, name, node, lines)
        if function is not None:
            yield function


def _definitions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield (qualified name, node) of unnested functions and methods in source order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from _definitions(child, prefix)


def _cut(
    module: str, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> Function | None:
    """Cut a function out of its module's lines.

    Returns None if its header and body share a line, or if it is not usable.
    """
    first, end = node.body[0], node.end_lineno
    documented = ast.get_docstring(node, clean=False) is not None
    # the line before the first statement; comments between them belong to the body
    header_end = first.lineno - 1
    while header_end > node.lineno and not lines[header_end - 1].split("#")[0].rstrip().endswith(
        ":"
    ):
        header_end -= 1
    body_start = first.end_lineno if documented else header_end
    if end is None or body_start is None or first.lineno == node.lineno or body_start >= end:
        return None
    signature = textwrap.dedent("\n".join(lines[node.lineno - 1 : header_end]))
    docstring = (
        textwrap.dedent("\n".join(lines[first.lineno - 1 : body_start])) if documented else ""
    )
    body = textwrap.dedent("\n".join(lines[body_start:end])).strip("\n").rstrip()
    function = Function(module, name, signature, textwrap.indent(docstring, "    "), body)
    return function if _is_usable(function) else None


def _is_usable(function: Function) -> bool:
    """Return whether a function is short enough and still valid Python after the cut.

    It is not valid if a string at column 0 prevented the body from being dedented.
    """
    if len(function.body) > MAX_BODY_CHARACTERS or len(function.request) > MAX_REQUEST_CHARACTERS:
        return False
    try:
        ast.parse(f"{function.request}\n{textwrap.indent(function.body, '    ')}")
    except SyntaxError:
        return False
    return bool(function.body) and not function.body[0].isspace()

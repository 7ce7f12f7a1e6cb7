"""Real text available on every machine with Python: the sources of its standard library.

The embedded target is trained on it, and the embedded chats and prompts are taken from it. A stable
hash of a module's dotted name chooses its split, so a module held out on one machine is held out on
every other, for any Python version. A function makes a chat: the request is its signature and
docstring, the answer its body.
"""

import ast
import hashlib
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator, Sequence
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
# Tests are long lists of cases, and packages that were installed later are not the standard
# library.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
# A file is a table, not a program, when more of it than this share is one literal after another.
MAX_TABLE_SHARE = 0.5
MAX_COPIED_SHARE = 0.2


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
    def request(self) -> str:
        """The user's turn: the signature, and the docstring if there is one."""
        return f"{self.signature}\n{self.docstring}" if self.docstring else self.signature


def split_of(module: str) -> Split:
    """Return a module's split, by the first 32 bits of its name's SHA-256, modulo 100."""
    number = int.from_bytes(hashlib.sha256(module.encode()).digest()[:4], "big")
    return "held_out" if number % 100 < HELD_OUT_PERCENT else "train"


def documents(split: Split, roots: Sequence[Path] = ()) -> list[str]:
    """Return the sources of the modules of `split`: standard library, then the folders in `roots`.

    Modules under `roots` (such as installed packages) that copy a held-out module of the standard
    library are left out.
    """
    return [module.text for module in _modules(split, roots)]


def functions(split: Split, roots: Sequence[Path] = ()) -> list[Function]:
    """Return the distinct functions of `split` with request and body of moderate length.

    A held-out function whose body also occurs in a training module (copied code) is left out.
    """
    return list(_functions(split, tuple(roots)))


def chats(split: Split, roots: Sequence[Path] = ()) -> list[Messages]:
    """Return every function of `split` as a chat.

    The functions of every tenth module or class are merged to chats of up to 3 turns.
    """
    conversations: list[list[Function]] = []
    for function in functions(split, roots):
        scope = f"{function.module}.{function.name.rpartition('.')[0]}"
        last = conversations[-1] if conversations else []
        joins = last and scope == f"{last[-1].module}.{last[-1].name.rpartition('.')[0]}"
        if joins and len(last) < MAX_TURNS and hashlib.sha256(scope.encode()).digest()[0] % 10 == 0:
            last.append(function)
        else:
            conversations.append([function])
    return [
        [message for function in turns for message in messages_of(function)]
        for turns in conversations
    ]


def messages_of(function: Function) -> Messages:
    """Return one user turn (signature and docstring) and one assistant turn (the body)."""
    return [
        {"role": "user", "content": function.request},
        {"role": "assistant", "content": function.body},
    ]


def held_out_text() -> str:
    """Return the held-out modules of the standard library in one string, sorted by name."""
    return "\n".join(documents("held_out"))


@lru_cache(maxsize=8)
def _functions(split: Split, roots: tuple[Path, ...]) -> tuple[Function, ...]:
    seen = (
        {function.body for function in _functions("train", roots)} if split == "held_out" else set()
    )
    found: dict[tuple[str, str], Function] = {}
    for module in _modules(split, roots):
        for function in _functions_of(module):
            if function.body not in seen:
                found.setdefault((function.request, function.body), function)
    return tuple(found.values())


def _modules(split: Split, roots: Sequence[Path]) -> list[Module]:
    library = _read_folder(Path(sysconfig.get_path("stdlib")))
    chosen = [module for module in library if split_of(module.name) == split]
    if roots:
        held_out = {
            line
            for module in library
            if split_of(module.name) == "held_out"
            for line in _lines(module)
        }
        added = [
            module
            for root in roots
            for module in _read_folder(root)
            if split_of(module.name) == split
        ]
        chosen += [module for module in added if not _is_copy(module, held_out)]
    return chosen


def _is_copy(module: Module, known: set[str]) -> bool:
    """Return True if many of a module's long lines are in `known`, as in vendored copies."""
    lines = _lines(module)
    return sum(line in known for line in lines) > MAX_COPIED_SHARE * len(lines)


def _lines(module: Module) -> list[str]:
    """Return the stripped lines that are too long to be boilerplate."""
    return [line.strip() for line in module.text.splitlines() if len(line.strip()) >= 30]


@lru_cache(maxsize=8)
def _read_folder(folder: Path) -> tuple[Module, ...]:
    """Read every module under `folder` once, by name, without tables and unreadable files."""
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
        # templates and codec samples that are not Python of this version
        except (SyntaxError, UnicodeDecodeError):
            continue
        if text.strip() and not table:
            yield Module(".".join(parts).removesuffix(".__init__"), text)


def _is_table(text: str, tree: ast.Module) -> bool:
    """Return True if most of a file is literal data (character maps, help topics) to skip."""
    lines = text.splitlines()
    characters = 0
    for node in tree.body:
        literal = (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value is not None
            and _is_literal(node.value)
        )
        if literal:
            characters += sum(len(line) + 1 for line in lines[node.lineno - 1 : node.end_lineno])
    return characters > MAX_TABLE_SHARE * len(text) and len(text) > 2000


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.Set | ast.Constant | ast.BinOp)


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
    """Cut one function out of its lines; return None if it shares a line or is too long."""
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
    """Return True if a function fits the limits and is still Python after the cut.

    A string at column 0 stops the dedent.
    """
    if len(function.body) > MAX_BODY_CHARACTERS or len(function.request) > MAX_REQUEST_CHARACTERS:
        return False
    try:
        ast.parse(f"{function.request}\n{textwrap.indent(function.body, '    ')}")
    except SyntaxError:
        return False
    return bool(function.body) and not function.body[0].isspace()

"""The compiled library of the `fused` execution: built from `step` at first use, then cached.

It is kept in the user's cache under a name of its source, flags and processor, and of its content,
so that a torn library is not loaded. Whichever compiler built it, a library of that name is used,
so a machine without one can get it from another.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

from decoding.errors import UserError, note_if_slow, print_note
from decoding.models.native.linear import cpu_flags

SOURCES = Path(__file__).with_name("step")  # whose step.cpp includes the headers
FLAGS = "-std=c++20 -O2 -march=native -fno-math-errno -fno-trapping-math -shared -fPIC -pthread"
BUILDING = "building the compiled step, in some 20 seconds, once on this machine"
COMPILE_SECONDS = 300  # after which a compiler is taken for stuck


# Structures of step/structures.h, which explains them -------------------------------------


class Layer(ctypes.Structure):
    """A layer's weights and cache."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "attention_norm", "state_norm", "qkv", "qkv_bias", "head_norm", "out", "out_bias",
            "mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias", "keys", "values",
        )),
        *((name, ctypes.c_int32) for name in ("attends", "feeds")),
    ]  # fmt: skip


class Model(ctypes.Structure):
    """A model."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dtype", "layers", *"CQHDFVS")),
        ("vocabulary", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("layer", ctypes.POINTER(Layer)),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "head", "cosines", "sines")),
    ]


class Forward(ctypes.Structure):
    """A forward over new tokens."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("B", "N", "taps", "threads", "reads_prompts")),
        ("tokens", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
        ("lengths", ctypes.POINTER(ctypes.c_int64)),
        ("columns", ctypes.POINTER(ctypes.c_int32)),
        *((name, ctypes.c_void_p) for name in ("hidden", "logits", "nodes")),
        ("places", ctypes.POINTER(ctypes.c_int32)),
        ("sees_all", ctypes.c_int32),
        ("states", ctypes.c_void_p),
        ("grown", ctypes.c_int32),
        ("before_norm", ctypes.c_int32),
    ]


class Draws(ctypes.Structure):
    """The random numbers of a round."""

    _fields_ = [
        ("temperature", ctypes.c_double),
        ("keys", ctypes.POINTER(ctypes.c_uint64)),
        ("positions", ctypes.POINTER(ctypes.c_int64)),
        ("shared", ctypes.POINTER(ctypes.c_int64)),
        ("width", ctypes.c_int32),
    ]


class Chain(ctypes.Structure):
    """Some steps of a chain."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("first", "last", "width", "choices")),
        *((name, ctypes.POINTER(ctypes.c_int32)) for name in ("unseen", "counts")),
        ("lengths", ctypes.POINTER(ctypes.c_int64)),
        ("ids", ctypes.c_void_p),
        ("tips", ctypes.POINTER(ctypes.c_int64)),
        ("drafted", ctypes.c_void_p),
        ("confidences", ctypes.POINTER(ctypes.c_double)),
        ("draws", Draws),
        ("probabilities", ctypes.c_void_p),
        ("vocabulary", ctypes.c_int64),
    ]


class Verification(ctypes.Structure):
    """The test of drafted chains."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dtype", "B", "N", "threads")),
        ("V", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("logits", "drafted")),
        ("counts", ctypes.POINTER(ctypes.c_int32)),
        ("q", ctypes.c_void_p),
        ("lenience", ctypes.c_double),
        ("draws", Draws),
        ("accepted", ctypes.POINTER(ctypes.c_int32)),
        ("emitted", ctypes.POINTER(ctypes.c_int64)),
        ("largest", ctypes.c_double * 2),
    ]


def cache_folder() -> Path:
    """Return the folder of compiled libraries: SHALLOW_DRAFT_CACHE, else the user's cache."""
    given = os.environ.get("SHALLOW_DRAFT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "shallow_draft"


def compiler() -> list[str]:
    """Return the command of the C++ compiler: CXX, else c++, g++ or clang++.

    Raises UserError if CXX cannot be run, and if there is no compiler.
    """
    given = os.environ.get("CXX", "")
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise UserError(f"CXX is {given!r}, which is no command ({error}; correct it)") from error
    if words and shutil.which(words[0]) is None:
        raise UserError(
            f"CXX is {given!r}, and there is no program {words[0]} (name another compiler, or "
            f"unset CXX)"
        )
    found = words or [name for name in ("c++", "g++", "clang++") if shutil.which(name)][:1]
    if not found:
        raise UserError("there is no C++ compiler (install g++ or clang, or name one in CXX)")
    return found


def find_libraries() -> list[Path]:
    """Return the intact libraries of this source and processor in the cache."""
    return [path for path in sorted(cache_folder().glob(f"{_name()}-*.so")) if _is_intact(path)]


def _name() -> str:
    """Return the first part of a library's name; the rest is a hash of its content."""
    sources = (SOURCES / "step.cpp", *sorted(SOURCES.glob("*.h")))
    made_of = (*(path.read_text() for path in sources), FLAGS, platform.machine(), *cpu_flags())
    return "step-" + hashlib.sha256("\n".join(map(str, made_of)).encode()).hexdigest()[:20]


def _is_intact(path: Path) -> bool:
    """Return whether a library has the content of its name.

    The dynamic linker maps a shortened file without an error, and reading past its end then kills
    the process.
    """
    try:
        return path.stem.endswith(f"-{_hash_of(path)}")
    except OSError:
        return False


def _hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


@cache
def load_library() -> ctypes.CDLL:
    """Return the compiled step, which is built if this machine has not built it yet.

    A torn library is built again. A cache that cannot be written is replaced by a temporary folder.
    Raises UserError if there is no compiler or it fails.
    """
    library = _load_cached() or _build_into(cache_folder())
    library.forward_step.argtypes = [ctypes.POINTER(Model), ctypes.POINTER(Forward)]
    library.draft_chain.argtypes = [*library.forward_step.argtypes, ctypes.POINTER(Chain)]
    library.verify_chains.argtypes = [ctypes.POINTER(Verification)]
    library.linear.argtypes = [*[ctypes.c_int32] * 3, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 4]
    for function in (library.forward_step, library.draft_chain, library.verify_chains):
        function.restype = ctypes.c_int32
    library.linear.restype = None
    return library


def _load_cached() -> ctypes.CDLL | None:
    for path in find_libraries():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # it was built for another version of the system's libraries
            continue
    return None


def _build_into(cached: Path) -> ctypes.CDLL:
    """Return the library, which is built and then kept in this folder."""
    while_building: AbstractContextManager[None] = note_if_slow(BUILDING)
    try:
        cached.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=".building-", dir=cached)
    except OSError as error:
        print_note(
            f"the compiled step cannot be kept in {cached} ({error}), so every start builds it "
            f"again, in some 20 seconds. Set SHALLOW_DRAFT_CACHE to a writable folder"
        )
        while_building = nullcontext()
        folder = tempfile.mkdtemp(prefix="shallow-draft-")
        cached = Path(folder)
    built = Path(folder) / "step.so"
    try:
        with while_building:
            _build(built)
        path = cached / f"{_name()}-{_hash_of(built)}.so"
        built.replace(path)  # at once, as other processes may build it too
        return ctypes.CDLL(str(path))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _build(library: Path) -> None:
    command = [*compiler(), *shlex.split(FLAGS), str(SOURCES / "step.cpp"), "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        words = done.stderr.strip()[-2000:] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        words = str(error)
    if not library.is_file() or words:
        raise UserError(
            f"the C++ compiler could not build the fused step.\n{shlex.join(command)}\n{words}\n"
            f"Name another compiler in CXX (GCC 11 or clang 14 and newer), or use execution=eager."
        )

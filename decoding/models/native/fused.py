"""The `fused` execution on a CPU: each forward over few tokens is one call of compiled C++.

`step.cpp` has the whole step, from the embedding to the logits, and says how. This module builds it
with the machine's C++ compiler at first use, keeps the library in the user's cache, and hands it
the addresses of weights and cache. The eager version is `NativeTarget.through_layers`, which also
runs where there is no compiler.

Shapes: B rows, N new tokens, V vocabulary, C hidden size, H key/value heads, D head size, S slots
of the cache, L layers, I inputs, O outputs.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from decoding.errors import UserError
from decoding.interfaces import ChainChoice
from decoding.models.native.linear import PlainLinear, cpu_flags, multiplies_bfloat16
from decoding.models.native.weights import Layer, Weights

SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = "-std=c++20 -O2 -march=native -fno-math-errno -fno-trapping-math -shared -fPIC -pthread"
COMPILE_SECONDS = 300  # after which a compiler is taken for stuck
# The types of weights, by their numbers in step.cpp, and in which their products are summed.
SUM_DTYPES = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
}
CODES = {dtype: code for code, dtype in enumerate(SUM_DTYPES)}
# New tokens in all rows of a fused forward; wider ones, such as prompts, run eagerly, where each
# weight is used often enough for a library's matrix products.
WIDEST = 128
# The same for prompts in bfloat16, which PyTorch multiplies in hardware and this step as float32.
WIDEST_PROMPT = 32
SLICE = 1024  # tokens of a call for wider chains, which bounds its buffers


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "attention_norm", "qkv", "qkv_bias", "head_norm", "out", "out_bias",
            "mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias", "keys", "values",
        )),
        *((name, ctypes.c_int32) for name in ("attends", "feeds")),
    ]  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dtype", "layers", *"CQHDFVS")),
        ("vocabulary", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("layer", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "head", "cosines", "sines")),
    ]


class _Forward(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("B", "N", "taps", "threads")),
        ("tokens", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
        ("lengths", ctypes.POINTER(ctypes.c_int64)),
        ("columns", ctypes.POINTER(ctypes.c_int32)),
        ("hidden", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


class _Chain(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("first", "last", "width", "choices")),
        *((name, ctypes.POINTER(ctypes.c_int32)) for name in ("unseen", "counts")),
        ("lengths", ctypes.POINTER(ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("ids", "drafted")),
        ("confidences", ctypes.POINTER(ctypes.c_double)),
        ("temperature", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("uniforms", "probabilities")),
        ("vocabulary", ctypes.c_int64),
    ]


def cache_folder() -> Path:
    """Return the folder of compiled libraries: SHALLOW_DRAFT_CACHE, else the user's cache."""
    given = os.environ.get("SHALLOW_DRAFT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "shallow_draft"


def compiler() -> str | None:
    """Return the path of the C++ compiler: CXX, else c++, g++ or clang++; None if there is none."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def refuse(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the fused step cannot run here, None if it can."""
    if device.type != "cpu":
        return f"it is for CPUs, and the model is on {device}"
    if dtype not in CODES:
        known = ", ".join(str(each).removeprefix("torch.") for each in CODES)
        return f"it is for {known}, and the model is in {str(dtype).removeprefix('torch.')}"
    if compiler() is None and not _library_path().is_file():
        return "it needs a C++ compiler (install g++ or clang, or name one in CXX)"
    return None


def _library_path() -> Path:
    """Return where the library of this source, compiler and processor is kept."""
    made_of = (SOURCE.read_text(), FLAGS, compiler(), platform.machine(), *cpu_flags())
    name = hashlib.sha256("\n".join(map(str, made_of)).encode()).hexdigest()[:20]
    return cache_folder() / f"step-{name}.so"


@cache
def load_library() -> ctypes.CDLL:
    """Return the compiled step, which is built if this machine has not built it yet.

    A torn library is built again. A cache that cannot be written is replaced by a temporary folder.
    Raises UserError if the compiler fails.
    """
    path = _library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # it is missing or torn
        library = _build_into(path)
    library.forward_step.argtypes = [ctypes.POINTER(_Model), ctypes.POINTER(_Forward)]
    library.draft_chain.argtypes = [*library.forward_step.argtypes, ctypes.POINTER(_Chain)]
    library.linear.argtypes = [*[ctypes.c_int32] * 3, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 4]
    library.forward_step.restype = library.draft_chain.restype = ctypes.c_int32
    library.linear.restype = None
    return library


def _build_into(path: Path) -> ctypes.CDLL:
    """Return the library that is built for this path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=".building-", dir=path.parent)
    except OSError:
        folder = tempfile.mkdtemp(prefix="shallow-draft-")
        path = Path(folder) / path.name
    built = Path(folder) / "step.so"
    try:
        _build(built)
        built.replace(path)  # at once, as other processes may build it too
        return ctypes.CDLL(str(path))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _build(library: Path) -> None:
    command = [str(compiler()), *shlex.split(FLAGS), str(SOURCE), "-o", str(library)]
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


def fused_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x (..., I) @ weight_OI^T + bias_O, with each row's bits independent of the others."""
    rows = x.numel() // weight_OI.shape[1]
    if rows > WIDEST or x.dtype != weight_OI.dtype:
        return F.linear(x, weight_OI, bias_O)
    out = x.new_empty((*x.shape[:-1], len(weight_OI)))
    load_library().linear(
        CODES[x.dtype], torch.get_num_threads(), rows, *weight_OI.shape, x.contiguous().data_ptr(),
        weight_OI.data_ptr(), _address(bias_O), out.data_ptr(),
    )  # fmt: skip
    return out


class FusedLinear:
    """A linear layer as one call of C++, for the heads of a target that runs fused."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight_OI.detach().contiguous(), bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return fused_linear(x_NI, self.weight_OI, self.bias_O)


def fuse_linears(module: torch.nn.Module) -> None:
    """Run a trained module's linear layers as `FusedLinear`, without gradients, where it can."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            if refuse(layer.weight.dtype, layer.weight.device) is not None:
                return
            layer.forward = FusedLinear(layer.weight, layer.bias)  # type: ignore[assignment,method-assign]


class FusedForward:
    """The fused step of one target; `bind` gives it the target's cache."""

    def __init__(self, weights: Weights, layers: Sequence[tuple[int, Layer, bool, bool]]) -> None:
        """Prepare the step of these layers.

        layers: (index in the cache, weights, whether attention runs, whether the MLP runs) of each.
        Raises UserError if the step cannot be built here.
        """
        reason = refuse(weights.dtype, weights.device)
        if reason is not None:
            raise UserError(f"execution 'fused' does not work here: {reason}. Use execution=eager.")
        if weights.packed:
            raise ValueError("the fused step needs plain weights, found packed ones.")
        self.weights, self.layers, self._library = weights, layers, load_library()
        config = weights.config
        self._columns_of: dict[tuple[int, ...], ctypes.Array[ctypes.c_int32]] = {}
        self._held: list[Tensor] = []  # whose addresses the structures hold
        self._layer = (_Layer * len(layers))(*(self._layer_of(*each[1:]) for each in layers))
        self._sum_dtype = SUM_DTYPES[weights.dtype]
        sizes = (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim)
        self._model = _Model(
            CODES[weights.dtype], len(layers), *sizes, config.intermediate_size, config.head_rows,
            0, len(weights.embedding_VC), config.norm_eps, self._layer,
            *map(self._hold, (weights.embedding_VC, weights.norm_C, weights.head_weight_VC)),
        )  # fmt: skip
        # without hardware for it, PyTorch multiplies bfloat16 some five times as slowly
        is_bfloat16, in_hardware = weights.dtype == torch.bfloat16, multiplies_bfloat16()
        self._widest = sys.maxsize if is_bfloat16 and not in_hardware else WIDEST
        self._widest_prompt = WIDEST_PROMPT if is_bfloat16 and in_hardware else self._widest

    def takes(self, rows: int) -> bool:
        """Return whether forwards over this many new tokens, in all rows, run fused."""
        return rows <= self._widest

    def takes_prompt(self, rows: int) -> bool:
        """Return whether this many tokens of prompts are read fused."""
        return rows <= self._widest_prompt

    def bind(self, cache_L2BHSD: Tensor, rope: tuple[Tensor, Tensor]) -> None:
        """Use this cache and these rope tables (S, D)."""
        self._cache = cache_L2BHSD
        self._rope = [table.to(self._sum_dtype).contiguous() for table in rope]
        self._model.S = cache_L2BHSD.shape[4]
        self._model.cosines, self._model.sines = (table.data_ptr() for table in self._rope)
        for place, (cached, *_) in zip(self._layer, self.layers, strict=True):
            place.keys, place.values = (part.data_ptr() for part in cache_L2BHSD[cached])

    def __call__(
        self,
        tokens_BN: Tensor,
        parents_BN: Tensor | None,
        lengths_B: Sequence[int],
        taps: tuple[int, ...],
        has_logits: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return logits and hidden states of new tokens after `lengths_B` committed ones.

        Hidden states are after the final norm, or at the taps. The logits of bfloat16 weights are
        in float32. Without `has_logits` they are not computed, and the first tensor is empty.
        Raises IndexError for a token outside the vocabulary.
        """
        B, N = tokens_BN.shape
        if (width := max(1, SLICE // B)) < N and parents_BN is None:
            parts = [
                self(part_BN, None, [length + n * width for length in lengths_B], taps, has_logits)
                for n, part_BN in enumerate(tokens_BN.split(width, 1))
            ]
            logits, hidden = (torch.cat(each, 1) for each in zip(*parts, strict=True))
            return logits, hidden
        weights, wanted = self.weights, taps or (len(self.layers),)
        C, V = weights.config.hidden_size, weights.config.head_rows
        hidden = torch.empty(B, N, len(wanted) * C, dtype=weights.dtype)
        logits = torch.empty(B, N, V if has_logits else 0, dtype=self._sum_dtype)
        tokens_BN = tokens_BN.to(torch.int64).contiguous()
        parents_BN = None if parents_BN is None else parents_BN.contiguous()
        forward = _Forward(
            B, N, len(wanted), torch.get_num_threads(), _address(tokens_BN), _address(parents_BN),
            (ctypes.c_int64 * B)(*lengths_B), self._columns(wanted),
            _address(hidden), _address(logits) if has_logits else None,
        )  # fmt: skip
        self._check(self._library.forward_step(self._model, forward), N)
        return weights.spread(logits) if has_logits else logits, hidden

    def draft_chain(
        self,
        tokens_BK: Tensor,
        unseen_B: Sequence[int],
        counts_B: list[int],
        lengths_B: Sequence[int],
        choice: ChainChoice,
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Return what `Target.chain_call` returns after `lengths_B` tokens, without committing.

        All steps are one call, or one call each if the lengths are decided on the way.
        """
        (B, K), N, config = tokens_BK.shape, max(counts_B), self.weights.config
        choices = min(choice.vocab_size, config.head_rows)
        if (ids_N := self.weights.ids_N) is not None:
            choices = int((ids_N < choice.vocab_size).sum())
        logits = torch.empty(B, K, config.head_rows, dtype=self._sum_dtype)
        tokens_BK = tokens_BK.to(torch.int64).contiguous()
        drafted_BN = torch.empty(B, N, dtype=torch.int64)
        q_BNV = None
        if choice.temperature:
            q_BNV = torch.empty(B, N, choice.vocab_size, dtype=self._sum_dtype)
        numbers, lengths = ctypes.c_int32 * B, (ctypes.c_int64 * B)(*lengths_B)
        counts, confidences_B = numbers(*counts_B), (ctypes.c_double * B)()
        forward = _Forward(
            B, K, 0, torch.get_num_threads(), _address(tokens_BK), None, lengths,
            self._columns(()), None, _address(logits),
        )  # fmt: skip
        chain = _Chain(
            0, N, N, choices, numbers(*unseen_B), counts, lengths, _address(ids_N),
            _address(drafted_BN), confidences_B if choice.shorten else None, choice.temperature,
            None if q_BNV is None else choice.uniforms_BN.ctypes.data, _address(q_BNV),
            choice.vocab_size,
        )  # fmt: skip
        while chain.first < max(counts_B):
            if choice.shorten is not None:
                chain.last = chain.first + 1
            self._check(self._library.draft_chain(self._model, forward, chain), K)
            chain.first = chain.last
            if choice.shorten is not None:
                counts_B = choice.shorten(chain.last, confidences_B, counts_B)
                counts[:] = counts_B
        taken = slice(chain.last)
        return drafted_BN[:, taken], None if q_BNV is None else q_BNV[:, taken], counts_B

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states after the final norm."""
        weight_VC = self.weights.head_weight_VC
        assert weight_VC is not None
        return self.weights.spread(fused_linear(hidden, weight_VC, None))

    def _columns(self, taps: tuple[int, ...]) -> ctypes.Array[ctypes.c_int32]:
        """Return the place of each layer's hidden states among those of the taps, or -1."""
        if taps not in self._columns_of:
            columns = [-1] * (len(self.layers) + 1)
            for column, tap in enumerate(taps):
                columns[tap] = column
            self._columns_of[taps] = (ctypes.c_int32 * len(columns))(*columns)
        return self._columns_of[taps]

    def _check(self, failed: int, num_tokens: int) -> None:
        """Raise IndexError if a call over `num_tokens` new tokens has failed."""
        if failed:
            raise IndexError(
                f"tokens, lengths or parents are out of range: expected tokens from 0 to "
                f"{len(self.weights.embedding_VC) - 1}, lengths of at most "
                f"{self._model.S - num_tokens}, and parents before their nodes."
            )

    def _layer_of(self, layer: Layer, attends: bool, feeds: bool) -> _Layer:
        products = (layer.qkv, layer.out, layer.gate_up, layer.down)
        qkv, out, gate_up, down = (
            (self._hold(product.weight_OI), self._hold(product.bias_O))
            for product in products
            if isinstance(product, PlainLinear)  # all of them, as the weights are not packed
        )
        norms = layer.attention_norm_C, layer.query_key_norm_QHD, layer.mlp_norm_C
        before, heads, between = map(self._hold, norms)
        empty = (None, None)  # the cache, until `bind`
        return _Layer(before, *qkv, heads, *out, between, *gate_up, *down, *empty, attends, feeds)

    def _hold(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor's contiguous form, which stays alive with this object."""
        if tensor is None:
            return None
        self._held.append(tensor.contiguous())
        return self._held[-1].data_ptr()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

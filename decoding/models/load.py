"""Loading of a target model from a model folder or a GGUF file."""

import warnings
from pathlib import Path
from typing import Any

import torch

from decoding.devices import device_of
from decoding.errors import UserError
from decoding.interfaces import Target
from decoding.models.distributed.parallel import ParallelTarget, processes_of
from decoding.models.folder import (
    is_gguf,
    load_state,
    read_config,
    refuse_unsupported_attention,
    weight_files,
)
from decoding.models.hf import EXECUTIONS as HF_EXECUTIONS
from decoding.models.hf import HFTarget
from decoding.models.hub import name_of
from decoding.models.model_check import check_model, check_tied_head
from decoding.models.native import fused, library
from decoding.models.native.model import EXECUTIONS, NativeTarget
from decoding.models.native.weights import FAMILIES
from decoding.values import check_choice, check_values

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BACKENDS = ("native", "hf", "llama_cpp")
AUTO = "auto"
# Bytes of a model's weight files from which `auto` builds the fused step on a CPU. The build takes
# some 20 seconds, once on each machine, which runs of smaller models seldom outlast.
WORTH_FUSING = 32 << 20


def load_target(
    folder: str | Path,
    *,
    backend: str = "native",
    dtype: str = "float32",
    device: str = "cpu",
    max_length: int | None = None,
    batch_size: int | None = None,
    trust_remote_code: bool = False,
    parallel: str = "none",
    processes: int = 0,
    execution: str = AUTO,
) -> Target:
    """Load the model in a Hugging Face folder or a GGUF file as a target.

    backend: 'native' (llama, mistral without window, qwen2, qwen3) or 'hf' (any decoder-only
    full-attention causal LM) for a folder. A GGUF file runs in llama.cpp, 'llama_cpp', which need
    not be named.
    dtype: float64, float32, bfloat16 or float16; of a GGUF file, only of its cache of keys and
    values, and float64 is not one.
    device: cpu, cuda, cuda:N, or auto (a GPU if there is one).
    max_length: maximum tokens in a row; the default and upper bound is the model's context length.
    batch_size: number of cache rows of max_length tokens to reserve now, so that insufficient
    memory is reported at once; by default the cache grows as needed.
    trust_remote_code: run the Python code of the folder, if its model needs it; hf only.
    parallel: 'none'; 'tp' splits every layer over several processes, and 'layers' gives each
    process some layers; native only.
    processes: number of processes, this one included; 0 is one for each GPU from `device` on.
    execution: for native 'eager', 'fused' (a step is one call of C++, on a CPU), 'graph' (steps
    recorded as CUDA graphs) or 'compiled' (recorded with fused layers); on a CPU the last two are
    only for tests. For hf 'eager' or 'compiled'. 'auto': see `choose_execution`.

    Raises UserError for an invalid setting, and for a folder that is missing, empty or damaged,
    that holds only pickled weights, or whose model is not supported.
    """
    check_values({"device": device, "max_length": max_length, "batch_size": batch_size})
    check_values({"processes": processes, "trust_remote_code": trust_remote_code})
    check_choice("dtype", dtype, tuple(DTYPES))
    check_choice("backend", backend, BACKENDS)
    device = device_of(device)
    if is_gguf(folder):
        return _load_gguf(
            folder,
            backend,
            dtype=dtype,
            device=device,
            max_length=max_length,
            batch_size=batch_size,
            parallel=parallel,
            execution=execution,
        )
    config = read_config(folder)
    _check_folder(folder, config, backend, max_length)
    count = processes_of(parallel, processes, backend, device)
    _check_execution(execution, backend, count)
    if execution == AUTO:
        execution = choose_execution(
            folder, backend=backend, dtype=dtype, device=device, processes=count
        )
    check_tied_head(folder)
    name = name_of(folder)
    target: NativeTarget | HFTarget | ParallelTarget
    place: dict[str, Any] = {"dtype": DTYPES[dtype], "device": device, "max_length": max_length}
    try:
        if backend == "hf":
            target = HFTarget.from_folder(
                folder, name, DTYPES[dtype], device, max_length, trust_remote_code, execution
            )
        elif count > 1:
            target = ParallelTarget(folder, kind=parallel, processes=count, **place)
        else:
            target = NativeTarget.from_state(
                config, load_state(folder), name=name, execution=execution, **place
            )
    except UserError as error:
        raise error if str(folder) in str(error) else UserError(f"{folder}: {error}") from error
    if batch_size is not None:
        target.open(batch_size)
    return target


def _load_gguf(path: str | Path, backend: str, **settings: Any) -> Target:
    """Load a GGUF file (see `load_gguf`). Raises UserError for backend=hf too."""
    if backend == "hf":
        raise UserError(
            f"{path} is a GGUF file, which backend=hf does not read. Use backend=llama_cpp, or "
            f"convert it once: python scripts/from_gguf.py {path} FOLDER"
        )
    # imported here, since other models need neither package
    from decoding.models.llama_cpp.load import load_gguf

    return load_gguf(path, **settings)


def choose_execution(
    folder: str | Path, *, backend: str, dtype: str, device: str, processes: int = 1
) -> str:
    """Return the execution that `auto` stands for: the one that decodes fastest here.

    It is graph on a GPU, fused on a CPU for weights of WORTH_FUSING bytes and more, and eager
    otherwise: for hf, for several processes, for a dtype that the fused step lacks and without a
    working C++ compiler, which a warning reports. For a GGUF file it stays `auto`.
    Raises UserError for an unknown backend or dtype, and for a folder without weights.
    """
    check_choice("dtype", dtype, tuple(DTYPES))
    check_choice("backend", backend, BACKENDS)
    if is_gguf(folder):
        return AUTO
    if backend != "native" or processes > 1:
        return "eager"
    size = sum(file.stat().st_size for file in weight_files(folder))
    return native_execution(size, DTYPES[dtype], torch.device(device_of(device)))


def native_execution(weight_bytes: int, dtype: torch.dtype, device: torch.device) -> str:
    """Return the fastest execution of a native target with weights of this size."""
    if device.type != "cpu":
        return "graph"
    if weight_bytes < WORTH_FUSING or dtype not in fused.CODES:
        return "eager"
    reason = fused.refuse(dtype, device)
    try:
        if reason is None:
            library.load_library()
    except UserError as error:
        reason = str(error)
    if reason is None:
        return "fused"
    warnings.warn(
        f"decoding operation by operation, which is slower: the fused step cannot run: {reason}",
        stacklevel=2,
    )
    return "eager"


def _check_folder(
    folder: str | Path, config: dict[str, Any], backend: str, max_length: int | None
) -> None:
    """Raise UserError for settings or a model that cannot be loaded, before weights are read."""
    if backend == "llama_cpp":
        raise UserError(
            f"{folder} is a folder, but backend=llama_cpp runs GGUF files. Use backend=native, or "
            f"convert it: python scripts/to_gguf.py {folder} OUT.gguf"
        )
    context = config.get("max_position_embeddings") or config.get("n_positions")
    if max_length is not None and context is not None and max_length > context:
        raise UserError(
            f"{folder}: max_length {max_length} is more than the model's context of {context} "
            f"tokens. Use at most {context}."
        )
    if backend == "native" and config["model_type"] not in FAMILIES:
        raise UserError(
            f"{folder}: model_type '{config['model_type']}' is not one of the native backend's "
            f"({', '.join(FAMILIES)}). Use backend=hf for other decoder-only full-attention models."
        )
    refuse_unsupported_attention(config, str(folder))
    check_model(folder)


def _check_execution(execution: str, backend: str, processes: int) -> None:
    known = EXECUTIONS if backend == "native" else HF_EXECUTIONS
    check_choice("execution", execution, (AUTO, *known))
    if processes > 1 and execution not in (AUTO, "eager"):
        raise UserError(
            f"execution '{execution}' does not work for a target over several processes. Use "
            f"execution=eager or parallel=none."
        )

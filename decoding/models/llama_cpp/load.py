"""Loading of a GGUF file as a target that llama.cpp runs."""

import os
from pathlib import Path
from typing import Any

from decoding.errors import UserError
from decoding.models.gguf.file import read_gguf, shape_of
from decoding.models.llama_cpp.context import CACHE_TYPES, Model
from decoding.models.llama_cpp.library import Library, load_library
from decoding.models.llama_cpp.target import LlamaCppTarget

AUTO = "auto"
_OFF = ("0", "false", "off", "disabled")


def load_gguf(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    max_length: int | None = None,
    batch_size: int | None = None,
    parallel: str = "none",
    execution: str = AUTO,
) -> LlamaCppTarget:
    """Load a GGUF file as a target; see `load_target`.

    dtype: of the cache of keys and values, float32, float16 or bfloat16; the weights stay in the
    file's types. Raises UserError for an invalid setting, if llama-cpp-python or the gguf package
    is not installed, for a file that is damaged, incomplete or one part of several, and for a model
    that llama.cpp does not know or whose attention is not full and causal.
    """
    path = Path(path)
    for fits, what, remedy in (
        (dtype in CACHE_TYPES, f"dtype is {dtype}", f"dtype={' or '.join(CACHE_TYPES)}"),
        (device == "cpu", f"device is {device}", "device=cpu; llama.cpp chooses its own devices"),
        (parallel == "none", f"parallel is {parallel}", "parallel=none"),
        (execution in (AUTO, "eager"), f"execution is {execution}", "execution=auto"),
    ):
        if not fits:
            raise UserError(
                f"{path}: {what}, which does not work for a GGUF file in llama.cpp. Use {remedy}."
            )
    file = read_gguf(path)
    context = shape_of(file)["max_position_embeddings"]
    if max_length is not None and max_length > context:
        raise UserError(
            f"{path}: max_length {max_length} is more than the model's context of {context} "
            f"tokens. Use at most {context}."
        )
    library = load_library()
    model = _load_model(library, path)
    _refuse_other_attention(library, model, path)
    target = LlamaCppTarget(
        library,
        model,
        file,
        name=path.stem,
        max_length=max_length or context,
        cache_dtype=dtype,
    )
    if batch_size is not None:
        target.open(batch_size)
    return target


def _load_model(library: Library, path: Path) -> Model:
    """Return the loaded weights, or raise UserError with llama.cpp's reason."""
    functions = library.functions
    library.errors.clear()
    settings = functions.llama_model_default_params()
    # the variable of llama.cpp's own programs, which turns the repacking of weights off
    settings.use_extra_bufts = os.environ.get("LLAMA_ARG_REPACK", "1") not in _OFF
    pointer = functions.llama_model_load_from_file(os.fsencode(path), settings)
    if not pointer:
        raise UserError(
            f"{path}: llama.cpp cannot load it ({library.reason()}). Copy the file again, or use a "
            f"model that this version of llama-cpp-python knows."
        )
    return Model(library, pointer)


def _refuse_other_attention(library: Library, model: Model, path: Path) -> None:
    """Raise UserError for models that cannot verify drafts: see `refuse_unsupported_attention`."""
    functions: Any = library.functions
    kinds = (
        ("has an encoder", functions.llama_model_has_encoder(model.pointer)),
        ("is recurrent", functions.llama_model_is_recurrent(model.pointer)),
        ("has recurrent layers", functions.llama_model_is_hybrid(model.pointer)),
        ("is a diffusion model", functions.llama_model_is_diffusion(model.pointer)),
        ("has a sliding attention window", functions.llama_model_n_swa(model.pointer) > 0),
    )
    for what, found in kinds:
        if found:
            raise UserError(
                f"{path}: the model {what}, expected full causal attention in every layer. Use "
                f"another model."
            )

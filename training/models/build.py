"""Construction and loading of Hugging Face models, and published configurations of targets."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from decoding.drafters.registry import HEADS
from decoding.errors import UserError
from decoding.models.draft_vocabulary import draft_vocab_size, load_restricted
from decoding.models.folder import is_gguf, read_config, refuse_file
from decoding.models.hub import missing_model, parse_hub_name
from decoding.models.load import BACKENDS
from decoding.models.model_check import check_config, check_loaded, check_model, check_tied_head
from decoding.values import check_choice
from jobs.config import ParallelConfig, TargetConfig, refuse_parallel
from jobs.paths import data_folder, model_is_here, resolve_model
from jobs.ranks import SHARDED_WEIGHTS
from training.config import DataConfig, StudentConfig
from training.models.attention import PACKED

CONF_TARGETS = data_folder("conf") / "target"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of this name. Raises UserError for an unknown name."""
    check_choice("dtype", name, tuple(DTYPES))
    return DTYPES[name]


def build_llama(shape: StudentConfig, dtype: torch.dtype, **base: Any) -> Any:
    """Build a LLaMA with random weights and packed attention.

    base: further LlamaConfig fields (vocabulary, context, rope, special ids).
    """
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads or shape.num_attention_heads,
        head_dim=shape.head_dim or shape.hidden_size // shape.num_attention_heads,
        intermediate_size=shape.intermediate_size,
        **base,
    )
    return random_model(config, dtype)


def random_model(config: LlamaConfig | Qwen3Config, dtype: torch.dtype, empty: bool = False) -> Any:
    """Build a causal LM of `config` with random weights and packed attention.

    empty: build it on the meta device, to be filled later.
    """
    config._attn_implementation = PACKED
    kind: Any = Qwen3ForCausalLM if isinstance(config, Qwen3Config) else LlamaForCausalLM
    with torch.device("meta") if empty else contextlib.nullcontext():
        model: Any = kind(config)
    if empty:  # no state dict holds the rope frequencies
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.to(dtype)


def known_config(folder: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read the configuration of a language model's folder.

    trust_remote_code: run Python of the folder, for model types defined there. Raises UserError for
    invalid values, a head's folder, and a model type unknown to transformers.
    """
    refuse_file(folder)
    values = read_config(folder)
    kind = values["model_type"]
    check_config(folder, values)
    try:
        return AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (StrictDataclassError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"{folder / 'config.json'}: {' '.join(str(error).split())}. Expected the values of a "
            f"config.json"
        ) from error
    except ValueError as error:
        if "auto_map" in values and not trust_remote_code:
            raise UserError(
                f"{folder}: its model_type '{kind}' is defined by Python in the folder, which is "
                f"not run. If you trust it, eval.run, distill.regenerate and "
                f"recurrent_drafting.generate run it with target.trust_remote_code=true "
                f"target.backend=hf"
            ) from error
        found = f"{folder} is not a known language model: its config.json has model_type '{kind}'"
        if kind in HEADS:
            raise UserError(
                f"{found}, a {HEADS[kind]} head. Draft with it as drafter=FOLDER of "
                f"recurrent_drafting.generate or in drafters= of eval.run, or continue its "
                f"training as head.path= of heads.train head={HEADS[kind]}"
            ) from error
        raise UserError(
            f"{found}. Use a LLaMA, Mistral or Qwen folder, or a newer transformers"
        ) from error


def load_causal_lm(folder: Path, dtype: torch.dtype) -> Any:
    """Load a causal LM with packed attention from a model folder (safetensors only).

    Raises UserError if the folder holds no language model, or a damaged one.
    """
    config = known_config(folder)
    check_model(folder)
    check_tied_head(folder)
    if draft_vocab_size(folder):
        return load_restricted(folder, config, dtype, attn_implementation=PACKED)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=PACKED,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        trust_remote_code=False,
    )
    model, info = loaded
    check_loaded(folder, info)
    return model


def target_is_here(target: TargetConfig, weights: bool = True) -> bool:
    """Return whether the target's folder exists; without it only dry runs are possible.

    The folder may be in the Hub's cache. weights: whether it needs them.
    """
    return model_is_here(target.path, weights)


def target_config(
    target: TargetConfig, weights: bool = True, decodes: bool = False
) -> PretrainedConfig:
    """Return the configuration in the target's folder; without the folder, the published one.

    A target on the Hub without a published configuration is downloaded. weights: whether the job
    needs its weights. decodes: whether the job only decodes, for which a GGUF file will do. Raises
    UserError, with the names of published targets, if there is neither, for an invalid
    configuration, for a model with a draft vocabulary, and for another GGUF file.
    """
    on_hub = not target.config and parse_hub_name(target.path)
    if on_hub or target_is_here(target, weights):
        folder = resolve_model(target.path, weights)
        if decodes and is_gguf(folder):
            return PretrainedConfig(**read_config(folder))
        config = known_config(folder, target.trust_remote_code)
        if size := draft_vocab_size(folder):
            raise UserError(
                f"target.path={target.path} is a drafter of {size} tokens, expected a model with "
                f"an lm_head row for each of its {config.vocab_size}. Set target.path to the "
                f"drafter's target"
            )
        return config
    if not target.config:
        raise UserError(
            f"target.path={missing_model(target.path)}. Correct it, or for a dry run choose a "
            f"target with a published configuration: target={' | '.join(published_targets())}"
        )
    values = dict(target.config)
    kind = values.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **values)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(
            f"target.config is not a model configuration: {' '.join(str(error).split())}. "
            f"Expected the values of a config.json, including model_type"
        ) from error


def find_target_folder(target: TargetConfig, dry_run: bool, weights: bool = True) -> Path:
    """Return the target's folder. Raises UserError if it is missing, except in a dry run.

    weights: whether the job needs the target's weights.
    """
    if target_is_here(target, weights):
        return resolve_model(target.path, weights)
    if not dry_run:
        raise UserError(
            f"target.path={target.path} does not exist (working folder: {Path.cwd()}), and the "
            f"cache of the Hugging Face Hub does not have it. Set it to the target's folder, or "
            f"download the target: hf download OWNER/NAME --local-dir {target.path}"
        )
    return Path(target.path).expanduser()


def published_targets() -> list[str]:
    """Return the names of the targets in conf/target that have or inherit a configuration."""
    texts = {file.stem: file.read_text() for file in CONF_TARGETS.glob("*.yaml")}
    return sorted(
        name for name, text in texts.items() if "\nconfig:\n" in text or "\ndefaults:\n" in text
    )


def describe_missing_target(target: TargetConfig) -> str:
    """Describe what a dry run lacks without the target's folder; return "" if the folder exists."""
    if target_is_here(target):
        return ""
    config = target.config
    return (
        f"target.path={target.path} does not exist. The published configuration gives its shape "
        f"({config.get('model_type')}, {config.get('num_hidden_layers')} layers of width "
        f"{config.get('hidden_size')}), and its tokenizer is missing, so a drafter folder written "
        f"now holds no tokenizer files"
    )


def print_missing(target: TargetConfig) -> None:
    """Print what a dry run lacks without the target's folder."""
    if missing := describe_missing_target(target):
        print(f"note: {missing}")


def check_target(target: TargetConfig, parallel: ParallelConfig) -> None:
    """Raise UserError for a target that a training job cannot load.

    It is refused for an unknown dtype or backend, and if it needs Python of its folder.
    target.parallel, which applies to the held-out answers, is refused unless parallel.kind shards
    weights.
    """
    dtype_of(target.dtype)
    refuse_own_code(target)
    check_choice("target.backend", target.backend, BACKENDS)
    if parallel.kind not in SHARDED_WEIGHTS:
        refuse_parallel(target)


def refuse_own_code(target: TargetConfig) -> None:
    """Raise UserError if target.trust_remote_code is true: training runs no Python of a folder."""
    if target.trust_remote_code:
        raise UserError(
            "target.trust_remote_code is true, expected false, as this job runs only known model "
            "families. eval.run, distill.regenerate and recurrent_drafting.generate accept it with "
            "target.backend=hf"
        )


def check_context(target: TargetConfig, data: DataConfig, config: Any) -> None:
    """Raise UserError if data.max_length exceeds the target's context.

    config: the target's Hugging Face configuration.
    """
    context = target.max_length or getattr(config, "max_position_embeddings", None)
    if context is not None and data.max_length > context:
        raise UserError(
            f"data.max_length is {data.max_length}, but the context of {target.path} is {context} "
            f"tokens. Lower data.max_length"
        )

"""Folders of early-exit heads: this project's own layout, as no server reads such heads.

config.json has `model_type: shallow_draft_early_exit`, `exit_layer`, `draft_vocab_size`, and the
shape of the target (`target_layers`, ...), to whose layers the head is bound. model.safetensors has
the head's layer and norm with fused products: `qkv`, `out`, `gate_up` and `down`, each with
`.weight` and, where config.json has it, `.bias`; `attention_norm`, `mlp_norm` and `norm`; for Qwen3
`query_norm` and `key_norm`; and `token_ids`, the ids of a draft vocabulary. The target's lm_head is
not stored.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from decoding.errors import UserError
from decoding.models.draft_vocabulary import check_tokens
from decoding.models.folder import WEIGHTS, load_state
from decoding.models.native.rope import inverse_frequencies, rope_parameters
from decoding.models.native.weights import FAMILIES
from decoding.values import is_int, is_number, quote
from heads.early_exit.model import EarlyExitConfig, EarlyExitHead
from training.heads import checkpoint
from training.heads.own_layout import OwnLayout

_TOKENS = "token_ids"
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_positions")
LAYOUT = OwnLayout(
    "shallow_draft_early_exit",
    keys={"num_layers": "target_layers"},  # the head has one layer, not the target's number
    tensors={"token_ids_V": _TOKENS},
)


def load_head(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> EarlyExitHead:
    """Load the head of a folder, for drafting.

    Raises UserError for a folder of another kind, for invalid values, and for tensors that are
    missing, unknown, not finite, or of another shape than config.json describes.
    """
    config, file = read_head_config(folder), folder / WEIGHTS
    with torch.device("meta"):
        head = EarlyExitHead(config)
    described = f"a layer of width {config.hidden_size} after layer {config.exit_layer}"
    checkpoint.load_weights(head, load_state(folder), LAYOUT.stored_name, file, described)
    if head.token_ids_V is not None:
        head.token_ids_V = head.token_ids_V.long()
        check_tokens(file, _TOKENS, head.token_ids_V, config.vocab_size)
    return head.to(device, dtype).requires_grad_(False).eval()


def read_head_config(folder: Path) -> EarlyExitConfig:
    """Read the shape of a folder's head.

    Raises UserError for a folder of another kind, and with all missing and invalid values.
    """
    values, file = LAYOUT.read(folder), folder / "config.json"
    wrong = [
        f"{key} is {quote(values.get(key))}, expected {expected}"
        for key, (fits, expected) in _rules(values).items()
        if not fits(values.get(key))
    ]
    if wrong:
        raise UserError(
            f"{file}: {'; '.join(wrong)}. Use the config.json that was written with these weights."
        )
    config = LAYOUT.shape(EarlyExitConfig, values)
    rope_parameters({"rope_parameters": config.rope})
    checkpoint.check_trained(folder, config)
    return config


def _rules(values: dict[str, Any]) -> dict[str, tuple[Callable[[Any], bool], str]]:
    """Return a test of each value of config.json, and a description of the valid values."""

    def whole(least: int, most: Any = None) -> tuple[Callable[[Any], bool], str]:
        if not is_int(most):
            return lambda value: is_int(value) and value >= least, f"a whole number from {least}"
        return (
            lambda value: is_int(value) and least <= value <= most,
            f"a whole number from {least} to {most}",
        )

    truth = (lambda value: isinstance(value, bool)), "true or false"
    heads: Any = values.get("num_heads")
    layers: Any = values.get("target_layers")
    return {
        **dict.fromkeys(_SIZES, whole(1)),
        "target_layers": whole(2),
        "exit_layer": whole(1, layers - 1 if is_int(layers) else None),
        "num_heads": whole(1),
        "num_kv_heads": (
            lambda value: is_int(value) and value > 0 and is_int(heads) and heads % value == 0,
            f"a divisor of num_heads ({quote(heads)})",
        ),
        "draft_vocab_size": whole(0, values.get("vocab_size")),
        "family": (lambda value: value in FAMILIES, f"one of {', '.join(FAMILIES)}"),
        "norm_eps": (lambda value: is_number(value) and value >= 0, "a number from 0"),
        "rope": (lambda value: isinstance(value, dict), "the target's rope parameters"),
        **dict.fromkeys(("tied", "qkv_bias", "out_bias", "mlp_bias"), truth),
    }


def differences(head: EarlyExitConfig, target: Any) -> list[str]:
    """Describe the fields in which a target differs from the one that a head was trained for.

    target: its `NativeConfig`.
    """

    def angles(config: Any) -> list[float]:
        """Return the rotations per position, which rope fields of several forms may describe."""
        return inverse_frequencies(config.rope, config.head_dim, config.max_positions).tolist()

    # the head depends neither on a tied embedding nor on the drafted tokens of another model
    compared = [name for name in vars(target) if name not in ("tied", "draft_vocab_size", "rope")]
    wrong = [name for name in compared if getattr(head, name) != getattr(target, name)]
    wrong += ["rope"] if angles(head) != angles(target) else []
    return [
        f"{name} is {quote(getattr(head, name))} for the head and {quote(getattr(target, name))} "
        f"in the target"
        for name in wrong
    ]

"""Sizes of a model by its configuration alone, counted before anything is built or loaded."""

from typing import Any

from transformers import PreTrainedConfig

WIDTHS = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)


def target_widths(target: Any) -> dict[str, int]:
    """The widths of a configuration; families without an explicit head_dim have hidden_size /
    heads.
    """
    fields = target.to_dict()
    heads = fields["num_attention_heads"]
    filled = {
        "head_dim": fields.get("head_dim") or fields["hidden_size"] // heads,
        "num_key_value_heads": fields.get("num_key_value_heads") or heads,
    }
    return {name: filled.get(name) or fields[name] for name in WIDTHS}


def parameter_counts(config: PreTrainedConfig | Any) -> dict[str, int]:
    """Parameters of a LLaMA-like model by part, by the shape alone: `embedding`, `layers`, `head`
    (0 when tied) and `all`.
    """
    widths = target_widths(config)
    hidden, inner, head_dim = (
        widths[name] for name in ("hidden_size", "intermediate_size", "head_dim")
    )
    query, key = widths["num_attention_heads"] * head_dim, widths["num_key_value_heads"] * head_dim
    layer = 2 * hidden * query + 2 * hidden * key + 3 * hidden * inner + 2 * hidden
    fields = config.to_dict()
    if config.model_type == "qwen2":
        layer += query + 2 * key
    elif fields.get("attention_bias"):
        layer += query + 2 * key + hidden
    if fields.get("mlp_bias"):
        layer += 2 * inner + hidden
    if config.model_type == "qwen3":
        layer += 2 * head_dim
    table = config.vocab_size * hidden
    parts = {"embedding": table, "layers": config.num_hidden_layers * layer}
    parts["head"] = 0 if config.tie_word_embeddings else table
    return parts | {"all": sum(parts.values()) + hidden}  # and the final norm


def millions(count: int) -> str:
    """`796.3 M`."""
    return f"{count / 1e6:.1f} M"


def layers_of(config: Any) -> str:
    """`1 layer`, `5 layers`."""
    return f"{config.num_hidden_layers} layer{'s' if config.num_hidden_layers != 1 else ''}"


def bytes_a_step(config: Any, itemsize: int = 2) -> int:
    """Bytes of weights that one decoding step reads: the layers and the head (a tied one is read as
    the head).
    """
    counts = parameter_counts(config)
    return itemsize * (counts["layers"] + config.vocab_size * config.hidden_size)


def forward_flops(config: Any) -> float:
    """Operations of a forward over one token: two a weight that is multiplied with (layers and
    head).
    """
    return 2.0 * (parameter_counts(config)["layers"] + config.vocab_size * config.hidden_size)

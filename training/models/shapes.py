"""Sizes of a model computed from its configuration, before anything is built or loaded."""

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
    """Return the WIDTHS of a configuration, with transformers' defaults for absent ones."""
    fields = target.to_dict()
    heads = fields["num_attention_heads"]
    filled = {
        "head_dim": fields.get("head_dim") or fields["hidden_size"] // heads,
        "num_key_value_heads": fields.get("num_key_value_heads") or heads,
    }
    return {name: filled.get(name) or fields[name] for name in WIDTHS}


def sizes_of(config: Any) -> dict[str, int]:
    """Return the sizes of a configuration that the costs of its forwards depend on."""
    sizes = {key: getattr(config, key) for key in ("num_hidden_layers", "vocab_size")}
    return sizes | target_widths(config)


def parameter_counts(config: PreTrainedConfig | Any) -> dict[str, int]:
    """Count a LLaMA-like model's parameters: `embedding`, `layers`, `head` (0 if tied), `all`."""
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
    parts = {"embedding": config.vocab_size * hidden, "layers": config.num_hidden_layers * layer}
    parts["head"] = 0 if config.tie_word_embeddings else head_rows(config) * hidden
    return parts | {"all": sum(parts.values()) + hidden}  # and the final norm


def head_rows(config: Any) -> int:
    """Return the rows of the lm_head: the draft vocabulary's tokens, or all."""
    return config.to_dict().get("draft_vocab_size") or config.vocab_size


def millions(count: int) -> str:
    """Format a count as `796.3 M`."""
    return f"{count / 1e6:.1f} M"


def layers_of(config: Any) -> str:
    """Format the number of layers as `1 layer` or `5 layers`."""
    return f"{config.num_hidden_layers} layer{'s' if config.num_hidden_layers != 1 else ''}"


def bytes_a_step(config: Any, itemsize: int = 2) -> int:
    """Return the bytes of weights that one decoding step reads: the layers and the lm_head."""
    counts = parameter_counts(config)
    return itemsize * (counts["layers"] + head_rows(config) * config.hidden_size)


def cache_bytes_per_token(config: Any, itemsize: int) -> int:
    """Return the bytes of keys and values that all layers store per token."""
    widths = target_widths(config)
    width = widths["num_key_value_heads"] * widths["head_dim"]
    return 2 * config.num_hidden_layers * width * itemsize


def forward_flops(config: Any) -> float:
    """Return the FLOPs of a forward over one token: two per weight of the layers and lm_head."""
    return 2.0 * (parameter_counts(config)["layers"] + head_rows(config) * config.hidden_size)

"""Head folders in the published layout: config.json and model.safetensors with its names.

Source: the published code's `DrafterConfig` and module names (apple/ml-recurrent-drafter), which
TensorRT-LLM's converter reads too. A head with a shortlist has an additional key and tensor, which
other readers do not support.
"""

from pathlib import Path
from typing import Any

import torch

from decoding.errors import UserError
from decoding.models.draft_vocabulary import check_tokens
from decoding.models.folder import WEIGHTS, load_state, read_config
from recurrent_drafting.head import MOST_BLOCKS, HeadConfig, RecurrentHead
from training.heads import checkpoint

MODEL_TYPE = "recurrent_drafting_drafter"
# key -> smallest and largest value
_SIZES: dict[str, tuple[int, int | None]] = {
    "vocab_size": (1, None),
    "hidden_size": (1, None),
    "exit_dim": (1, None),
    "num_draft_layers": (0, MOST_BLOCKS),
}
_SHORTLIST = "token_ids_V"


class PublishedLayout:
    """The published layout: the keys of config.json, and tensors named like the parameters."""

    def config(self, shape: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
        values: dict[str, Any] = {
            "architectures": ["Drafter"],
            "model_type": MODEL_TYPE,
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "exit_dim": shape.exit_dim,
            "num_draft_layers": shape.num_draft_layers,
            "num_lookback_tokens": -1,
            "rnn": shape.rnn,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        return values | (
            {"draft_vocab_size": shape.draft_vocab_size} if shape.draft_vocab_size else {}
        )

    def stored_name(self, name: str) -> str:
        return name

    def extensions(self, shape: HeadConfig) -> list[str]:
        if not shape.draft_vocab_size:
            return []
        return [
            f"a shortlist of {shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens (config key "
            f"draft_vocab_size, tensor {_SHORTLIST})"
        ]


LAYOUT = PublishedLayout()


def save_head(head: RecurrentHead, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and model.safetensors, by default in float32 like the published code.

    Raises UserError if a write fails.
    """
    checkpoint.save_head(LAYOUT, head.config, head, folder, dtype)


def read_head_config(folder: Path) -> HeadConfig:
    """Read the shape of a head folder.

    Raises UserError for a folder of another kind, and for missing or invalid values.
    """
    file, values = folder / "config.json", read_config(folder)
    if values["model_type"] != MODEL_TYPE:
        raise UserError(
            f"{file}: model_type is '{values['model_type']}', expected '{MODEL_TYPE}', a recurrent "
            f"head. Use `use: chain` for a language model."
        )
    for key, (least, most) in _SIZES.items():
        checkpoint.check_size(file, key, values.get(key), least, most)
    shortlist, rnn = values.get("draft_vocab_size", 0), values.get("rnn", False)
    checkpoint.check_size(file, "draft_vocab_size", shortlist, 0, values["vocab_size"])
    if not isinstance(rnn, bool):
        raise UserError(
            f"{file}: rnn is {rnn!r}, expected true (recurrent) or false. Use the config.json that "
            f"was written with these weights."
        )
    sizes = {key: values[key] for key in _SIZES}
    return HeadConfig(**sizes, rnn=rnn, draft_vocab_size=shortlist)


def load_head(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> RecurrentHead:
    """Load the head of a folder, for drafting.

    Raises UserError for a folder of another kind, and for tensors that are missing, unknown, not
    finite, or of another shape than config.json describes.
    """
    config = read_head_config(folder)
    with torch.device("meta"):
        head = RecurrentHead(config)
    described = (
        f"{config.num_draft_layers} residual blocks, width {config.exit_dim}, "
        f"rnn={str(config.rnn).lower()}"
    )
    file = folder / WEIGHTS
    checkpoint.load_weights(head, load_state(folder), LAYOUT.stored_name, file, described)
    if head.token_ids_V is not None:
        check_tokens(file, _SHORTLIST, head.token_ids_V, config.vocab_size)
    return head.to(device, dtype).requires_grad_(False).eval()

"""Head folders in the published layout: config.json and model.safetensors, with the published keys
and tensor names.

Source: the published code's `DrafterConfig` and module names (apple/ml-recurrent-drafter), which
TensorRT-LLM's converter read as well. A head with a shortlist has one key and one tensor more,
which no other reader knows.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from decoding.errors import UserError
from decoding.models.folder import WEIGHTS, load_state, read_config, read_headers, refuse_nonfinite
from jobs.files import disk_error, save_tensors
from recurrent_drafting.head import HeadConfig, RecurrentHead

MODEL_TYPE = "recurrent_drafting_drafter"
# with the least of each
_SIZES = {"vocab_size": 1, "hidden_size": 1, "exit_dim": 1, "num_draft_layers": 0}
_SHORTLIST = "token_ids_V"


def published_config(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a head."""
    values: dict[str, Any] = {
        "architectures": ["Drafter"],
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "exit_dim": config.exit_dim,
        "num_draft_layers": config.num_draft_layers,
        "num_lookback_tokens": -1,
        "rnn": config.rnn,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return values | (
        {"draft_vocab_size": config.draft_vocab_size} if config.draft_vocab_size else {}
    )


def extensions(config: HeadConfig) -> list[str]:
    """What the published layout cannot carry, in words; empty for a head that every reader of it
    loads.
    """
    if not config.draft_vocab_size:
        return []
    return [
        f"a shortlist of {config.draft_vocab_size:,} of {config.vocab_size:,} tokens (config key "
        f"draft_vocab_size, tensor {_SHORTLIST})"
    ]


def save_head(head: RecurrentHead, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and model.safetensors; float32 is what the published code writes. Raises
    UserError when a write fails.
    """
    state = {
        name: tensor.detach()
        .to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        .contiguous()
        for name, tensor in head.state_dict().items()
    }
    text = json.dumps(published_config(head.config, dtype), indent=2, sort_keys=True) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(state, folder / WEIGHTS, {"format": "pt"})
        (folder / "config.json").write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise disk_error(folder, error) from error


def read_head_config(folder: Path) -> HeadConfig:
    """The shape of a head folder. Raises UserError for a folder of another kind and for missing or
    wrong keys.
    """
    file, values = folder / "config.json", read_config(folder)
    if values["model_type"] != MODEL_TYPE:
        raise UserError(
            f"{file}: model_type is '{values['model_type']}', expected '{MODEL_TYPE}', a recurrent "
            f"head. A language model drafts with `use: chain`."
        )
    for key, least in _SIZES.items():
        size = values.get(key)
        if type(size) is not int or size < least:  # true is an int to isinstance
            raise UserError(
                f"{file}: {key} is {size!r}, expected a whole number of {least} or more; the "
                f"published layout has it"
            )
    shortlist, rnn = values.get("draft_vocab_size", 0), values.get("rnn", False)
    if type(shortlist) is not int or not 0 <= shortlist <= values["vocab_size"]:
        raise UserError(
            f"{file}: draft_vocab_size is {shortlist!r}, expected a whole number up to vocab_size "
            f"({values['vocab_size']}), or no such key"
        )
    if not isinstance(rnn, bool):
        raise UserError(f"{file}: rnn is {rnn!r}, expected true (recurrent) or false")
    sizes = {key: values[key] for key in _SIZES}
    return HeadConfig(**sizes, rnn=rnn, draft_vocab_size=shortlist)


def load_head(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> RecurrentHead:
    """The head of a folder. Raises UserError naming every tensor that is missing, unknown, of
    another shape than config.json says, or not finite.
    """
    config = read_head_config(folder)
    _check_blocks(folder, config)
    with torch.device("meta"):
        head = RecurrentHead(config)
    state = load_state(folder)
    _check_tensors(folder / WEIGHTS, config, head.state_dict(), state)
    refuse_nonfinite(folder, state)
    head.load_state_dict(state, assign=True)
    _check_shortlist(folder / WEIGHTS, config, head.token_ids_V)
    return head.to(device, dtype).requires_grad_(False).eval()


def _check_blocks(folder: Path, config: HeadConfig) -> None:
    """Raise UserError for more residual blocks than the weights can hold, before a head is built by
    their number.
    """
    held = len(read_headers(folder))
    if config.num_draft_layers > held:
        raise UserError(
            f"{folder / 'config.json'}: num_draft_layers is {config.num_draft_layers}, but "
            f"{WEIGHTS} holds {held} tensors, expected one a block at least. Take both files from "
            f"one head"
        )


def _check_tensors(
    file: Path, config: HeadConfig, wanted: dict[str, Tensor], found: dict[str, Tensor]
) -> None:
    recurrent = any(name.startswith("rnn_") for name in found)
    if recurrent != config.rnn:
        kinds = {
            True: "recurrent (it has rnn_u and rnn_w)",
            False: "without recurrence (it has no rnn_u and rnn_w)",
        }
        raise UserError(
            f"{file}: the head is {kinds[recurrent]}, but config.json says "
            f"rnn={str(config.rnn).lower()}: the two are of different heads. "
            "Take both files from one"
        )
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in wanted]
    wrong += [
        f"{name} has the shape {list(found[name].shape)}, expected {list(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if wrong:
        raise UserError(
            f"{file}: does not hold the head that config.json describes ({config.num_draft_layers} "
            f"residual blocks, width {config.exit_dim}, rnn={str(config.rnn).lower()}): "
            f"{'; '.join(wrong)}. Take config.json and {WEIGHTS} from one head, in the published "
            f"layout"
        )


def _check_shortlist(file: Path, config: HeadConfig, ids_V: Tensor | None) -> None:
    if ids_V is None:
        return
    if (
        ids_V.dtype != torch.long
        or bool((ids_V.diff() <= 0).any())
        or int(ids_V[0]) < 0
        or int(ids_V[-1]) >= config.vocab_size
    ):
        raise UserError(
            f"{file}: {_SHORTLIST} is no rising list of token ids (int64) below "
            f"{config.vocab_size}: the file is damaged, copy it again"
        )

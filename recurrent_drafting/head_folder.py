"""The head folder: the published layout, the target's tokenizer files, its card, and a README with
the lines that use it.
"""

import json
from pathlib import Path
from typing import Any

import torch

from decoding.models.folder import WEIGHTS
from decoding.models.text.tokenizer import copy_tokenizer
from jobs.files import disk_error, write_text
from recurrent_drafting.checkpoint import extensions, published_config, save_head
from recurrent_drafting.head import HeadConfig, RecurrentHead
from training import drafter_folder
from training.drafter_folder import (
    Origin,
    figures_on_card,
    tokenizer_on_card,
    training_on_card,
    write_zeros,
)


def write_head(head: RecurrentHead, target_folder: Path, folder: Path) -> None:
    """Weights in float32, as published, and the tokenizer files. Says what the published layout
    cannot carry. Raises UserError.
    """
    save_head(head, folder)
    copy_tokenizer(target_folder, folder)
    for extension in extensions(head.config):
        print(
            f"note: {folder} holds what the published layout cannot carry, and only this project "
            f"loads it: {extension}"
        )


def write_untrained(config: HeadConfig, target_folder: Path, folder: Path) -> None:
    """What `write_head` writes, with every weight zero in a sparse file. config: without a
    shortlist, which is counted in the data.
    """
    with torch.device("meta"):
        head = RecurrentHead(config)
    shapes = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_zeros(folder / WEIGHTS, shapes, torch.float32)
        write_text(
            folder / "config.json",
            json.dumps(published_config(config, torch.float32), indent=2, sort_keys=True) + "\n",
        )
        copy_tokenizer(target_folder, folder)
    except OSError as error:
        raise disk_error(folder, error) from error


def write_card(folder: Path, config: HeadConfig, parameters: int, origin: Origin) -> None:
    """drafter_card.json and README.md beside the head."""
    about = {"parameters": parameters, "shape": vars(config), "extensions": extensions(config)}
    drafter_folder.write_card(folder, origin, about, readme)


def readme(card: dict[str, Any]) -> str:
    """The README of a head folder: front matter of the Hugging Face Hub, then what it is and how to
    use it.
    """
    shape, target = card["shape"], card["target"]
    kind = "recurrent" if shape["rnn"] else "without recurrence"
    blocks = (
        "1 residual block"
        if shape["num_draft_layers"] == 1
        else f"{shape['num_draft_layers']} residual blocks"
    )
    overall = {
        "acceptance": {key: value for key, value in card["acceptance"].items() if "/" not in key}
    }
    layout = "the published layout (config.json and model.safetensors with the published names)"
    if card["extensions"]:
        layout = (
            f"more than the published layout, so that only Shallow Draft loads it: "
            f"{'; '.join(card['extensions'])}"
        )
    return f"""---
tags: [speculative-decoding, drafter, recurrent-drafting]
---
# {card["name"]}

A recurrent drafter head (ReDrafter, arXiv 2403.09919) for `{target}`: {kind}, {blocks} of width {shape["exit_dim"]},
{card["parameters"] / 1e6:.1f} M parameters, {training_on_card(card)}. Held-out: {figures_on_card(overall)}.
It only proposes tokens; the target decides every one of them, so the output is the target's own. It reads that target's hidden states and
embedding, and works with no other. The folder holds {layout}.

{tokenizer_on_card(card)}```
python -m eval.run target.path={target} drafters=[HEAD]
python -m recurrent_drafting.cmd.generate --hf_llm {target.replace("embedded:", "assets/")} --hf_drafter HEAD --beam_width 8 --beam_length 5
```

How many beams pay hangs on the machine: both measure it, and search at most `beam_width`. `by_cost=false` fixes width and length (in the first
line `"drafters=[{{use: HEAD, by_cost: false}}]"`). Where answers are sampled beams are drawn; `children=top_k` takes the likeliest ones as
published, as exact and seldom as fast.

HEAD stands for this folder. `drafter_card.json` says from which target, data and code it comes. Made with Shallow Draft.
"""  # noqa: E501

"""The head folder: weights and config.json in its kind's layout, tokenizer, card and README."""

from pathlib import Path
from typing import Any

import torch

from decoding.models.folder import WEIGHTS
from decoding.models.text.tokenizer import copy_tokenizer
from jobs.files import disk_error, write_text
from training import drafter_folder
from training.drafter_folder import (
    Provenance,
    figures_on_card,
    tokenizer_on_card,
    training_on_card,
    write_zeros,
)
from training.heads.checkpoint import config_text, save_head
from training.heads.kind import HeadKind


def write_head(kind: HeadKind, head: Any, shape: Any, target_folder: Path, folder: Path) -> None:
    """Write a head's weights in float32, its config.json and the target's tokenizer files.

    Prints a note for each extension of the published layout. Raises UserError if a write fails.
    """
    save_head(kind.layout, shape, head, folder)
    copy_tokenizer(target_folder, folder)
    for extension in kind.layout.extensions(shape):
        print(
            f"note: {folder} extends the published layout, so only this project loads it: "
            f"{extension}"
        )


def write_untrained(kind: HeadKind, shape: Any, target_folder: Path, folder: Path) -> None:
    """Write a folder like `write_head`, with weights of zero in a sparse file.

    shape: must have no draft vocabulary, which only the data can determine. Raises UserError if a
    write fails.
    """
    with torch.device("meta"):
        state = kind.empty(shape).state_dict()
    shapes = {kind.layout.stored_name(name): list(each.shape) for name, each in state.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_zeros(folder / WEIGHTS, shapes, torch.float32)
        write_text(folder / "config.json", config_text(kind.layout, shape, torch.float32))
        copy_tokenizer(target_folder, folder)
    except OSError as error:
        raise disk_error(folder, error) from error


def write_card(
    kind: HeadKind, folder: Path, shape: Any, parameters: int, origin: Provenance
) -> None:
    """Write drafter_card.json and README.md to the head's folder."""
    about = {
        "parameters": parameters,
        "shape": vars(shape),
        "extensions": kind.layout.extensions(shape),
    }
    drafter_folder.write_card(folder, origin, about, lambda card: readme(kind, card))


def readme(kind: HeadKind, card: dict[str, Any]) -> str:
    """Render the README of a head folder, with the Hugging Face Hub's front matter."""
    parts, target = kind.readme(card), card["target"]
    overall = card | {
        "acceptance": {key: value for key, value in card["acceptance"].items() if "/" not in key}
    }
    layout = parts.layout
    if card["extensions"]:
        layout = (
            f"an extended form of the published layout, which only Shallow Draft loads: "
            f"{'; '.join(card['extensions'])}"
        )
    launch = "\n".join(parts.launch)
    return f"""---
tags: [speculative-decoding, drafter, {parts.tag}]
---
# {card["name"]}

{parts.title} for `{target}`: {parts.form},
{card["parameters"] / 1e6:.1f} M parameters, {training_on_card(card)}. Held-out: {figures_on_card(overall)}.
It only proposes tokens; the target decides every one of them, so the output is the target's. It reads that target's {parts.reads},
and works with no other. The folder holds {layout}.

{tokenizer_on_card(card)}```
{launch}
```

{parts.remarks}

Run the commands in this folder, which they name `.`. `drafter_card.json` names the target, data and code that it comes from. Made with Shallow Draft.
"""  # noqa: E501

"""The head folder: weights and config.json in its kind's layout, tokenizer, card and README."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from decoding.models.folder import WEIGHTS, read_headers, read_json
from decoding.models.text.tokenizer import copy_tokenizer
from jobs.files import disk_error, write_text
from jobs.paths import name_anywhere
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
from training.heads.published import Server
from training.model_card import NOT_RUN, OURS, front_matter


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
    values, tensors = read_json(folder / "config.json"), [*read_headers(folder)]
    drafter_folder.write_card(
        folder, origin, about, lambda card: readme(kind, shape, card, values, tensors)
    )


def launch_blocks(
    servers: Sequence[Server],
    shape: Any,
    layout: str,
    card: Mapping[str, Any],
    ours: Sequence[str],
    values: Mapping[str, Any],
    tensors: Sequence[str],
) -> str:
    """Return the commands that draft with a head folder, in Markdown, each with how it was tested.

    servers: those of the head's kind; one that does not read such a folder is left out. layout:
    the folder's. ours: commands of this project. values: config.json. tensors: their names in the
    file.
    """
    blocks = [("Shallow Draft", "run", "\n".join(ours))]
    target = shlex.quote(name_anywhere(card["target"]))
    for server in servers:
        served = server.launch_of(target, layout, shape, card["num_draft_tokens"] or 0)
        loads = not server.lacks(tensors, shape) and not server.misread_layers(values, shape)
        if served is not None and loads:
            tested = "run" if served.was_run else NOT_RUN
            blocks.append((server.name, tested, served.command))
    return "\n\n".join(
        f"**{name}** ({tested})\n\n```bash\n{command}\n```" for name, tested, command in blocks
    )


def readme(
    kind: HeadKind,
    shape: Any,
    card: dict[str, Any],
    values: Mapping[str, Any],
    tensors: Sequence[str],
) -> str:
    """Return the README of a head folder, in the Hugging Face Hub's form.

    values, tensors: see `launch_blocks`.
    """
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
    ours = [line for line in parts.launch if line.startswith("python -m ")]
    published = None if card["extensions"] else kind.contract
    servers = published.servers if published else ()
    name = published.layout_of(values).name if published else ""
    launch = launch_blocks(servers, shape, name, card, ours, values, tensors)
    return f"""{front_matter(card, OURS, parts.tag)}# {card["name"]}

{parts.title} for `{target}`: {parts.form},
{card["parameters"] / 1e6:.1f} M parameters, {training_on_card(card)}. Held-out: {figures_on_card(overall)}.
It only proposes tokens; the target decides every one of them, so the output is the target's. It reads that target's {parts.reads},
and works with no other. The folder holds {layout}.

{tokenizer_on_card(card)}## Run it

Run these lines in this folder, which they name `.`. A line that is marked `run` was run with a head of this form.

{launch}

{parts.remarks}

`drafter_card.json` names the target, data and code that it comes from. Made with Shallow Draft.
"""  # noqa: E501

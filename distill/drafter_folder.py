"""Folder of a distilled student: its card, README and launch lines for serving engines."""

import json
from pathlib import Path
from typing import Any

from decoding.models.draft_vocabulary import token_ids
from decoding.models.folder import CARD, read_json
from jobs.paths import shown
from training import drafter_folder
from training.drafter_folder import Provenance, figures_on_card, tokenizer_on_card, training_on_card
from training.models.shapes import WIDTHS


def read_pruning(folder: Path) -> dict[str, Any] | None:
    """Return the pruning on the card of a model folder, or None if there is none."""
    card = folder / CARD
    return read_json(card).get("pruning") if card.is_file() else None


def write_card(
    folder: Path, model: Any, origin: Provenance, pruning: dict[str, Any] | None = None
) -> None:
    """Write drafter_card.json, and a README.md in the Hub's form with launch lines.

    pruning: notes on how the student was cut from the target; None if it was not.
    """
    keys = ("num_hidden_layers", *WIDTHS, "vocab_size")
    about = {
        "parameters": model.num_parameters(),
        "shape": {key: getattr(model.config, key) for key in keys},
        "pruning": pruning,
        "draft_vocabulary": vocabulary_on_card(model),
    }
    drafter_folder.write_card(folder, origin, about, format_readme)


def vocabulary_on_card(model: Any) -> dict[str, Any] | None:
    """Return the size and the token ids of a model's draft vocabulary; None: all tokens."""
    ids = token_ids(model)
    return None if ids is None else {"size": len(ids), "ids": ids.tolist()}


def describe_vocabulary(card: dict[str, Any]) -> str:
    """Return a README paragraph about a draft vocabulary or a copy without it; "" for others."""
    if copied := card.get("copy_of"):
        return (
            f"A copy with an lm_head row for every token, of a drafter that proposes "
            f"{copied['drafted']:,} tokens. In {1 - copied['same_argmax']:.3%} of the states it "
            f"drafts another token, measured on {copied['states']:,} states of text.\n\n"
        )
    vocabulary = card.get("draft_vocabulary")
    if not vocabulary:
        return ""
    return (
        f"It proposes {vocabulary['size']:,} of the target's {card['shape']['vocab_size']:,} "
        f"tokens (`ids` in `drafter_card.json`), which only Shallow Draft reads. For the engines "
        f"below, make a copy with all tokens and name it instead of `.`:\n\n"
        f"```\npython scripts/full_vocabulary.py FOLDER COPY\n```\n\n"
    )


# How each launch line was tested, for a drafter's README.
TESTED = {
    "Hugging Face": "run by scripts/bench/decoding.py",
    "vLLM": "run by hand with vLLM 0.32 on a CPU",
    "SGLang": "not tested yet",
}


def launch_lines(target: str, drafter: str, draft_tokens: int) -> dict[str, str]:
    """Return engine -> the line of code or the command that drafts with the folder.

    target, drafter: model folders. draft_tokens: draft length.
    """
    target = shown(target)
    vllm = json.dumps(
        {"method": "draft_model", "model": drafter, "num_speculative_tokens": draft_tokens}
    )
    return {
        "Hugging Face": (
            f"target.generate(**inputs, "
            f"assistant_model=AutoModelForCausalLM.from_pretrained('{drafter}'))  # the draft "
            f"length is pinned in generation_config.json"
        ),
        "vLLM": f"vllm serve {target} --speculative-config '{vllm}'",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm "
            f"STANDALONE --speculative-draft-model-path {drafter} --speculative-num-steps "
            f"{draft_tokens} --speculative-eagle-topk 1 --speculative-num-draft-tokens "
            f"{draft_tokens + 1}"
        ),
    }


def format_readme(card: dict[str, Any]) -> str:
    """Return the README of a drafter folder, with front matter for the Hugging Face Hub."""
    lines = "\n\n".join(
        f"**{engine}** ({TESTED[engine]})\n\n```\n{line}\n```"
        for engine, line in launch_lines(card["target"], ".", 4).items()
    )
    shape = card["shape"]
    layers = f"{shape['num_hidden_layers']} layer{'s' if shape['num_hidden_layers'] != 1 else ''}"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, drafter]
---
# {card["name"]}

A drafter for `{card["target"]}`: {layers}, width {shape["hidden_size"]}, {card["parameters"] / 1e6:.1f} M parameters,
{training_on_card(card)}. Held-out: {figures_on_card(card)}.
It only proposes tokens. The target verifies all of them, so the output is the target's.

{tokenizer_on_card(card)}{describe_vocabulary(card)}{lines}

`drafter_card.json` lists its target, data and code. Made with Shallow Draft.
"""  # noqa: E501

"""Files of every drafter folder: weights, the target's tokenizer, and a provenance card."""

import json
import math
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig

from decoding.models.folder import CARD, WEIGHTS, hash_input, read_json
from decoding.models.text.tokenizer import copy_tokenizer, has_tokenizer
from jobs.config import TargetConfig, plain
from jobs.files import disk_error, match_folder_permissions, write_text
from jobs.paths import resolve_model
from jobs.protocol import Run
from jobs.run_folder import git_revision, versions
from training.bounds import Progress
from training.config import DataConfig, HeldOutConfig
from training.data.from_config import sources
from training.held_out.speedup import COST_RATIO, LENGTH, SPEEDUP, UNRELIABLE, selecting_figure
from training.model_card import license_of
from training.on_policy import OnPolicyOptions

_SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}

_WHY_UNRELIABLE = (
    "other processes used the processors while the costs were measured, or a round took less time "
    "than its parts"
)

# figures whose names alone do not explain them
_IN_WORDS = {
    "coverage": "the target's probability of its vocabulary",
    "drafted_tokens": "share of the target's tokens in it",
}

_PREDICTED = "predicted_"  # begins the names of predicted figures

# transformers' assisted generation would vary the draft length
_FIXED = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}


def write_model(
    model: Any,
    tokenizer_folder: Path,
    folder: Path,
    dtype: torch.dtype,
    draft_tokens: int | None = None,
) -> None:
    """Write weights (safetensors), configuration, generation settings and the tokenizer's files.

    The model is converted to `dtype` in place. draft_tokens: the constant draft length of
    transformers' assisted generation; None: its default. Raises UserError if a write fails.
    """
    stored = model.to(dtype)
    stored.config.dtype = dtype
    stored.generation_config = _generation_config(stored.config, draft_tokens)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stored.save_pretrained(folder)
        for file in folder.glob("*.safetensors"):
            match_folder_permissions(file)
        copy_tokenizer(tokenizer_folder, folder)
    except (OSError, SafetensorError) as error:
        raise disk_error(folder, error) from error


def write_untrained(
    model: Any, tokenizer_folder: Path, folder: Path, dtype: torch.dtype, draft_tokens: int
) -> None:
    """Write a folder like `write_model`, with weights of zero in a sparse file.

    model: a model on the meta device. Raises UserError if a write fails.
    """
    config = model.config
    config.dtype, config.architectures = dtype, [type(model).__name__]
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        _generation_config(config, draft_tokens).save_pretrained(folder)
        write_zeros(folder / WEIGHTS, shapes, dtype)
        copy_tokenizer(tokenizer_folder, folder)
    except OSError as error:
        raise disk_error(folder, error) from error


def keeps_folder(folder: Path, was_dry: bool) -> bool:
    """Delete `folder` if a dry run wrote it; return True and print a note if it still exists."""
    if was_dry:
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        print(f"kept: {folder} exists already")
    return folder.exists()


def write_zeros(path: Path, shapes: dict[str, list[int]], dtype: torch.dtype) -> None:
    """Write a safetensors file of zeros: a header, and a hole that takes no disk space."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def _generation_config(config: Any, draft_tokens: int | None) -> GenerationConfig:
    assisted = {} if draft_tokens is None else {"num_assistant_tokens": draft_tokens, **_FIXED}
    special = {
        name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    return GenerationConfig(**special, **assisted)


@dataclass(frozen=True)
class Provenance:
    """Origin and measured figures of a drafter, for its card."""

    # name in tables and on the card
    name: str
    # target.path as configured
    target: str
    target_folder: Path
    # sources, the number of tokens trained on, the final shares of domains, and on-policy rows
    data: dict[str, Any]
    # settings of the loss; {"name": None, "note": the reason} if nothing was trained
    loss: dict[str, Any]
    # held-out figures
    acceptance: dict[str, Any]
    # False for a dry run, which has no weights to hash
    trained: bool = True
    # predicted to be the fastest, and measured, on the machine of the training; None: no costs
    draft_tokens: int | None = None
    cost_ratio: float | None = None
    # the drafter whose training it continues; None: a new one
    continued_from: dict[str, Any] | None = None

    @classmethod
    def untrained(cls, name: str, target: str, target_folder: Path) -> "Provenance":
        """Return the provenance of a folder that a dry run writes."""
        loss = {"name": None, "note": "untrained: a dry run's weights of zero"}
        return cls(name, target, target_folder, {"sources": []}, loss, {}, trained=False)


class DrafterFields(Protocol):
    """Configuration of a job that trains a drafter, apart from its loss."""

    target: TargetConfig
    data: DataConfig
    held_out: HeldOutConfig
    adapter_rank: int

    @property
    def on_policy(self) -> OnPolicyOptions: ...


def origin_of(
    config: DrafterFields,
    name: str,
    target_folder: Path,
    figures: Mapping[str, float],
    progress: Progress,
    selected_by: str,
    start: str = "",
    **measured: float,
) -> Provenance:
    """Return the provenance of a trained drafter.

    figures: those of its checkpoint. selected_by: the figure that selects a checkpoint if no costs
    are known. start: folder of the drafter whose training it continues. measured: further held-out
    figures, by name.
    """
    others = ("score", COST_RATIO)
    shown: dict[str, Any] = {key: value for key, value in figures.items() if key not in others}
    if shown:
        shown["selected_by"] = selecting_figure(figures, selected_by)
    data = {
        "sources": sources(config.data),
        "template": config.data.template,
        "tokens_seen": progress.tokens,
        "supervised_tokens_seen": progress.supervised,
        **shares_on_card(config.data, progress),
    }
    if config.on_policy.share:
        data["on_policy"] = plain(config)["on_policy"]
    acceptance = {**shown, **measured, "temperature": config.held_out.temperature}
    return Provenance(
        name,
        config.target.path,
        target_folder,
        data,
        plain(config)["loss"],
        acceptance,
        draft_tokens=int(figures[LENGTH]) if LENGTH in figures else None,
        cost_ratio=figures.get(COST_RATIO),
        continued_from=describe_start(start, config.adapter_rank) if start else None,
    )


def describe_start(start: str, adapter_rank: int) -> dict[str, Any]:
    """Return what a card records of the drafter in a folder, from which the training started."""
    folder = resolve_model(start)
    card = read_json(folder / CARD) if (folder / CARD).is_file() else {}
    return {
        "folder": start,
        "drafter_hash": hash_input(folder),
        "target": card.get("target"),
        "target_hash": card.get("target_hash"),
        "adapter_rank": adapter_rank,
    }


def shares_on_card(data: DataConfig, progress: Progress) -> dict[str, Any]:
    """Return the final shares of domains for a card, if evaluations moved them."""
    return {} if data.mixing == "fixed" else {"shares": progress.data["shares"]}


def close_run(
    run: Run, origin: Provenance, progress: Progress, more: Mapping[str, Any] | None = None
) -> None:
    """Write the manifest of a finished run, with the card's figures, the best step and the time.

    more: further figures, by name.
    """
    took = {
        "best_step": progress.best_step,
        "ended_by": progress.ended_by,
        "training_seconds": round(progress.seconds, 1),
        "tokens": progress.tokens,
    }
    run.folder.write_manifest(
        run.inputs, origin.acceptance | took | dict(more or {}), finished=True
    )


def write_card(
    folder: Path, origin: Provenance, about: dict[str, Any], readme: Callable[[dict[str, Any]], str]
) -> None:
    """Write drafter_card.json, and README.md as `readme` renders the card.

    about: fields for this kind of drafter, such as parameters and shape. readme: returns the README
    for a card. The draft length and the cost ratio are those of the machine of the training, null
    where it measured no costs; eval.run measures them on the machine that will serve.
    """
    card = {
        "name": origin.name,
        "target": origin.target,
        "target_hash": hash_input(origin.target_folder) if origin.trained else None,
        "drafter_hash": hash_input(folder) if origin.trained else None,
        "license": license_of(origin.target_folder),
        "num_draft_tokens": origin.draft_tokens,
        **about,
        "data": origin.data,
        "loss": origin.loss,
        "acceptance": origin.acceptance,
        "tokenizer": has_tokenizer(folder),
        "cost_ratio": origin.cost_ratio,
        **({"continued_from": origin.continued_from} if origin.continued_from else {}),
        "git_revision": git_revision(),
        "versions": versions(),
    }
    write_text(folder / CARD, json.dumps(card, indent=1))
    write_text(folder / "README.md", readme(card))


def training_on_card(card: dict[str, Any]) -> str:
    """Describe how the card's drafter was trained, as part of a sentence."""
    loss, own = card["loss"], card["data"].get("on_policy")
    if not loss["name"]:
        return str(loss["note"])
    rows = f" on {own['share']:.0%} on-policy rows" if own else ""
    return f"trained with {loss['name']}{rows}"


def tokenizer_on_card(card: dict[str, Any]) -> str:
    """Return a README paragraph about a missing tokenizer; "" if the folder has one."""
    if card["tokenizer"]:
        return ""
    return (
        f"**No tokenizer here**: `{card['target']}` had none when this folder was made, so only "
        f"its weights load. Copy the target's tokenizer files into this folder first.\n\n"
    )


def figures_on_card(card: dict[str, Any]) -> str:
    """Return the held-out figures of a card, predictions in a second sentence, or `not measured`.

    There is no full stop at the end.
    """
    measured = {key: value for key, value in card["acceptance"].items() if isinstance(value, float)}
    temperature = measured.pop("temperature", None)
    unreliable = measured.pop(UNRELIABLE, None)
    shown = {key: f"{value:.3f}" for key, value in measured.items()}
    if unreliable:
        shown[SPEEDUP] = f"unreliable ({_WHY_UNRELIABLE})"
    if LENGTH in measured:
        shown[LENGTH] = f"{measured[LENGTH]:.0f}"
    if (ratio := card["cost_ratio"]) is not None:
        shown[COST_RATIO] = f"{ratio:.3f}"
    found: list[str] = []
    predicted: list[str] = []
    for key, value in shown.items():
        words = _IN_WORDS.get(key, key.removeprefix(_PREDICTED).replace("_", " "))
        (predicted if key.startswith(_PREDICTED) else found).append(f"{words} {value}")
    if shown and temperature is not None:
        found.append(f"texts at temperature {temperature:g}")
    if predicted:
        predicted[0] = f"Predicted: {predicted[0]}"
    return ". ".join(", ".join(part) for part in (found, predicted) if part) or "not measured"

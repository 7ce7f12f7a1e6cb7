"""Small runs of `distill.prune`, and their students' weights."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from distill.config import PruneConfig
from tests.support.configurations import configuration

NARROW = (
    "student.hidden_size=16",
    "student.num_attention_heads=2",
    "student.num_key_value_heads=1",
)
BRIEF = (
    "mode=l0",
    "loop.max_steps=6",
    "loop.optimizer.warmup_steps=2",
    "loop.optimizer.lr=2e-6",
    "l0.mask_lr=0.02",
    "loop.tokens_per_step=256",
    "loop.micro_batch_tokens=128",
    "loop.checkpoint_every=2",
)


def arguments(target: Path, folder: Path, *overrides: str) -> list[str]:
    return [
        "target=embedded",
        *([] if any(text.startswith("data=") for text in overrides) else ["data=embedded"]),
        f"target.path={target}",
        "target.device=cpu",
        "student=shallow",
        "student.num_hidden_layers=2",
        "data.max_samples=60",
        "data.max_length=128",
        f"importance.cache_dir={folder.parent}/cache",
        "importance.sequences=16",
        "importance.greedy_sequences=2",
        "importance.probe_sequences=2",
        "importance.probe_steps=0",
        "between.max_steps=2",
        "between.tokens_per_step=256",
        "between.micro_batch_tokens=256",
        f"output_dir={folder}",
        *overrides,
    ]


def configured(target: Path, folder: Path, *overrides: str) -> PruneConfig:
    return configuration("distill.prune", *arguments(target, folder, *overrides))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student" / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )

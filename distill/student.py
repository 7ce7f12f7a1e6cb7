"""The student of `distill.train`: layers of the target, a folder that `distill.prune` made, or random weights of any shape."""

from typing import Any

import torch

from decoding.errors import UserError
from decoding.folder import read_config
from distill.cut import Cut, cut_model, whole
from distill.shapes import student_config
from training.config import StudentConfig
from training.models import load_causal_lm, random_model
from training.paths import resolve
from training.shapes import WIDTHS, target_widths

INITS = ("layers", "folder", "random")


def chosen_layers(shape: StudentConfig, target_layers: int) -> list[int]:
    """Target layers that the student starts from: as given, or first, last and evenly spaced between; one layer takes the first."""
    if shape.layers:
        wrong = [layer for layer in shape.layers if not 0 <= layer < target_layers]
        if wrong or len(shape.layers) != shape.num_hidden_layers:
            raise UserError(
                f"drafter.layers is {shape.layers}: expected {shape.num_hidden_layers} layers (drafter.num_hidden_layers) "
                f"from 0 to {target_layers - 1}"
            )
        return list(shape.layers)
    if shape.num_hidden_layers > target_layers:
        raise UserError(
            f"drafter.num_hidden_layers is {shape.num_hidden_layers}, the target has {target_layers}; use init=random for a deeper student"
        )
    return evenly_spaced(shape.num_hidden_layers, target_layers)


def evenly_spaced(count: int, layers: int) -> list[int]:
    """First, last and evenly spaced between; one layer takes the first."""
    return [0] if count == 1 else [round(index * (layers - 1) / (count - 1)) for index in range(count)]


def build_student(shape: StudentConfig, target: Any, dtype: torch.dtype) -> Any:
    """A student for the Hugging Face model `target`, with packed attention.

    init=layers copies embedding, final norm, lm_head and the chosen layers, so all widths must be the target's; init=folder goes on from a
    pruned student; init=random copies nothing.
    """
    if shape.init not in INITS:
        raise UserError(f"drafter.init is '{shape.init}'; expected {', '.join(INITS)}")
    if shape.init == "folder":
        return _from_folder(shape, target.config, dtype)
    config = student_config(shape, target.config)
    if shape.init == "random":
        return random_model(config, dtype)
    _refuse_other_widths(config, target.config)
    layers = chosen_layers(shape, target.config.num_hidden_layers)
    return cut_model(target, keep_layers(target.config, layers), config).to(dtype)


def keep_layers(config: Any, layers: list[int]) -> Cut:
    """The cut that keeps these layers of a target, whole."""
    full = whole(config)
    norms = torch.tensor([2 * layer + half for layer in layers for half in (0, 1)] + [-1])
    kept = torch.tensor(layers)
    return Cut(
        tuple(layers),
        full.hidden_K,
        full.groups_LK[kept],
        full.queries_LKG[kept],
        full.units_LK[kept],
        full.norm_scale[norms],
        full.a_group,
    )


def _from_folder(shape: StudentConfig, target: Any, dtype: torch.dtype) -> Any:
    """The model in drafter.path. Raises UserError where its vocabulary is not the target's, or its shape not the one given beside it."""
    if not shape.path:
        raise UserError("drafter.init is folder, but drafter.path is empty: give the student folder of distill.prune")
    folder = resolve(shape.path)
    read_config(folder)
    student = load_causal_lm(folder, dtype)
    if student.config.vocab_size != target.vocab_size:
        raise UserError(
            f"{folder} has a vocabulary of {student.config.vocab_size}, the target of {target.vocab_size}: a student shares its target's tokenizer"
        )
    return student.train()


def _refuse_other_widths(config: Any, target: Any) -> None:
    ours, theirs = target_widths(config), target_widths(target)
    for name in WIDTHS:
        if ours[name] != theirs[name]:
            raise UserError(
                f"drafter.{name} is {ours[name]}, the target's is {theirs[name]}: whole layers are copied here. "
                "Leave it at 0, prune with distill.prune (and go on from its folder: drafter.init=folder), or use drafter.init=random"
            )

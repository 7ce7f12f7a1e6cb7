"""The student of `distill.train`: layers of the target, a folder that `distill.prune` made, or
random weights of any shape.
"""

from pathlib import Path
from typing import Any

import torch

from decoding.errors import UserError
from decoding.models.folder import read_config
from decoding.models.text.compatible import check_same_tokenizer
from decoding.models.text.tokenizer import has_tokenizer
from distill.prune.cut import Cut, cut_model, keep_everything
from distill.shapes import student_config
from jobs.paths import resolve
from jobs.ranks import rank
from training.config import StudentConfig
from training.models.build import load_causal_lm, random_model
from training.models.shapes import WIDTHS, target_widths

INITS = ("layers", "folder", "random")


def choose_layers(shape: StudentConfig, target_layers: int) -> list[int]:
    """Target layers that the student starts from: as given, or first, last and evenly spaced
    between; one layer takes the first.
    """
    if shape.layers:
        wrong = [layer for layer in shape.layers if not 0 <= layer < target_layers]
        if wrong or len(shape.layers) != shape.num_hidden_layers:
            raise UserError(
                f"student.layers is {shape.layers}: expected {shape.num_hidden_layers} layers "
                f"(student.num_hidden_layers) from 0 to {target_layers - 1}"
            )
        return list(shape.layers)
    if shape.num_hidden_layers > target_layers:
        raise UserError(
            f"student.num_hidden_layers is {shape.num_hidden_layers}, the target has "
            f"{target_layers}; use init=random for a deeper student"
        )
    return evenly_spaced(shape.num_hidden_layers, target_layers)


def evenly_spaced(count: int, layers: int) -> list[int]:
    """First, last and evenly spaced between; one layer takes the first."""
    return (
        [0] if count == 1 else [round(index * (layers - 1) / (count - 1)) for index in range(count)]
    )


def build_student(
    shape: StudentConfig, target: Any, dtype: torch.dtype, target_folder: Path | None = None
) -> Any:
    """A student for the Hugging Face model `target`, with packed attention.

    init=layers copies embedding, final norm, lm_head and the chosen layers, so all widths must be
    the target's; init=folder goes on from a pruned student; init=random copies nothing.
    target_folder: the target's, whose tokenizer that of a student's folder is compared with where
    their vocabularies differ in size.
    """
    if shape.init not in INITS:
        raise UserError(f"student.init is '{shape.init}'; expected {', '.join(INITS)}")
    if shape.init == "folder":
        return _from_folder(shape, target.config, dtype, target_folder)
    config = student_config(shape, target.config)
    if shape.init == "random":
        return random_model(config, dtype)
    _refuse_other_widths(config, target.config)
    layers = choose_layers(shape, target.config.num_hidden_layers)
    return cut_model(target, keep_layers(target.config, layers), config).to(dtype)


def keep_layers(config: Any, layers: list[int]) -> Cut:
    """The cut that keeps these layers of a target, whole."""
    full = keep_everything(config)
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


def _from_folder(
    shape: StudentConfig, target: Any, dtype: torch.dtype, target_folder: Path | None
) -> Any:
    """The model in student.path, with as many tokens as the target. Raises UserError where its
    vocabulary is not the target's.

    Rows that only one of them has are of added tokens, such as a [PAD], or pad a table: the
    student's are left out, those that it lacks begin at random.
    """
    if not shape.path:
        raise UserError(
            "student.init is folder, but student.path is empty: give the student folder of "
            "distill.prune"
        )
    folder = resolve(shape.path)
    read_config(folder)
    student = load_causal_lm(folder, dtype)
    found, wanted = student.config.vocab_size, target.vocab_size
    if found != wanted:
        if target_folder is None or not has_tokenizer(folder):
            raise UserError(
                f"{folder} has a vocabulary of {found}, the target of {wanted}: a student shares "
                f"its target's tokenizer, and this folder has none to compare. Copy its tokenizer "
                f"files into it"
            )
        check_same_tokenizer(target_folder, folder)
        if rank() == 0:
            print(
                f"note: {folder} has a vocabulary of {found:,} and the target, of the same "
                f"tokenizer, {wanted:,}: fitted"
            )
        student.config.pad_token_id = target.pad_token_id  # may be the token that the target lacks
        student.resize_token_embeddings(wanted, mean_resizing=False)
    return student.train()


def _refuse_other_widths(config: Any, target: Any) -> None:
    ours, theirs = target_widths(config), target_widths(target)
    for name in WIDTHS:
        if ours[name] != theirs[name]:
            raise UserError(
                f"student.{name} is {ours[name]}, the target's is {theirs[name]}: whole layers are "
                f"copied here. Leave it at 0, prune with distill.prune (and go on from its folder: "
                f"student.init=folder), or use student.init=random"
            )

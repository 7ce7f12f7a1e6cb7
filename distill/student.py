"""Initial student of `distill.train`: layers of the target, a pruned model, or random weights."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from decoding.errors import UserError
from decoding.models.draft_vocabulary import restrict_head, token_ids
from decoding.models.folder import read_config
from decoding.models.text.compatible import check_same_tokenizer
from decoding.models.text.tokenizer import has_tokenizer
from decoding.values import check_choice
from distill.prune.cut import cut_model, keep_layers
from distill.shapes import student_config
from jobs.paths import resolve_model
from jobs.ranks import rank
from training.config import StudentConfig
from training.data.packing import Sample
from training.draft_vocabulary import choose_tokens
from training.models.build import load_causal_lm, random_model
from training.models.shapes import WIDTHS, target_widths

SIZE = "student.draft_vocab_size"
INITS = ("layers", "folder", "random")


def choose_layers(shape: StudentConfig, target_layers: int) -> list[int]:
    """Return the target layers that the student copies: student.layers, or evenly spaced ones.

    Raises UserError if they do not fit the shape or the target.
    """
    if shape.layers:
        wrong = [layer for layer in shape.layers if not 0 <= layer < target_layers]
        if wrong or len(shape.layers) != shape.num_hidden_layers:
            raise UserError(
                f"student.layers is {shape.layers}, expected {shape.num_hidden_layers} layers "
                f"(student.num_hidden_layers) from 0 to {target_layers - 1}"
            )
        return list(shape.layers)
    if shape.num_hidden_layers > target_layers:
        raise UserError(
            f"student.num_hidden_layers is {shape.num_hidden_layers}, expected at most the "
            f"target's {target_layers}. Use student.init=random for a deeper student"
        )
    return space_evenly(shape.num_hidden_layers, target_layers)


def space_evenly(count: int, layers: int) -> list[int]:
    """Return `count` evenly spaced layers from the first to the last; for a count of 1, [0]."""
    if count == 1:
        return [0]
    return [round(index * (layers - 1) / (count - 1)) for index in range(count)]


def build_student(
    shape: StudentConfig, target: Any, dtype: torch.dtype, target_folder: Path | None = None
) -> Any:
    """Build a student for the Hugging Face model `target`, with packed attention.

    init=layers copies the embedding, final norm, lm_head and some layers, so all widths must equal
    the target's. init=folder loads a pruned student, and init=random copies nothing. target_folder:
    folder of the target, whose tokenizer is compared with the student's if the sizes of their
    vocabularies differ. Raises UserError for an invalid shape or folder.
    """
    check_student(shape, target.config)
    if shape.init == "folder":
        return _from_folder(shape, target.config, dtype, target_folder)
    config = student_config(shape, target.config)
    if shape.init == "random":
        return random_model(config, dtype)
    layers = choose_layers(shape, target.config.num_hidden_layers)
    return cut_model(target, keep_layers(target.config, layers), config).to(dtype)


def check_student(shape: StudentConfig, target: Any) -> None:
    """Raise UserError for a student that this target cannot have, before a model is loaded.

    target: the target's Hugging Face configuration.
    """
    check_choice("student.init", shape.init, INITS)
    check_draft_vocabulary(shape.draft_vocab_size, target.vocab_size)
    if shape.init == "folder":
        if not shape.path:
            raise UserError(
                "student.path is empty, but student.init=folder needs a student folder, such as "
                "one that distill.prune wrote"
            )
        return
    ours, theirs = target_widths(student_config(shape, target)), target_widths(target)
    if shape.init == "random":
        return
    for name in WIDTHS:
        if ours[name] != theirs[name]:
            raise UserError(
                f"student.{name} is {ours[name]}, expected the target's {theirs[name]}, because "
                f"student.init=layers copies layers at full width. Leave it at 0, prune with "
                f"distill.prune and set student.init=folder, or use student.init=random"
            )
    choose_layers(shape, target.num_hidden_layers)


def _from_folder(
    shape: StudentConfig, target: Any, dtype: torch.dtype, target_folder: Path | None
) -> Any:
    """Load the model in student.path and resize its vocabulary to the target's.

    With equal tokenizers, the sizes differ only by padding or by added tokens such as [PAD].
    Extra rows of the student are dropped, and missing ones are initialized at random. Raises
    UserError if the tokenizers differ, or if there are none and the sizes differ.
    """
    folder = resolve_model(shape.path)
    read_config(folder)
    student = load_causal_lm(folder, dtype)
    found, wanted = student.config.vocab_size, target.vocab_size
    if found != wanted and token_ids(student) is not None:
        raise UserError(
            f"{folder} drafts for a vocabulary of {found}, expected the target's {wanted}. Start "
            f"from a student without a draft vocabulary"
        )
    if target_folder is not None and has_tokenizer(target_folder) and has_tokenizer(folder):
        advice = "Start from a drafter with the target's tokenizer."
        check_same_tokenizer(target_folder, folder, advice)
    elif found != wanted:
        raise UserError(
            f"{folder} has a vocabulary of {found}, expected the target's {wanted}, and has no "
            f"tokenizer to compare with the target's. Copy the student's tokenizer files there"
        )
    if found != wanted:
        if rank() == 0:
            print(
                f"note: {folder} has the target's tokenizer but a vocabulary of {found:,}; resized "
                f"to {wanted:,}"
            )
        student.config.pad_token_id = target.pad_token_id  # the target may lack the student's
        student.resize_token_embeddings(wanted, mean_resizing=False)
    return student.train()


def restrict_vocabulary(
    student: Any,
    shape: StudentConfig,
    samples: Sequence[Sample],
    special: Iterable[int],
    show: bool,
) -> None:
    """Restrict the student's lm_head to shape.draft_vocab_size tokens, if it is not 0.

    They are the special tokens and the most frequent supervised tokens of the samples. A student
    from a folder with a draft vocabulary keeps it. show: print the share of the supervised tokens.
    Raises UserError for a size that the vocabulary or the folder does not allow.
    """
    size, vocabulary = shape.draft_vocab_size, student.config.vocab_size
    check_draft_vocabulary(size, vocabulary)
    kept = token_ids(student)
    if kept is not None and size in (0, len(kept)):
        if show:
            print(f"draft vocabulary: the {len(kept):,} tokens of {shape.path}")
    elif kept is not None:
        raise UserError(
            f"{SIZE} is {size}, but {shape.path} drafts from {len(kept)} tokens, expected the same "
            f"number. Use 0 to keep its tokens, or start from a student without a draft vocabulary"
        )
    elif size:
        restrict_head(student, choose_tokens(samples, vocabulary, size, show, special))


def check_draft_vocabulary(size: int, vocab_size: int) -> None:
    """Raise UserError unless a draft vocabulary of this size exists; 0 is the full vocabulary."""
    if not 0 <= size <= vocab_size:
        raise UserError(
            f"{SIZE} is {size}, expected 0 for all tokens, or at most the target's {vocab_size}"
        )

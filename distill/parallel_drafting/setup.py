"""What `distill.train` builds for a student that drafts in parallel."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from decoding.drafters.parallel import MASK_TOKEN, TRAINED_TOKENS, ParallelChain
from decoding.engine import stop_tokens
from decoding.errors import UserError
from decoding.models.native.model import NativeTarget
from decoding.models.text.mask_token import choose_mask_token
from decoding.models.text.tokenizer import has_tokenizer, load_tokenizer
from distill.config import ParallelDraftingConfig, TrainConfig
from distill.parallel_drafting.layout import Retention
from distill.parallel_drafting.objective import ParallelDistillation
from training.data.packing import Sample
from training.features.teacher_config import NONE
from training.objectives import TeacherStates

MASK_KEY = "parallel_drafting.mask_token"


def parallel_rules(config: TrainConfig) -> dict[str, tuple[bool, str]]:
    """Return the rules of parallel_drafting: key -> (validity of its value, expected values)."""
    chosen, longest = config.parallel_drafting, config.data.max_length - 1
    cached, share = config.teacher.cache != NONE, "more than 0, at most 1"
    expected = f"0 for drafts token by token, or 2 to {longest} (data.max_length - 1)"
    if cached:
        expected = f"0 with teacher.cache={config.teacher.cache}, as it reads the target's states"
    return {
        "parallel_drafting.tokens": (
            chosen.tokens == 0 or (2 <= chosen.tokens <= longest and not cached),
            expected,
        ),
        "parallel_drafting.retain": (0 < chosen.retain <= 1, share),
        "parallel_drafting.retain_min": (0 < chosen.retain_min <= 1, share),
    }


def prepare_student(
    config: Any, chosen: ParallelDraftingConfig, tokenizer: Any, stop: Iterable[int]
) -> None:
    """Record the draft length and the mask token in the student's Hugging Face configuration.

    Without parallel drafting they are removed from it, as such a training forgets mask tokens.
    stop: ids that end a text. Raises UserError for an unfit mask token, and if none is found.
    """
    mask_token = None
    if chosen.tokens:
        special = (*stop, config.pad_token_id, config.bos_token_id)
        mask_token = choose_mask_token(
            MASK_KEY, chosen.mask_token, tokenizer, config.vocab_size, special
        )
    for key, value in ((MASK_TOKEN, mask_token), (TRAINED_TOKENS, chosen.tokens)):
        vars(config).pop(key, None)
        if chosen.tokens:
            setattr(config, key, value)


def refuse_in_data(mask_token: int, samples: Sequence[Sample]) -> None:
    """Raise UserError if the training data contain the mask token."""
    for number, sample in enumerate(samples):
        if (sample.ids == mask_token).any():
            raise UserError(
                f"{MASK_KEY} is {mask_token}, but sample {number} of the training data has this "
                f"token, expected one that no text has. Set {MASK_KEY} to such an id"
            )


def dry_parallel(config: Any, chosen: ParallelDraftingConfig, target_folder: Path) -> None:
    """Prepare the configuration of an untrained student, and print what its cost leaves out."""
    if not chosen.tokens:
        return
    note = (
        f"note: parallel_drafting adds up to {most_mask_tokens(chosen):.1f} mask tokens for each "
        f"supervised token, which this cost leaves out"
    )
    if has_tokenizer(target_folder):
        tokenizer = load_tokenizer(target_folder)
        prepare_student(config, chosen, tokenizer, stop_tokens(target_folder, tokenizer))
    else:
        note += ". Without the target's tokenizer no mask token is chosen"
    print(note)


def most_mask_tokens(chosen: ParallelDraftingConfig) -> float:
    """Return the most mask tokens that are trained for a supervised token."""
    retention = Retention(chosen.retain, chosen.retain_min)
    return sum(retention.share(depth) for depth in range(1, chosen.tokens))


def settings_of(student: Any) -> tuple[int, int]:
    """Return the draft length and the mask token that the student's configuration records."""
    values = vars(student.config)
    return values[TRAINED_TOKENS], values[MASK_TOKEN]


def describe_mask_tokens(student: Any, chosen: ParallelDraftingConfig) -> str:
    """Return a line on what a prepared student learns."""
    tokens, mask_token = settings_of(student)
    return (
        f"parallel drafting: {tokens} tokens a forward, mask token {mask_token}; up to "
        f"{most_mask_tokens(chosen):.1f} mask tokens for each supervised token"
    )


def parallel_chain(student: Any, model: NativeTarget) -> ParallelChain:
    """Return the drafter of the student's weights in `model`."""
    tokens, mask_token = settings_of(student)
    return ParallelChain(model=model, tokens=tokens, mask_token=mask_token)


def parallel_objective(
    config: TrainConfig, student: Any, states: TeacherStates
) -> ParallelDistillation:
    """Return the objective of a prepared student. states: of the frozen target."""
    chosen = config.parallel_drafting
    retention = Retention(chosen.retain, chosen.retain_min)
    return ParallelDistillation(
        student, *settings_of(student), retention, config.loss, states, config.seed
    )

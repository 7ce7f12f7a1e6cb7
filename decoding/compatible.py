"""Whether two model folders have the same tokenizer: every id is compared, not the size of the vocabulary."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.folder import read_config

SHOWN = 3  # differing ids that a message lists
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")  # a folder with any of them has one


def load_tokenizer(
    folder: str | Path, trust_remote_code: bool = False, *, of_model: bool = True
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, or with of_model=False of one that holds a tokenizer alone.

    Raises UserError if the folder or its tokenizer cannot be read.
    """
    if of_model:
        read_config(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}: its tokenizer cannot be loaded ({error}). Copy the tokenizer files again."
        ) from error


def check_same_tokenizer(target_folder: str | Path, drafter_folder: str | Path) -> None:
    """Raise UserError, with the first differing ids, unless both folders map every id to the same token.

    Added and special tokens are part of the comparison, and so are the beginning- and end-of-text ids.
    """
    target, drafter = load_tokenizer(target_folder), load_tokenizer(drafter_folder)
    where = f"{drafter_folder} cannot draft for {target_folder}: their tokenizers differ"
    if told := _differing(target, drafter, "drafter"):
        raise UserError(f"{where} {told}. Take a drafter that was made with the target's tokenizer.")
    for role in ("bos_token_id", "eos_token_id"):
        ours, theirs = getattr(target, role), getattr(drafter, role)
        if ours != theirs:
            raise UserError(f"{where}: {role} is {ours} in the target and {theirs} in the drafter.")


def check_tokenizer_of(tokenizer: PreTrainedTokenizerBase, target_folder: str | Path, where: str) -> None:
    """Raise UserError, beginning with `where`, for a tokenizer that is not the target's: by its own where it has one, else by its ids alone."""
    highest, holds = max(tokenizer.get_vocab().values()), read_config(target_folder).get("vocab_size")
    if isinstance(holds, int) and highest >= holds:
        raise UserError(
            f"{where} has ids up to {highest}, but the vocabulary of {target_folder} has {holds} tokens: give the tokenizer that the target was "
            "trained with."
        )
    if any((Path(target_folder) / name).is_file() for name in TOKENIZERS):
        told = _differing(load_tokenizer(target_folder), tokenizer, "given one")
        if told:
            raise UserError(
                f"{where} is not that of {target_folder}: they differ {told}. Leave it out to take the target's own."
            )


def _differing(target: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, name: str) -> str:
    """How many ids mean another token, and the first of them; empty where there are none."""
    ours, theirs = ({i: token for token, i in each.get_vocab().items()} for each in (target, other))
    ids = sorted(ours.keys() | theirs.keys())
    differing = [i for i in ids if ours.get(i) != theirs.get(i)]
    shown = "; ".join(
        f"id {i} is {ours.get(i)!r} in the target and {theirs.get(i)!r} in the {name}" for i in differing[:SHOWN]
    )
    return f"in {len(differing)} of {len(ids)} ids: {shown}" if differing else ""

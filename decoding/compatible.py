"""Whether two model folders have the same tokenizer: every id is compared, not the size of the vocabulary."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.folder import read_config

SHOWN = 3  # differing ids that a message lists


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
    target_tokens = {i: token for token, i in target.get_vocab().items()}
    drafter_tokens = {i: token for token, i in drafter.get_vocab().items()}
    ids = sorted(target_tokens.keys() | drafter_tokens.keys())
    differing = [i for i in ids if target_tokens.get(i) != drafter_tokens.get(i)]
    where = f"{drafter_folder} cannot draft for {target_folder}: their tokenizers differ"
    if differing:
        shown = "; ".join(
            f"id {i} is {target_tokens.get(i)!r} in the target and {drafter_tokens.get(i)!r} in the drafter"
            for i in differing[:SHOWN]
        )
        raise UserError(
            f"{where} in {len(differing)} of {len(ids)} ids: {shown}. "
            "Take a drafter that was made with the target's tokenizer."
        )
    for role in ("bos_token_id", "eos_token_id"):
        ours, theirs = getattr(target, role), getattr(drafter, role)
        if ours != theirs:
            raise UserError(f"{where}: {role} is {ours} in the target and {theirs} in the drafter.")

"""The mask token: an id of the vocabulary that no text has, and its record in config.json."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.drafters.parallel import MASK_TOKEN, TRAINED_TOKENS
from decoding.errors import UserError
from training.data.packing import Sample

KEY = "parallel_drafting.mask_token"
# names such as <|reserved_special_token_0|>, <unused3> and [unused3]
RESERVED = re.compile(r"^[<\[].*(reserved|unused)", re.IGNORECASE)
# The byte 0, which no text has, in vocabularies with bytes: SentencePiece's and byte-level BPE's.
NULL_BYTES = ("<0x00>", "Ā")


def choose_mask_token(
    asked: int | None,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    special: Iterable[int | None],
) -> int:
    """Return the id that was asked for, or one that no text has.

    That is the first id without a token, else the last reserved token, else the token of the byte
    0. special: ids with a role in the models, such as end of text. Raises UserError for an id with
    a role or outside the vocabulary, and if no such id is found.
    """
    unknown = tokenizer.unk_token_id  # also the id of tokens that the vocabulary lacks
    roles = {*special, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    if asked is not None:
        if not 0 <= asked < vocab_size or asked in roles:
            raise UserError(
                f"{KEY} is {asked}, expected an id from 0 to {vocab_size - 1} that is no padding, "
                f"start or end of text ({', '.join(map(str, sorted(roles - {None})))}). Set null "
                f"to choose an unused one"
            )
        return asked
    without_token = range(len(tokenizer), vocab_size)[:1]
    reserved = [token for name, token in tokenizer.get_vocab().items() if RESERVED.search(name)]
    null_bytes: Any = tokenizer.convert_tokens_to_ids([*NULL_BYTES])
    for token in (*without_token, *sorted(reserved, reverse=True), *null_bytes):
        if token is not None and token < vocab_size and token not in roles | {unknown}:
            return int(token)
    raise UserError(
        f"{KEY} is null, but the vocabulary has no unused or reserved token. Set it to the id of a "
        f"token that no text has"
    )


def refuse_in_data(mask_token: int, samples: Sequence[Sample]) -> None:
    """Raise UserError if the training data contain the mask token."""
    for number, sample in enumerate(samples):
        if (sample.ids == mask_token).any():
            raise UserError(
                f"{KEY} is {mask_token}, but sample {number} of the training data has this token, "
                f"expected one that no text has. Set {KEY} to such an id"
            )


def record(config: Any, tokens: int, mask_token: int | None) -> None:
    """Write the draft length and the mask token into a model's configuration; 0: remove both."""
    for key, value in ((MASK_TOKEN, mask_token), (TRAINED_TOKENS, tokens)):
        vars(config).pop(key, None)
        if tokens:
            setattr(config, key, value)

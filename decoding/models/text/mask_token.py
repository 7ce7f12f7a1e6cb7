"""The mask token: an id of the vocabulary that no text has, in the place of tokens to draft."""

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError

# names such as <|reserved_special_token_0|>, <unused3> and [unused3]
RESERVED = re.compile(r"^[<\[].*(reserved|unused)", re.IGNORECASE)
# The byte 0, which no text has, in vocabularies with bytes: SentencePiece's and byte-level BPE's.
NULL_BYTES = ("<0x00>", "Ā")


def choose_mask_token(
    key: str,
    asked: int | None,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    special: Iterable[int | None],
) -> int:
    """Return the id that was asked for, or one that no text has.

    That is the first id without a token, else the last reserved token, else the token of the byte
    0. key: the setting that asks. special: ids with a role in the models, such as end of text.
    Raises UserError for an id with a role or outside the vocabulary, and if no such id is found.
    """
    unknown = tokenizer.unk_token_id  # also the id of tokens that the vocabulary lacks
    found = (*special, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    roles = {token for token in found if token is not None}
    if asked is not None:
        check_mask_token(key, asked, vocab_size, roles)
        return asked
    without_token = range(len(tokenizer), vocab_size)[:1]
    reserved = [token for name, token in tokenizer.get_vocab().items() if RESERVED.search(name)]
    null_bytes: Any = tokenizer.convert_tokens_to_ids([*NULL_BYTES])
    for token in (*without_token, *sorted(reserved, reverse=True), *null_bytes):
        if token is not None and token < vocab_size and token not in roles | {unknown}:
            return int(token)
    raise UserError(
        f"{key} is null, but the vocabulary has no unused or reserved token. Set it to the id of a "
        f"token that no text has."
    )


def check_mask_token(key: str, token: int, vocab_size: int, roles: Iterable[int] = ()) -> None:
    """Raise UserError for a mask token outside the vocabulary, or one with a role in texts.

    key: where the token is set, for the error.
    """
    taken = sorted(roles)
    if 0 <= token < vocab_size and token not in taken:
        return
    others = f" that is no padding, start or end of text ({', '.join(map(str, taken))})"
    raise UserError(
        f"{key} is {token}, expected an id from 0 to {vocab_size - 1}{others if taken else ''}. "
        f"Use the id of a token that no text has."
    )

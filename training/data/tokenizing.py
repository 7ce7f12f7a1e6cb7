"""Tokens of many texts in one call of a fast tokenizer, and the tokens that lie in spans of a text.

A call for one text costs as much Python as a short text's tokens, and a list of all offsets as much
again. Batches use all threads of the tokenizer, and only offsets at the ends of spans are read.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError

Span = tuple[int, int]


def encode_batch(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool = False
) -> list[Any]:
    """Return an encoding of `tokenizers` for each text, with the ids of a call for it alone.

    special: let the tokenizer add its special tokens. Raises UserError for a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{tokenizer.name_or_path}: a slow tokenizer has no character offsets, by which "
            f"answers are located. Save a fast one (tokenizer.json) to the folder"
        )
    tokenizer("")  # resets truncation, padding and the treatment of special tokens
    return list(tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=special))


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the ids (int32) of plain texts; the tokenizer may add a BOS to each."""
    if not tokenizer.is_fast:
        return [np.asarray(tokenizer(text)["input_ids"], dtype=np.int32) for text in texts]
    tokenizer("")
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
    return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]


def find_tokens(encoding: Any, text: str, spans: Sequence[Span]) -> list[Span]:
    """Return, for each rising span of characters, the range of tokens that are supervised.

    These are the tokens whose characters lie in the span. A token that begins before it belongs to
    it if only its white space lies outside (" Hello" after a prompt that ends in a blank), not if
    it mixes text of prompt and answer.
    """
    ranges, after = [], 0
    for start, end in spans:
        first, begin = _first_token(encoding, start, after)
        after = _first_at_or_behind(encoding, text, end, first)
        while first < after and begin < start and text[begin:start].strip():
            first += 1
            begin = encoding.token_to_chars(first)[0] if first < after else start
        ranges.append((first, after))
    return ranges


def _first_token(encoding: Any, start: int, after: int) -> Span:
    """Return the first token from `after` that reaches `start`, and its first character."""
    token = encoding.char_to_token(start)
    if token is not None and token >= after:
        chars = encoding.token_to_chars(token)
        before = encoding.token_to_chars(token - 1) if token > after else (start - 1, start)
        if before[1] <= start and before[0] < start:
            return token, chars[0]
    offsets, token = encoding.offsets, after  # no token holds the character, or empty ones do
    while token < len(offsets) and offsets[token][1] <= start and offsets[token][0] < start:
        token += 1
    return token, offsets[token][0] if token < len(offsets) else start


def _first_at_or_behind(encoding: Any, text: str, end: int, first: int) -> int:
    """Return the first token from `first` that begins at `end` or behind it."""
    if end >= len(text):
        return max(first, len(encoding))
    token = encoding.char_to_token(end)
    if token is not None and token > first:
        begin, before = (encoding.token_to_chars(one)[0] for one in (token, token - 1))
        if begin >= end > before:
            return int(token)
    offsets, token = encoding.offsets, first
    while token < len(offsets) and offsets[token][0] < end:
        token += 1
    return token

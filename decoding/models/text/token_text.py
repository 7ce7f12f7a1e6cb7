"""The bytes of a tokenizer's tokens, and its tokens of bytes, which two tokenizers can compare.

Tokenizers write a blank as a blank, as `Ġ` (byte-level BPE) or as `▁` (SentencePiece), and bytes
outside of their pieces as characters or as `<0x0A>`. Here a token is the bytes that it adds to a
text. A SentencePiece tokenizer also adds a blank at the beginning of a text; `encode` and `decode`
add and remove it there only.
"""

import json
import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError

BLANK = "\u2581"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# surrogates that Python decodes from bytes which are not UTF-8
BROKEN = re.compile("([\udc80-\udcff]+)")
# A line break joins no other token of a tokenizer that adds a blank before a text.
APART = "\n"
PROBES = ("a", "the", "0")


class TokenText:
    """The tokens of one tokenizer as bytes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        """Read the tokens' bytes.

        where: the tokenizer's folder, for errors. Raises UserError for a tokenizer without a
        tokenizer.json, and for one that writes text in another way than those above.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise UserError(
                f"{where}: its tokenizer is a {type(tokenizer).__name__}, expected one with a "
                f"tokenizer.json. Save it as a fast tokenizer."
            )
        self._core = Tokenizer.from_str(backend.to_str())
        self._core.no_truncation()
        self._core.no_padding()
        self._core.encode_special_tokens = True  # the text `</s>` is not the token
        added = tokenizer.added_tokens_decoder
        unknown = tokenizer.unk_token_id
        # content of each token without text -> its id
        self.specials = {token.content: i for i, token in added.items() if token.special}
        self.begin, self.end = tokenizer.bos_token_id, tokenizer.eos_token_id
        # the tokens before every text
        self.start = list(tokenizer("")["input_ids"])
        if self.end is not None and self.start[-1:] == [self.end]:
            self.start = self.start[:-1]
        to_bytes = _reader(self._core, where)
        vocabulary = tokenizer.get_vocab()
        # the bytes of each token; None: a special token, or an id without a token
        self.bytes_V: list[bytes | None] = [None] * (1 + max(vocabulary.values()))
        for token, i in vocabulary.items():
            if i in added and not added[i].special:
                self.bytes_V[i] = added[i].content.encode()
            elif i not in added and i != unknown:
                self.bytes_V[i] = to_bytes(token)
        self._byte_pieces = {i for token, i in vocabulary.items() if BYTE_PIECE.fullmatch(token)}
        # the token of each sequence of bytes; a piece is preferred to `<0x41>`
        self.ids: dict[bytes, int] = {}
        for i in sorted(range(len(self.bytes_V)), key=lambda i: (i not in self._byte_pieces, -i)):
            if data := self.bytes_V[i]:
                self.ids[data] = i
        found = (self._joined(self._ids(text)) == b" " + text.encode() for text in PROBES)
        self.adds_blank = any(found)

    def decode(self, ids: Sequence[int], first: bool) -> bytes:
        """Return the bytes of tokens. first: whether they begin a text."""
        data = self._joined(ids)
        return data[1:] if first and self.adds_blank and data[:1] == b" " else data

    def encode(self, data: bytes, first: bool) -> list[int]:
        """Return the tokens of bytes. first: whether they begin a text.

        Bytes that are not UTF-8 become tokens of one byte, and are dropped if there are none.
        """
        ids: list[int] = []
        parts = BROKEN.split(data.decode("utf-8", "surrogateescape"))
        for place, part in enumerate(parts):
            if place % 2:
                broken = part.encode("utf-8", "surrogateescape")
                found = (self.ids.get(bytes([byte])) for byte in broken)
                ids += [one for one in found if one is not None]
            elif part:
                ids += self._ids(part) if first and not place else self._continued(part)
        return ids

    def continued(self, before: Sequence[int], new: bytes, first: bool) -> list[int]:
        """Return the tokens of new bytes after the given tokens.

        first: whether `before` begins a text. All of the text is encoded, so that the new tokens
        are those of the text as a whole. If one of its tokens reaches over the boundary, the new
        bytes are encoded alone, since the tokens before the boundary are given.
        """
        data = self.decode(before, first)
        ids = self.encode(data + new, first)
        if not before:
            return ids
        added = len(self._joined(ids)) - len(self.decode(ids, first))  # the blank before a text
        ends = list(accumulate(len(self.bytes_V[i] or b"") for i in ids))
        if len(data) + added in ends:
            return ids[ends.index(len(data) + added) + 1 :]
        return self.encode(new, False)

    def _continued(self, text: str) -> list[int]:
        """Return the tokens of text that does not begin a text."""
        if not self.adds_blank:
            return self._ids(text)
        if text[0] == " ":
            return self._ids(text[1:]) if len(text) > 1 else self._after(text)
        return self._after(text)

    def _after(self, text: str) -> list[int]:
        """Return the tokens of text after a line break, without the line break's."""
        ids, apart = self._ids(APART + text), len(APART.encode()) + 1
        ends = list(accumulate(len(self.bytes_V[i] or b"") for i in ids))
        return ids[ends.index(apart) + 1 :] if apart in ends else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return list(self._core.encode(text, add_special_tokens=False).ids)

    def _joined(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.bytes_V[i] or b"" for i in ids if i < len(self.bytes_V))


def without_unfinished(data: bytes) -> bytes:
    """Return the bytes without a UTF-8 character at the end that lacks bytes."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return data[:-back] if needed > back else data
        if byte < 0x80:
            break
    return data


def _reader(core: Tokenizer, where: str) -> Any:
    """Return the function from a token of the vocabulary to its bytes."""
    state: Any = json.loads(core.decoder.__getstate__()) if core.decoder is not None else {}
    steps = state.get("decoders", [state] if state else [])
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        table = _byte_level()
        return lambda token: b"".join(table.get(one, one.encode()) for one in token)
    replaced = [step["pattern"].get("String") for step in steps if step["type"] == "Replace"]
    if "Metaspace" in kinds or BLANK in replaced:
        return _piece_bytes
    if kinds <= {"Fuse"}:
        return str.encode
    raise UserError(
        f"{where}: its tokenizer decodes with {', '.join(sorted(kinds))}, expected byte-level "
        f"tokens (ByteLevel) or SentencePiece's (Metaspace). Use another drafter."
    )


def _piece_bytes(token: str) -> bytes:
    """Return the bytes of a SentencePiece piece."""
    byte = BYTE_PIECE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(BLANK, " ").encode()


def _byte_level() -> dict[str, bytes]:
    """Return the byte of each character of byte-level BPE (Radford et al. 2019, GPT-2).

    Printable bytes of Latin-1 are themselves; the others follow each other from U+0100.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}

"""Incremental text from tokens: complete characters only, equal to decoding all tokens at once."""

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # decoded from bytes that are not a complete character
LONGEST = 4  # bytes of a UTF-8 character, and so the maximum tokens of one


class TextStream:
    """The text of a growing list of token ids, piece by piece.

    A piece is decoded together with the piece before it, since tokenizers may decode a token at the
    start of a text differently (SentencePiece drops its blank). The cost per token does not grow
    with the text.
    """

    def __init__(self, text_of: Callable[[Sequence[int]], str]) -> None:
        self._text_of = text_of
        self._tokens: list[int] = []
        # text is decoded from token `first`, and returned up to token `shown`
        self._first = self._shown = 0

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens add, without an unfinished character."""
        pieces = []
        for token in tokens:
            self._tokens.append(token)
            waiting = len(self._tokens) - self._shown
            pieces.append(self._piece(hold=waiting < LONGEST))
        return "".join(pieces)

    def end(self) -> str:
        """Return the rest of the text, with U+FFFD for bytes of an unfinished character."""
        return self._piece(hold=False)

    def _piece(self, hold: bool) -> str:
        old = self._text_of(self._tokens[self._first : self._shown])
        new = self._text_of(self._tokens[self._first :])
        if hold and new.endswith(BROKEN):
            return ""
        piece = new[len(old) :]
        if piece:  # after a special token the next one still needs the context with text
            self._first = self._shown
        self._shown = len(self._tokens)
        return piece

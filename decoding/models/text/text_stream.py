"""Text out of tokens as they come: whole characters only, and the same text as decoding all of them
at once.
"""

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # what a tokenizer writes for bytes that are no character, or not yet
LONGEST = 4  # bytes of a UTF-8 character, and so the most tokens that one can be spread over


class TextStream:
    """The text of a growing list of token ids, piece by piece.

    A piece is decoded together with the piece before it, as tokenizers write a token at the start
    of a text differently (SentencePiece drops its blank), so the cost of a token does not grow with
    the text.
    """

    def __init__(self, text_of: Callable[[Sequence[int]], str]) -> None:
        self._text_of = text_of
        self._tokens: list[int] = []
        # text is decoded from token `first` on, and told up to token `shown`
        self._first = self._shown = 0

    def add(self, tokens: Sequence[int]) -> str:
        """What these tokens add to the text; the bytes of an unfinished character wait for the rest
        of it.
        """
        pieces = []
        for token in tokens:
            self._tokens.append(token)
            waiting = len(self._tokens) - self._shown
            pieces.append(self._piece(hold=waiting < LONGEST))
        return "".join(pieces)

    def end(self) -> str:
        """What was waiting, as the tokenizer writes it: U+FFFD for bytes that no other token
        completed.
        """
        return self._piece(hold=False)

    def _piece(self, hold: bool) -> str:
        old = self._text_of(self._tokens[self._first : self._shown])
        new = self._text_of(self._tokens[self._first :])
        if hold and new.endswith(BROKEN):
            return ""
        piece = new[len(old) :]
        if piece:  # else a special token: the next one still needs a neighbour with text
            self._first = self._shown
        self._shown = len(self._tokens)
        return piece

"""Incremental text from tokens: complete characters only, equal to decoding all tokens at once."""

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # decoded from bytes that are not a complete character
LONGEST = 4  # bytes of a UTF-8 character, and so the maximum tokens of one
CONTEXT = 8  # tokens before the text with which its first piece is decoded


class TextStream:
    """The text of a growing list of token ids, piece by piece.

    A piece is decoded together with the piece before it, since tokenizers may decode a token at the
    start of a text differently (SentencePiece drops its blank). The cost per token does not grow
    with the text. The text does not depend on how many tokens are added at once: they are decoded
    together as long as all characters are complete, and otherwise one by one.

    before: token ids that the text continues, such as those of a prompt. A blank at the start of
    the text is kept after them.
    """

    def __init__(self, text_of: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._text_of = text_of
        self._tokens = list(before[-CONTEXT:])
        # text is decoded from token `first`, and returned up to token `shown`
        self._first, self._shown = 0, len(self._tokens)
        # (first, shown) that the first `count` tokens leave if they are added one by one
        self._single, self._count = (0, self._shown), self._shown

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens add, without an unfinished character."""
        self._tokens += tokens
        old, new = self._texts(len(self._tokens))
        if BROKEN in old or BROKEN in new:
            return self._add_singly(len(tokens))
        single = len(tokens) == 1 and self._count == len(self._tokens) - 1
        piece = self._show(len(self._tokens), old, new)
        if single:
            self._single, self._count = (self._first, self._shown), len(self._tokens)
        return piece

    def end(self) -> str:
        """Return the rest of the text, with U+FFFD for bytes of an unfinished character."""
        return self._show(len(self._tokens), *self._texts(len(self._tokens)))

    def _add_singly(self, count: int) -> str:
        """Return the text of the last `count` tokens, decoded one by one.

        Where characters are incomplete, the text depends on the tokens that are decoded together.
        So those before are read again as if they had been added singly.
        """
        (self._first, self._shown), known = self._single, len(self._tokens) - count
        pieces = []
        for end in range(self._count + 1, len(self._tokens) + 1):
            old, new = self._texts(end)
            if end - self._shown < LONGEST and new.endswith(BROKEN):
                continue
            piece = self._show(end, old, new)
            if end > known:
                pieces.append(piece)
        self._single, self._count = (self._first, self._shown), len(self._tokens)
        return "".join(pieces)

    def _texts(self, end: int) -> tuple[str, str]:
        """Return the text from token `first` to what is shown, and to token `end`."""
        shown, new = (self._tokens[self._first : stop] for stop in (self._shown, end))
        return self._text_of(shown) if shown else "", self._text_of(new)

    def _show(self, end: int, old: str, new: str) -> str:
        """Return the text up to token `end`, from now on shown."""
        piece = new[len(old) :]
        if piece:  # after a special token the next one still needs the context with text
            self._first = self._shown
        self._shown = end
        return piece

"""Translation of texts between the vocabularies of a target and of its drafter.

Shapes: N shared tokens.
"""

from collections.abc import Sequence
from pathlib import Path

from decoding.errors import UserError
from decoding.models.folder import has_config
from decoding.models.text.token_text import TokenText, without_unfinished
from decoding.models.text.tokenizer import load_tokenizer

# Tokens after which a part of a text ends at the next blank or line break, and is encoded once.
PART_TOKENS = 32


class Vocabularies:
    """The vocabularies of a target and of a drafter with another tokenizer.

    A token is shared if it adds the same bytes to a text in both. Special tokens are shared by
    content, and the ends of text by role.
    """

    def __init__(self, target: TokenText, drafter: TokenText) -> None:
        """Find the shared tokens."""
        self.target, self.drafter = target, drafter
        self.special_of_target = {
            i: drafter.specials[content]
            for content, i in target.specials.items()
            if content in drafter.specials
        }
        for ours, theirs in ((target.begin, drafter.begin), (target.end, drafter.end)):
            if ours is not None and theirs is not None:
                self.special_of_target[ours] = theirs
        pairs = {i: drafter.ids[data] for data, i in target.ids.items() if data in drafter.ids}
        self.shared_text = len(pairs)
        # only the end of a text is worth drafting
        if target.end is not None and drafter.end is not None:
            pairs[target.end] = drafter.end
        # the shared tokens in both vocabularies, in the target's order
        self.target_ids_N = sorted(pairs)
        self.drafter_ids_N = [pairs[i] for i in self.target_ids_N]

    @classmethod
    def of_folders(
        cls,
        target_folder: str | Path,
        folder: str | Path,
        trust_remote_code: bool = False,
    ) -> "Vocabularies":
        """Read both tokenizers. Raises UserError for one that cannot be read or is not supported.

        Also raises UserError if the vocabularies have no token of text in common.
        """
        # if no target is loaded, its folder may hold the tokenizer alone
        of_model = has_config(target_folder)
        target = load_tokenizer(target_folder, trust_remote_code, of_model=of_model)
        drafter = load_tokenizer(folder, trust_remote_code)
        both = cls(TokenText(target, str(target_folder)), TokenText(drafter, str(folder)))
        if not both.shared_text:
            raise UserError(
                f"{folder} cannot draft for {target_folder}: none of its {len(both.drafter.ids):,} "
                f"tokens has the text of one of the target's {len(both.target.ids):,}. Use a "
                f"drafter whose vocabulary shares tokens with the target's."
            )
        return both


class Translation:
    """A row's growing text in the drafter's tokens.

    The text is encoded in parts that end at special tokens and, after PART_TOKENS tokens, at a
    blank or line break. Only the last part is encoded again when the text grows, so the result is
    a function of the text, and a round costs the same in a long text.
    """

    def __init__(self, vocabularies: Vocabularies) -> None:
        self._both = vocabularies
        self._closed = list(vocabularies.drafter.start)  # tokens of the parts that have ended
        self._open: list[int] = []  # the target's tokens of the last part
        self._first = True  # whether the last part begins a text
        self._read = 0  # tokens of the sequence that were read

    def of(self, sequence: Sequence[int]) -> list[int]:
        """Return the drafter's tokens, at least one, of a sequence that extends the one before."""
        target, specials = self._both.target, self._both.special_of_target
        for token in sequence[self._read :]:
            data = target.bytes_V[token] if token < len(target.bytes_V) else None
            if data is None:
                self._close()
                self._first = True
                found = specials.get(token)
                # a token that starts every text may be in the sequence too
                if found is not None and [found] != self._closed:
                    self._closed.append(found)
                continue
            if len(self._open) >= PART_TOKENS and data[:1] in (b" ", b"\n"):
                self._close()
                self._first = False
            self._open.append(token)
        self._read = len(sequence)
        return [*self._closed, *self._last()] or [self._both.drafter.begin or 0]

    def continued(self, drafted: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens of the target for the drafter's tokens after the text.

        The draft ends before a character that lacks bytes, and before a special token, of which
        only the end of a text is kept.
        """
        ours, theirs = self._both.target, self._both.drafter
        size = len(theirs.bytes_V)
        ends = (n for n, i in enumerate(drafted) if i >= size or theirs.bytes_V[i] is None)
        end = next(ends, len(drafted))
        begins = self._first and not self._open
        before = ours.decode(self._open, self._first)
        text = without_unfinished(before + theirs.decode(drafted[:end], begins))
        ids: list[int] = []
        if len(text) > len(before):
            ids = ours.continued(self._open, text[len(before) :], self._first)
            known = (n for n, i in enumerate(ids) if ours.bytes_V[i] is None)
            ids = ids[: next(known, len(ids))]
        if ours.end is not None and end < len(drafted) and drafted[end] == theirs.end:
            ids.append(ours.end)
        return ids[:most]

    def _last(self) -> list[int]:
        """Return the drafter's tokens of the last part."""
        if not self._open:
            return []
        data = self._both.target.decode(self._open, self._first)
        return self._both.drafter.encode(data, self._first)

    def _close(self) -> None:
        self._closed += self._last()
        self._open = []

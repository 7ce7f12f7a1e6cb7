"""SentencePiece encoding by a folder's tokenizer.model, and a fast tokenizer with the same ids.

The reference is the released slow tokenizer, with which LLaMA, Vicuna and related models were
trained. It splits a text at its added tokens (`</s>` in a chat) and encodes the parts with
SentencePiece. `legacy` in tokenizer_config.json controls the blank before a text:

- true, the default (LLaMA, Vicuna 1.3): every part gets a blank, so `</s>USER` has the ids of
  `</s>` and ` USER`, and `</s> USER` has one blank more.
- false (Llama 2, Vicuna 1.5): the whole text gets one blank, or none if it begins with an added
  token; the part after an added token is encoded as it is.

(transformers pull request 24565 introduced the flag.)
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

BLANK = "\u2581"  # what SentencePiece writes for a space
# the type of learned pieces in a model; control pieces, bytes and user-defined symbols have others
NORMAL = 1
Added = Mapping[int, AddedToken]
_ModelProto: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]  # protobuf makes it at import


class SentencePieces:
    """The reference tokenizer: tokenizer.model, the folder's added tokens, and its convention."""

    def __init__(self, model: bytes, added: Added, legacy: bool, prefix: bool = True) -> None:
        """Read a model; raise ValueError for bytes that are not a SentencePiece model.

        model: the content of tokenizer.model. added: the folder's added tokens by id. legacy: the
        convention for blanks (see the module's docstring). prefix: with legacy false, whether a
        text starts with a blank (`add_prefix_space`).
        """
        try:
            self.proto = _ModelProto.FromString(model)
            if not self.proto.pieces:
                raise ValueError("it holds no pieces")
            self._decoder = self._encoder = SentencePieceProcessor(model_proto=model)
        except (DecodeError, RuntimeError) as error:
            raise ValueError(str(error)) from error
        self.model, self.added, self.legacy = model, added, legacy
        self.blank_before_text = self.proto.normalizer_spec.add_dummy_prefix and (legacy or prefix)
        if not legacy:
            bare = _ModelProto.FromString(model)
            bare.normalizer_spec.add_dummy_prefix = False
            self._encoder = SentencePieceProcessor(model_proto=bare.SerializeToString())
        self._special = {i for i, token in added.items() if token.special}
        self._ids = {token.content: i for i, token in added.items()}
        self._splits = re.compile(
            "|".join(map(re.escape, sorted(self._ids, key=len, reverse=True))) or r"(?!)"
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without beginning-of-text and end-of-text ids."""
        if not self.legacy:
            text = text.replace(BLANK, " ")
            if self.blank_before_text and text and not self._splits.match(text):
                text = BLANK + text
        ids: list[int] = []
        while found := self._splits.search(text):
            token, before = self.added[self._ids[found.group()]], text[: found.start()]
            ids += self._encode_part(before.rstrip() if token.lstrip else before)
            ids.append(self._ids[token.content])
            text = text[found.end() :].lstrip() if token.rstrip else text[found.end() :]
        return ids + self._encode_part(text)

    def _encode_part(self, text: str) -> list[int]:
        """Return the ids of a text between added tokens."""
        if self.legacy or not text.startswith((BLANK, " ")):
            return list(self._encoder.encode(text))
        # SentencePiece may strip leading blanks unless something precedes them.
        before = self.proto.trainer_spec.unk_piece
        return list(self._encoder.encode(before + text)[len(self._encoder.encode(before)) :])

    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token: added tokens, and the pieces of all other ids."""
        pieces = {i: piece.piece for i, piece in enumerate(self.proto.pieces)}
        added = {i: token.content for i, token in self.added.items()}
        return {token: i for i, token in (pieces | added).items()}

    def decode(self, ids: list[int]) -> str:
        """Decode ids of the model's pieces, without special tokens."""
        return str(self._decoder.decode([i for i in ids if i not in self._special]))


def fast_twin(pieces: SentencePieces) -> Tokenizer:
    """Return a `tokenizers` tokenizer with the model's pieces, merged by the model's scores.

    The caller must compare it with the reference: a model that normalizes text by a table or is not
    BPE has no equal twin. Raises ValueError if the ids of added tokens leave gaps.
    """
    proto, spec = pieces.proto, pieces.proto.normalizer_spec
    vocabulary = {token: i for token, i in pieces.vocabulary().items() if i < len(proto.pieces)}
    token_of = {i: token for token, i in vocabulary.items()}
    core = models.BPE(
        vocabulary,
        _merges(pieces.model),
        unk_token=token_of.get(proto.trainer_spec.unk_id),
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )
    twin = Tokenizer(core)
    steps: list[Any] = [normalizers.Replace(" ", BLANK)]
    if pieces.blank_before_text and pieces.legacy:
        steps.insert(0, normalizers.Prepend(BLANK))
    if spec.remove_extra_whitespaces:
        steps[:0] = [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    twin.normalizer = normalizers.Sequence(steps)
    if pieces.blank_before_text and not pieces.legacy:
        # Normalizers see one part at a time; only a pre-tokenizer knows which part begins the text.
        # One Metaspace alone would add no blank to a text that begins with one, so a plain space is
        # put first and then rewritten.
        twin.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False),
                pre_tokenizers.Metaspace(BLANK, prepend_scheme="never", split=False),
            ]
        )
    read: list[Any] = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces:
        read.append(decoders.Strip(" ", left=1))
    twin.decoder = decoders.Sequence(read)
    _add_tokens(twin, pieces.added)
    return twin


@lru_cache(maxsize=4)
def _merges(model: bytes) -> list[tuple[str, str]]:
    """Return every split of a learned piece into two, in the order of SentencePiece's merges.

    SentencePiece merges the pair whose piece has the highest score; ties go to the leftmost pair.
    Pieces of blanks share one score in LLaMA's model, so runs of blanks grow from the left: among
    pairs of one score, the one with the longer left side comes first.
    """
    pieces = _ModelProto.FromString(model).pieces
    scores = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    splits = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    splits.sort(key=lambda split: split[:2])
    return [(left, right) for *_, left, right in splits]


def _add_tokens(twin: Tokenizer, added: Added) -> None:
    """Add tokens under their ids; like the slow tokenizer, match them in the unnormalized text."""
    for i, token in sorted(added.items()):
        kept = AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=False,
            special=token.special,
        )
        twin.add_special_tokens([kept]) if token.special else twin.add_tokens([kept])
        if twin.token_to_id(token.content) != i:
            expected = twin.token_to_id(token.content)
            raise ValueError(f"added token {token.content!r} has id {i}, expected {expected}")

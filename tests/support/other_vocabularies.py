"""Tokenizers of single characters, and models whose tokens have other ids."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from decoding.drafters.other_vocabulary import OtherVocabulary
from decoding.drafters.translation import Vocabularies
from decoding.interfaces import Target
from decoding.models.text.token_text import TokenText

UNKNOWN = "<unk>"
OTHERS = 3  # tokens of a drafter that the target lacks


def letters(count: int, first: int = 0) -> list[str]:
    """Return different characters, one for each token."""
    return [chr(0x4E00 + first + place) for place in range(count)]


def text_of(characters: Sequence[str]) -> TokenText:
    """Return the tokenizer with a token for each character, in this order, and `<unk>` after them.

    `<unk>` may be one of the characters.
    """
    vocabulary = {each: i for i, each in enumerate(dict.fromkeys([*characters, UNKNOWN]))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, unk_token=UNKNOWN)
    return TokenText(fast, "test")


class Renamed:
    """A model whose token i has the id ids[i], and which has further tokens.

    likely: whether the further tokens are likelier than all others, or less likely. The other
    methods are those of the model.
    """

    def __init__(self, model: Any, ids: Sequence[int], others: int, likely: bool) -> None:
        self._model, self._likely = model, likely
        self.vocab_size = len(ids) + others
        self._ids_V = torch.tensor(ids)
        self._model_ids = torch.zeros(self.vocab_size, dtype=torch.long)
        self._model_ids[self._ids_V] = torch.arange(len(ids))

    def __getattr__(self, name: str) -> Any:
        if name == "features_of_rows":  # which prefills read if there is one
            raise AttributeError(name)
        return getattr(self._model, name)

    def chain_call(self, num_tokens: int) -> None:
        return None

    def features(self, tokens_BN: Tensor, *given: Any) -> Tensor:
        found: Tensor = self._model.features(self._model_ids[tokens_BN], *given)
        return found

    def forward(self, tokens_BN: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        logits_BNV, hidden = self._model.forward(self._model_ids[tokens_BN], *given)
        edge = logits_BNV.max() + 1 if self._likely else logits_BNV.min() - 1
        logits_BND = edge.expand(*logits_BNV.shape[:-1], self.vocab_size).clone()
        logits_BND[..., self._ids_V] = logits_BNV
        return logits_BND, hidden


def renamed_drafter(model: Target, rule: str) -> OtherVocabulary:
    """Return a drafter with the model's tokens in another order, and OTHERS tokens of its own.

    The others are the likeliest ones if the rule drafts shared tokens alone.
    """
    V = model.vocab_size
    ids = torch.randperm(V + OTHERS, generator=torch.Generator().manual_seed(3))[:V].tolist()
    characters = letters(V + OTHERS, first=1000)
    for letter, i in zip(letters(V), ids, strict=True):
        characters[i] = letter
    both = Vocabularies(text_of(letters(V)), text_of(characters))
    made: Any = Renamed(model, ids, OTHERS, likely=rule == "tokens")
    return OtherVocabulary(model=made, vocabularies=both, rule=rule)


def partly_shared(model: Target, words: int, shared: int, rule: str) -> OtherVocabulary:
    """Return a drafter whose first `shared` tokens are those of a target with `words` tokens.

    Its other tokens are its own.
    """
    own = [*letters(shared), *letters(model.vocab_size - shared - 1, first=1000), UNKNOWN]
    both = Vocabularies(text_of(letters(words)), text_of(own))
    return OtherVocabulary(model=model, vocabularies=both, rule=rule)

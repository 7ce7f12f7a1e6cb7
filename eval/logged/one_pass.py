"""Rounds of chains on a logged text, found without decoding.

A chain is accepted as long as it equals the text. So each of its accepted tokens was drafted after
the text itself, and one pass of a draft model over the text gives the greedy token at every
position: the rounds of all draft lengths follow. Lookups and a lookup before a model propose from
the text alone. decoding.loop with a `LoggedTarget` is the eager twin (eval/logged/decoding.py).

Shapes: B rows, N tokens, P positions, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.prompt_lookup import Lookup, SuffixLookup
from decoding.drafters.with_lookup import LookupFirst
from decoding.interfaces import Chooser, Target
from decoding.models.prefill import prefill
from decoding.rounds.stats import Generation
from decoding.sampling.token_chooser import TokenChooser
from decoding.sampling.warpers import Warper
from decoding.stopping.base import Fixed
from eval.logged.texts import LoggedText

# tokens of a pass, and positions whose logits are in memory at a time
TOKENS_A_PASS, POSITIONS_A_PRODUCT = 4096, 1024


class Drafts(Protocol):
    """What a drafter proposes after each beginning of one text."""

    def after(self, start: int, budget: int) -> tuple[int, int]:
        """Return (drafted, correct) of a draft of at most `budget` tokens after `start` tokens.

        correct: number of drafted tokens, the first ones, that equal the text.
        """


Begin = Callable[[], Drafts]


class ModelDrafts:
    """Drafts of a chain model on one text, from its greedy token after every position.

    correct: whether the model's token after each position equals the text's next one, the position
    of the prompt's last token first. start: length of the prompt. context: the model's.
    """

    def __init__(self, correct: Sequence[bool], start: int, context: int) -> None:
        self._start, self._context = start, context
        # number of consecutive correct tokens from each position on
        self._runs = [0]
        for one in reversed(correct):
            self._runs.append(self._runs[-1] + 1 if one else 0)
        self._runs.reverse()

    def after(self, start: int, budget: int) -> tuple[int, int]:
        drafted = max(0, min(budget, self._context + 1 - start))
        return drafted, min(drafted, self._runs[start - self._start])


class LookupDrafts:
    """Drafts of a lookup on one text, which it looks up round by round."""

    def __init__(self, lookup: Lookup, text: LoggedText, chooser: Chooser) -> None:
        self._lookup, self._ids, self._chooser = lookup, text.ids, chooser
        self._policies = (Fixed(),)
        lookup.open([text.prompt], None, len(self._ids))

    def after(self, start: int, budget: int) -> tuple[int, int]:
        proposal = self._lookup.propose(
            [self._ids[:start]], [budget], self._policies, self._chooser
        )
        drafted = proposal.tokens_BN[0, : proposal.counts_B[0]].tolist()
        pairs = enumerate(zip(drafted, self._ids[start:], strict=False))
        known = min(len(drafted), len(self._ids) - start)
        return len(drafted), next((n for n, (one, other) in pairs if one != other), known)


class FirstDrafts:
    """Drafts of a lookup, and those of a model where it finds nothing."""

    def __init__(self, lookup: Drafts, model: Drafts) -> None:
        self._lookup, self._model = lookup, model

    def after(self, start: int, budget: int) -> tuple[int, int]:
        found = self._lookup.after(start, budget)
        return found if found[0] else self._model.after(start, budget)


def follows_in_one_pass(drafter: Any) -> bool:
    """Return whether `drafts_of` knows the drafter: a chain, a lookup, or a lookup before a chain.

    Their stopping rule must be fixed. Chains of llama.cpp are not known: its logits of quantised
    weights are not those of `lm_head`.
    """
    if isinstance(drafter, Lookup):
        return True
    chain = drafter.drafter if isinstance(drafter, LookupFirst) else drafter
    return type(chain) is ChainDrafter and chain.model.backend != "llama_cpp"


def drafts_of(
    drafter: Any, texts: Sequence[LoggedText], vocab_size: int
) -> Iterator[tuple[int, Begin]]:
    """Yield the index of each text, in any order, and what begins its drafts.

    vocab_size: of the target. A model reads all texts once. A lookup begins again for each draft
    length, as its index cannot forget tokens.
    """
    chooser = TokenChooser(Warper(0.0), "token", 0, vocab_size, torch.device("cpu"), None)
    if isinstance(drafter, Lookup):
        for index, text in enumerate(texts):
            yield index, partial(LookupDrafts, drafter, text, chooser)
        return
    lookup = SuffixLookup(drafter.min_match) if isinstance(drafter, LookupFirst) else None
    reader: Any = drafter.drafter if isinstance(drafter, LookupFirst) else drafter
    model = reader.model
    for index, correct in correct_tokens(model, texts, vocab_size):
        text = texts[index]
        drafts = ModelDrafts(correct, len(text.prompt), model.max_length)
        yield index, partial(_after_lookup, drafts, lookup, text, chooser)


def _after_lookup(
    drafts: Drafts, lookup: Lookup | None, text: LoggedText, chooser: Chooser
) -> Drafts:
    """Return the drafts of a model, after those of a lookup if there is one."""
    return drafts if lookup is None else FirstDrafts(LookupDrafts(lookup, text, chooser), drafts)


@torch.inference_mode()
def correct_tokens(
    model: Target, texts: Sequence[LoggedText], vocab_size: int
) -> Iterator[tuple[int, list[bool]]]:
    """Yield the index of each text and whether the model's greedy tokens equal its output.

    Texts past the model's context are read up to there, and the rest counts as wrong.
    """
    for batch in _batches(texts, model.max_length):
        ids_B = [
            [min(token, model.vocab_size - 1) for token in texts[index].ids[: model.max_length]]
            for index in batch
        ]
        model.open(len(batch), max(map(len, ids_B)))
        states_BNC = prefill(model, ids_B, keep_hidden=True)
        assert states_BNC is not None, "every text has a token"
        # of the tokens after which the output's are predicted
        firsts = [len(texts[index].prompt) - 1 for index in batch]
        states_PC = torch.cat(
            [
                states_BNC[row, first : len(ids)]
                for row, (first, ids) in enumerate(zip(firsts, ids_B, strict=True))
            ]
        )
        greedy: list[int] = []
        for part_PC in states_PC.split(POSITIONS_A_PRODUCT):
            logits_PV = model.lm_head(part_PC)[..., :vocab_size]
            greedy += devices.argmax(logits_PV).tolist()
        at = 0
        for index, first, ids in zip(batch, firsts, ids_B, strict=True):
            found = greedy[at : at + max(0, len(ids) - first)]
            at += len(found)
            output = texts[index].tokens
            correct = [one == other for one, other in zip(found, output, strict=False)]
            yield index, correct + [False] * (len(output) - len(correct))


def _batches(texts: Sequence[LoggedText], context: int) -> Iterator[list[int]]:
    """Yield the indices of texts of similar length, some TOKENS_A_PASS tokens at a time."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index].ids))
    batch: list[int] = []
    for index in order:
        length = min(len(texts[index].ids), context)
        if batch and (len(batch) + 1) * length > TOKENS_A_PASS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def follow(drafts: Drafts, text: LoggedText, num_draft_tokens: int) -> Generation:
    """Return the rounds that emit a text, counted as in the decoding loop.

    Nothing is drafted for a text's last token before its limit, and tokens after its end are
    neither tested nor accepted.
    """
    generation = Generation(tokens=list(text.tokens))
    start, first = len(text.prompt), len(text.prompt)
    end = first + len(text.tokens)
    while start < end:
        budget = min(num_draft_tokens, first + text.limit - start - 1)
        drafted, correct = drafts.after(start, budget) if budget > 0 else (0, 0)
        accepted = min(correct, end - start)
        emitted = min(accepted + 1, end - start)
        generation.count(drafted, min(accepted + 1, drafted, emitted), accepted, emitted)
        start += emitted
    return generation

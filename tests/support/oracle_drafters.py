"""Drafters that know the target's answer: right and wrong chains and trees, and wrong phrases."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoding.drafters.lookahead import Lookahead, Phrase, PhrasePool
from decoding.interfaces import Capabilities, Observation, Proposal, RoundCosts, Stopping, Target
from decoding.sampling.token_chooser import TokenChooser


class Oracle:
    """Drafter that proposes the known continuation of each prompt.

    answers: the continuation of each prompt, in the order of the batch. wrong: proposes each token
    off by one, so that none is right.
    """

    capabilities = Capabilities(shape="chain", steps="round")
    name, num_layers, num_parameters = "oracle", 0, 0

    def __init__(
        self, answers: Sequence[Sequence[int]], vocab_size: int, wrong: bool = False
    ) -> None:
        self.answers, self.vocab_size, self.wrong = answers, vocab_size, wrong

    def prepare(self, target: Target, costs: RoundCosts | None) -> None: ...

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int
    ) -> None:
        self.truths = [
            [*prompt, *answer] for prompt, answer in zip(prompts_B, self.answers, strict=True)
        ]

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        raise NotImplementedError("an oracle knows the answer of one turn only")

    def draft(self, truth: Sequence[int], at: int, budget: int) -> list[int]:
        """Return `budget` tokens of the text from position `at`, each off by one if `wrong`.

        Zeros replace the tokens beyond the end of the text.
        """
        known = list(truth[at : at + budget])
        known += [0] * (budget - len(known))
        return [(token + 1) % self.vocab_size for token in known] if self.wrong else known

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: TokenChooser,
    ) -> Proposal:
        width = max(budgets_B)
        drafted = [
            self.draft(truth, len(s), width)
            for truth, s in zip(self.truths, sequences_B, strict=True)
        ]
        return Proposal(torch.tensor(drafted), list(budgets_B))

    def width(self, gamma: int) -> int:
        return gamma

    def observe(self, observation: Observation) -> None: ...

    def rollback(self, lengths_B: Sequence[int]) -> None: ...

    def select(self, rows: Sequence[int]) -> None:
        self.truths = [self.truths[row] for row in rows]

    def time_step(self, frontier: int = 1) -> None: ...


class OracleTree(Oracle):
    """Oracle that proposes a tree with two nodes at each depth: a wrong leaf, then the right token.

    If `wrong`, both are wrong.
    """

    capabilities = Capabilities(shape="tree", steps="round")

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: TokenChooser,
    ) -> Proposal:
        width = max(budgets_B)
        tokens, parents = [], []
        for truth, sequence in zip(self.truths, sequences_B, strict=True):
            right = self.draft(truth, len(sequence), width)
            tokens.append([token for r in right for token in ((r + 2) % self.vocab_size, r)])
            parents.append([node for depth in range(width) for node in [2 * depth - 1] * 2])
        return Proposal(
            torch.tensor(tokens), [2 * budget for budget in budgets_B], torch.tensor(parents)
        )

    def width(self, gamma: int) -> int:
        return 2 * gamma


class WrongPool(PhrasePool):
    """Pool whose only phrase is the answer's next `length` tokens, each off by one."""

    def __init__(self, truth: Sequence[int], vocab_size: int, length: int) -> None:
        super().__init__(per_key=1)
        self.truth, self.vocab_size, self.length, self.at = truth, vocab_size, length, 0

    def read(self, sequence: Sequence[int], start: int, length: int) -> None:
        self.at = len(sequence)

    def newest(self, first: int, count: int) -> list[Phrase]:
        return [
            tuple(
                (token + 1) % self.vocab_size
                for token in self.truth[self.at : self.at + self.length]
            )
        ]


class WrongLookahead(Lookahead):
    """Lookahead with a `WrongPool` per row, so that it is never right.

    Its own pools would learn the target's phrases.
    """

    def __init__(self, answers: Sequence[Sequence[int]], vocab_size: int) -> None:
        super().__init__()
        self.answers, self.vocab_size = answers, vocab_size

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int
    ) -> None:
        super().open(prompts_B, prefill_hidden_BNC, capacity)
        self.pools = [
            WrongPool([*prompt, *answer], self.vocab_size, self.ngram - 1)
            for prompt, answer in zip(prompts_B, self.answers, strict=True)
        ]


class Foresight:
    """A draft model whose mask tokens predict as if they were the likeliest tokens.

    It is what training for parallel drafting aims at. The mask token is an additional id, and
    larger ids are mask tokens too. The other methods are those of the model.
    """

    def __init__(self, model: Any) -> None:
        self._model, self.mask_token = model, model.vocab_size
        self.vocab_size = model.vocab_size + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        tokens_BN = tokens_BN.clone()
        B, N = tokens_BN.shape
        rows_B, above_BN = torch.arange(B, device=tokens_BN.device), parents_BN
        if above_BN is None:
            above_BN = torch.arange(-1, N - 1, device=tokens_BN.device).expand(B, N)
        for n in range(1, N):
            before = None if parents_BN is None else parents_BN[:, :n]
            logits_BNV = self._model.forward(tokens_BN[:, :n], before)[0]
            best_B = logits_BNV[rows_B, above_BN[:, n]].argmax(-1)
            masked_B = tokens_BN[:, n] >= self.mask_token  # no branch, as the host must not wait
            tokens_BN[:, n] = torch.where(masked_B, best_B, tokens_BN[:, n])
        found: tuple[Tensor, Tensor] = self._model.forward(tokens_BN, parents_BN, taps)
        return found

"""Held-out acceptance of a parallel chain, walked on the target's answers as decoding drafts them.

Every tip of an answer is an anchor with mask tokens of all depths, so one forward gives the drafts
of all rounds that could begin there. As depths do not read each other's tokens, the probability
that k tokens are accepted is the product of the depths' chances (training/held_out/rounds.py).

Shapes: A answers, T tips of the longest answer, K drafted tokens, N supervised tokens of a batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from distill.acceptance import AcceptanceSums, HeldOutAcceptance
from distill.parallel_drafting.layout import lay_out
from training.data.packing import Sample
from training.held_out.rounds import Rounds, walk
from training.held_out.speedup import SpeedupPrediction

BLOCK_EFFICIENCY = "block_efficiency"


class HeldOutParallel(HeldOutAcceptance):
    """Callable that scores a parallel chain of the student's current weights."""

    def __init__(
        self,
        student: Any,
        teacher: Any,
        answers: Sequence[Sample],
        max_length: int,
        temperature: float,
        prediction: SpeedupPrediction | None = None,
        *,
        tokens: int,
        mask_token: int,
        max_new_tokens: int,
    ) -> None:
        """Prepare as `HeldOutAcceptance` does.

        tokens: draft length. mask_token: its id. max_new_tokens: the limit at which answers were
        cut off.
        """
        super().__init__(student, teacher, answers, max_length, temperature, prediction)
        self.tokens, self.mask_token = tokens, mask_token
        self.max_new_tokens = max_new_tokens

    def __call__(self) -> dict[str, float]:
        """Return the figures of the first token, of the chain, and `score`.

        Of the chain these are `block_efficiency` at the full draft length, and `acceptance/depthK`
        from depth 1 on: accepted over tested tokens. The score is the predicted speedup if there is
        a prediction, and else the block efficiency.
        """
        totals, survival_ATK = self.evaluate_chain()
        rounds = self.walk(survival_ATK)
        accepted_K, tested_K = rounds.accepted_AK.sum(0), rounds.tested_AK.sum(0)
        shares_K = accepted_K / np.maximum(tested_K, 1e-9)
        figures = self.first_token_figures(totals) | {BLOCK_EFFICIENCY: rounds.block_efficiency}
        figures |= {f"acceptance/depth{d}": float(shares_K[d]) for d in range(1, self.tokens)}
        if self.prediction is None:
            return figures | {"score": rounds.block_efficiency}
        return figures | self.prediction.figures(survival_ATK, self.lengths)

    def walk(self, survival_ATK: np.ndarray) -> Rounds:
        """Return the expected rounds at the full draft length."""
        return walk(survival_ATK, self.lengths, self.tokens, self.max_new_tokens)

    @torch.no_grad()
    def evaluate_chain(self) -> tuple[AcceptanceSums, np.ndarray]:
        """Return the sums over first tokens, and the survival [A, T, K] of the chains."""
        totals, survival = torch.zeros(6, dtype=torch.float64), []
        for number, batch in enumerate(self.batches):
            layout = lay_out(batch, self.tokens, self.mask_token)
            states_MH, teacher_NG = layout.states(self.student), self.teacher_states(number)
            next_N = batch.at_supervised(batch.next_RT)
            chances_NK = torch.zeros(len(next_N), self.tokens, dtype=torch.float64)
            for depth in range(self.tokens):
                at = (layout.depths_M == depth).nonzero()[:, 0]
                tokens = layout.tokens_M[at]
                sums, chances = self._overlap(states_MH[at], teacher_NG[tokens], next_N[tokens])
                chances_NK[tokens.cpu() - depth, depth] = chances.double().cpu()
                totals += sums if depth == 0 else 0
            survival.append(chances_NK.cumprod(1))
        answers = torch.cat(survival).split(self.lengths)
        padded_ATK = pad_sequence(list(answers), batch_first=True)
        return AcceptanceSums(*totals.tolist()), padded_ATK.numpy()

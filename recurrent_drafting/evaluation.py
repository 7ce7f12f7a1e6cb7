"""How good the head is, while it trains: what it would have accepted on the target's own answers,
and how often each head is right.

`GreedyChain` needs no decoding. The target's answers are fixed, and drafting is greedy, so what a
round accepts follows from where it begins: the head drafts at every position of the answers at
once, and the rounds are walked through afterwards. On greedy answers these are the rounds of real
decoding with one beam, the first of which begins at the prompt's last token. On drawn answers they
rank checkpoints and are no decoder's.

A look is anything callable that gives figures; the `score` of the last one that gives one chooses
the checkpoint.

Shapes: M drafts of a batch, T tokens of an answer with its prompt, F of a batch's one row, H the
target's hidden size, K drafted tokens or heads, N predictions, C of a chunk, E the head's width.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import devices
from recurrent_drafting.head import RecurrentHead
from recurrent_drafting.objective import likeliest, predictions
from training.data.packing import Batch, Sample
from training.features.states import TargetStates
from training.heads.evaluation import _Fixed, _prompt, walk
from training.heads.positions import Positions
from training.losses.chunked import CHUNK


class GreedyChain:
    """Acceptance and block efficiency of a greedy chain on the target's answers."""

    def __init__(
        self,
        head: RecurrentHead,
        states: TargetStates,
        answers: Sequence[Sample],
        draft_tokens: int,
        max_new_tokens: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        """answers: prompts with the target's answers, which alone are supervised. max_new_tokens:
        what ended an answer of that length.
        """
        self.head, self.states, self.answers = head, states, answers
        self.draft_tokens, self.max_new_tokens = draft_tokens, max_new_tokens
        self._fixed = _Fixed(states, answers, 1, max_length, device)

    def __call__(self) -> dict[str, float]:
        """`acceptance` (accepted / tested draft tokens), `block_efficiency` (tokens a target
        forward, the bonus included), and `score`.
        """
        rounds, emitted, accepted, tested = map(sum, zip(*self.counts(), strict=True))
        efficiency = emitted / max(1, rounds)
        return {
            "acceptance": accepted / max(1, tested),
            "block_efficiency": efficiency,
            "score": efficiency,
        }

    def counts(self) -> list[tuple[int, int, int, int]]:
        """(rounds, emitted, accepted, tested) of every answer, in their order."""
        found: dict[int, tuple[int, int, int, int]] = {}
        for number, (batch, where) in enumerate(self._fixed.batches):
            row = batch.rows[0]
            ends = np.cumsum([len(self.answers[index].ids) for index in row]).tolist()
            begins = [0, *ends[:-1]]
            alone = [
                begin
                for begin, index in zip(begins, row, strict=True)
                if _prompt(self.answers[index]) == 1
            ]
            matches_F = self._matches(batch, where, self._fixed.hidden(number), alone)
            for begin, end, index in zip(begins, ends, row, strict=True):
                prompt = _prompt(self.answers[index])
                limit = prompt + self.max_new_tokens
                found[index] = walk(matches_F[begin:end], prompt, self.draft_tokens, limit)
        return [found[index] for index in range(len(self.answers))]

    @torch.no_grad()
    def _matches(
        self, batch: Batch, where: Positions, hidden_PH: Tensor, alone: list[int]
    ) -> np.ndarray:
        """For a draft behind each token of the one row that a round may begin at, how many of its
        tokens stand there in the text.

        alone: tokens that are a whole prompt. No hidden state stands before them, and a drafter
        takes zeros.
        """
        ids_F = F.pad(batch.ids_RT[0], (0, self.draft_tokens), value=-1)
        tips_M = torch.cat(
            (where.kept_P[where.drafts_M] + 1, devices.tensor(alone, batch.device, torch.long))
        )
        before_MH = torch.cat(
            (hidden_PH[where.drafts_M], hidden_PH.new_zeros(len(alone), hidden_PH.shape[1]))
        )
        context, state_MH = (
            self.head.context(before_MH),
            self.head.start(self.states.embed(ids_F[tips_M])),
        )
        going_M = torch.ones_like(tips_M, dtype=torch.bool)
        matches_M = torch.zeros_like(tips_M)
        for number in range(self.draft_tokens):
            drafted_M = likeliest(self.head, context, state_MH)
            going_M = going_M & (drafted_M == ids_F[tips_M + 1 + number])
            matches_M += going_M
            if number + 1 < self.draft_tokens:
                state_MH = self.head.advance(state_MH, self.states.embed(drafted_M))
        matches_F = np.zeros(batch.ids_RT.shape[1], dtype=np.int64)
        tips, matches = devices.read(tips_M, matches_M)
        matches_F[tips] = matches
        return matches_F


class HeadAccuracy:
    """Share of the predictions of each head whose token is among the k likeliest, k = 1 .. top_k,
    given the true tokens before it.

    Teacher-forced, as published: `accuracy/redrafter{i}_top{k}` compares heads with published ones
    and is no acceptance rate.
    """

    def __init__(
        self,
        head: RecurrentHead,
        states: TargetStates,
        samples: Sequence[Sample],
        heads: int,
        top_k: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        self.head, self.states, self.heads, self.top_k = head, states, heads, top_k
        self._fixed = _Fixed(states, samples, heads, max_length, device)

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        right_Kk = torch.zeros(self.heads, self.top_k, device=self.head.output.device)
        counts_K = torch.zeros(self.heads)
        for number, (_, where) in enumerate(self._fixed.batches):
            features_NE = predictions(self.head, self.states, self._fixed.hidden(number), where)
            for start in range(0, len(features_NE), CHUNK):
                one = slice(start, start + CHUNK)
                right_Kk += self._right(features_NE[one], where.labels_N[one], where.head_N[one])
            counts_K += torch.tensor(where.counts_K)
        shares_Kk = right_Kk.cpu() / counts_K.clamp_min(1)[:, None]
        return {
            f"accuracy/redrafter{i}_top{k + 1}": float(shares_Kk[i, k])
            for i in range(self.heads)
            for k in range(self.top_k)
        }

    def _right(self, features_CE: Tensor, labels_C: Tensor, head_C: Tensor) -> Tensor:
        """[K, k]: right ones of a chunk by head and by how many guesses there are."""
        best_Ck = self.head.to_target_ids(
            self.head.logits(features_CE).topk(self.top_k, dim=-1).indices
        )
        right_Ck = (best_Ck == labels_C[:, None]).cumsum(dim=-1).float()
        of_head_CK = (head_C[:, None] == torch.arange(self.heads, device=head_C.device)).float()
        return of_head_CK.T @ right_Ck

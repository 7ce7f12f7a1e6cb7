"""How good the head is, while it trains: what it would have accepted on the target's own answers, and how often each head is right.

`GreedyChain` needs no decoding. The target's answers are fixed, and drafting is greedy, so what a round accepts follows from where it begins:
the head drafts at every position of the answers at once, and the rounds are walked through afterwards. For greedy answers, and for answers drawn
under coupled verification, block efficiency of a chain of one beam is exactly that of real decoding.

A look is anything callable that gives figures; the `score` of the last one that gives one chooses the checkpoint.

Shapes: M drafts of a batch, K drafted tokens or heads, N predictions, C of a chunk, E the head's width.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recurrent_drafting.head import RecurrentHead
from recurrent_drafting.objective import likeliest, predictions
from recurrent_drafting.positions import Positions, positions
from recurrent_drafting.states import TargetStates
from training.losses.chunked import CHUNK
from training.packing import Batch, Sample, best_fit, collate

Look = Callable[[], dict[str, float]]


class Looks:
    """Several looks as one: their figures together."""

    def __init__(self, looks: Sequence[Look]) -> None:
        self.looks = looks

    def __call__(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for look in self.looks:
            figures |= look()
        return figures


class _Fixed:
    """Batches of one row, their positions, and the target's states there, made once: neither changes while a head trains."""

    def __init__(
        self, states: TargetStates, samples: Sequence[Sample], heads: int, max_length: int, device: torch.device
    ) -> None:
        self._states = states
        rows = best_fit([len(sample.ids) for sample in samples], max_length)
        batches = [collate(samples, [row], max_length, device) for row in rows]
        self.batches = [(batch, positions(batch, heads, judged=False)) for batch in batches]
        self._hidden: list[Tensor] = []

    def hidden(self, number: int) -> Tensor:
        """The target's states of batch `number` at its kept positions."""
        if number == len(self._hidden):
            self._hidden.append(self._states.read(*self.batches[number]))
        return self._hidden[number]


class GreedyChain:
    """Acceptance and block efficiency of a greedy chain on the target's answers."""

    def __init__(
        self,
        head: RecurrentHead,
        states: TargetStates,
        answers: Sequence[Sample],
        draft_tokens: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        """answers: prompts with the target's answers, which alone are supervised."""
        self.head, self.states, self.answers, self.draft_tokens = head, states, answers, draft_tokens
        self._fixed = _Fixed(states, answers, 1, max_length, device)

    def __call__(self) -> dict[str, float]:
        """`acceptance` (accepted / tested draft tokens), `block_efficiency` (tokens a target forward, the bonus included), and `score`."""
        rounds, emitted, accepted, tested = map(sum, zip(*self.counts(), strict=True))
        efficiency = emitted / max(1, rounds)
        return {"acceptance": accepted / max(1, tested), "block_efficiency": efficiency, "score": efficiency}

    def counts(self) -> list[tuple[int, int, int, int]]:
        """(rounds, emitted, accepted, tested) of every answer, in their order."""
        found: dict[int, tuple[int, int, int, int]] = {}
        for number, (batch, where) in enumerate(self._fixed.batches):
            matches_F = self._matches(batch, where, self._fixed.hidden(number))
            begin = 0
            for index in batch.rows[0]:
                sample = self.answers[index]
                found[index] = walk(matches_F[begin : begin + len(sample.ids)], sample.mask, self.draft_tokens)
                begin += len(sample.ids)
        return [found[index] for index in range(len(self.answers))]

    @torch.no_grad()
    def _matches(self, batch: Batch, where: Positions, hidden_PH: Tensor) -> np.ndarray:
        """For a draft that begins at each position of the one row, how many of its tokens stand there in the text."""
        length = batch.ids_RT.shape[1]
        context = self.head.context(hidden_PH[where.drafts_M])
        state_MH = self.head.start(self.states.embed(where.tokens_MK[:, 0]))
        ids_F, place_M = F.pad(batch.ids_RT[0], (0, self.draft_tokens + 1), value=-1), where.kept_P[where.drafts_M]
        going_M = torch.ones_like(place_M, dtype=torch.bool)
        matches_M = torch.zeros_like(place_M)
        for number in range(self.draft_tokens):
            drafted_M = likeliest(self.head, context, state_MH)
            going_M = going_M & (drafted_M == ids_F[place_M + 2 + number])
            matches_M += going_M
            if number + 1 < self.draft_tokens:
                state_MH = self.head.advance(state_MH, self.states.embed(drafted_M))
        matches_F = np.zeros(length, dtype=np.int64)
        matches_F[place_M.cpu().numpy()] = matches_M.cpu().numpy()
        return matches_F


def walk(matches_T: np.ndarray, answer_T: np.ndarray, draft_tokens: int) -> tuple[int, int, int, int]:
    """(rounds, emitted, accepted, tested) of decoding one answer, whose first token comes from the prefill.

    matches_T: tokens that a draft begun at a position has right; answer_T: bool, true from the answer's first token to the text's end.
    """
    rounds = emitted = accepted = tested = 0
    tip, last = int(np.argmax(answer_T)), len(answer_T) - 1
    while tip < last:
        room = min(draft_tokens, last - tip)
        right = min(int(matches_T[tip - 1]), room)
        gained = min(right + 1, last - tip)
        rounds, emitted, accepted, tested = (
            rounds + 1,
            emitted + gained,
            accepted + right,
            tested + min(right + 1, room),
        )
        tip += gained
    return rounds, emitted, accepted, tested


class HeadAccuracy:
    """Share of the predictions of each head whose token is among the k likeliest, k = 1 .. top_k, given the true tokens before it.

    Teacher-forced, as published: `accuracy/redrafter{i}_top{k}` compares heads with published ones and is no acceptance rate.
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
        best_Ck = self.head.to_target_ids(self.head.logits(features_CE).topk(self.top_k, dim=-1).indices)
        right_Ck = (best_Ck == labels_C[:, None]).cumsum(dim=-1).float()
        of_head_CK = (head_C[:, None] == torch.arange(self.heads, device=head_C.device)).float()
        return of_head_CK.T @ right_Ck

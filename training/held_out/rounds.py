"""Rounds of speculative decoding with a chain, walked on the target's answers without decoding.

Under greedy decoding a draft is accepted exactly as long as it equals the answer. Under sampling
with token verification, a drafted position emits the token x with probability p(x), and it does so
by accepting a draft with probability min(p(x), q(x)). So given the answer, its token at a drafted
position was an accepted draft with probability min(1, q(x) / p(x)), independently of the other
positions (Leviathan et al. 2023, arXiv 2211.17192, section 2.3). The expected counts of rounds and
tokens are therefore exact for both on the answers; only the choice of prompts and, under sampling,
of the answers is a sample.

Shapes: A answers, T tips of the longest answer (tip t is the token before the answer's token t), K
drafted tokens, R possible numbers of accepted tokens in a round.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Rounds:
    """Expected numbers of rounds and of tokens of every answer, counted as in decoding."""

    rounds_A: np.ndarray
    emitted_A: np.ndarray
    # by depth
    accepted_AK: np.ndarray
    tested_AK: np.ndarray

    @property
    def acceptance(self) -> float:
        """Accepted over tested draft tokens."""
        return float(self.accepted_AK.sum() / max(1, self.tested_AK.sum()))

    def acceptance_by_depth(self, name: str) -> dict[str, float]:
        """Return `name/k`, the accepted over the tested draft tokens at each tested depth k."""
        tested_K, accepted_K = self.tested_AK.sum(axis=0), self.accepted_AK.sum(axis=0)
        pairs = enumerate(zip(accepted_K, tested_K, strict=True), start=1)
        return {
            f"{name}/{k}": float(accepted / tested) for k, (accepted, tested) in pairs if tested
        }

    @property
    def block_efficiency(self) -> float:
        """Tokens per target forward, the bonus included."""
        return float(self.emitted_A.sum() / max(1, self.rounds_A.sum()))


def chain_survival(chances: Sequence[Tensor], draft_tokens: int) -> np.ndarray:
    """Return survival_ATK, the probability that the first k + 1 tokens of a draft are accepted.

    chances: for each answer, the probability that a draft of each of its tokens is accepted.
    """
    chances_AT = pad_sequence(list(chances), batch_first=True).double()
    missing = chances_AT.new_zeros(len(chances_AT), draft_tokens - 1)
    ahead_ATK = torch.cat((chances_AT, missing), dim=1).unfold(1, draft_tokens, 1)
    return ahead_ATK.cumprod(dim=2).cpu().numpy()


def match_survival(matches: Sequence[np.ndarray], draft_tokens: int) -> np.ndarray:
    """Return survival_ATK, which is 0 or 1, of greedy drafts.

    matches: for each answer, the number of correct drafted tokens after each tip.
    """
    lengths = pad_sequence([torch.from_numpy(one) for one in matches], batch_first=True).numpy()
    return (lengths[:, :, None] > np.arange(draft_tokens)).astype(np.float64)


def walk(
    survival_ATK: np.ndarray, lengths_A: Sequence[int], draft_tokens: int, max_new_tokens: int
) -> Rounds:
    """Return the expected rounds that emit every answer, at a fixed draft length.

    survival_ATK: probability that the first k + 1 tokens drafted after tip t are accepted.
    lengths_A: tokens of each answer. draft_tokens: the draft length, at most K. max_new_tokens: the
    limit at which answers were cut off; no round drafts the last token before it.
    """
    lengths = np.asarray(lengths_A)
    A, longest = len(lengths), int(lengths.max(initial=0))
    starts_AT = np.zeros((A, longest + draft_tokens + 1))  # probability that a round starts at t
    starts_AT[:, 0] = 1.0
    rounds_A = np.zeros(A)
    accepted_AK, tested_AK = np.zeros((A, draft_tokens)), np.zeros((A, draft_tokens))
    for t in range(longest):
        begun_A1 = (starts_AT[:, t] * (t < lengths))[:, None]
        room = max(0, min(draft_tokens, max_new_tokens - t - 1))
        # at least 0, 1, .. room drafted tokens are accepted; then exactly so many
        reached_AR = np.concatenate((np.ones((A, 1)), survival_ATK[:, t, :room]), axis=1)
        exactly_AR = reached_AR - np.pad(reached_AR[:, 1:], ((0, 0), (0, 1)))
        starts_AT[:, t + 1 : t + room + 2] += begun_A1 * exactly_AR
        # tokens after the end of an answer are neither accepted nor tested
        counted_AK = begun_A1 * (np.arange(room) < (lengths - t)[:, None])
        tested_AK[:, :room] += counted_AK * reached_AR[:, :-1]
        accepted_AK[:, :room] += counted_AK * reached_AR[:, 1:]
        rounds_A += begun_A1[:, 0]
    return Rounds(rounds_A, lengths.astype(np.float64), accepted_AK, tested_AK)

"""Children sampled without replacement from the drafter's distribution, tested by p / q.

Recursive rejection (decoding/verification/rules.py) keeps the target's distribution at a node under
two conditions. First, given everything that the verifier has read before, the node's children are
x_1 ~ q, then x_2 ~ q without x_1, and so on, tested in this order. Second, whether there is a j-th
child does not depend on its token.

Proof. Let x_1 .. x_(j-1) be rejected, and x_j ~ q_j. Accept x_j with probability min(1, p_j / q_j),
and otherwise continue with p_(j+1) = norm(max(p_j - q_j, 0)). If the continuation emits a token
from p_(j+1), by a test of the next child or, without one, by sampling, then p_j is emitted. By
induction from the last child back, p_1 = p is emitted.

So the number of children of a node is settled before they are sampled, from the levels above and
the drafter's distribution, and every sampled child is tested. The choice of nodes to expand may
read their tokens, which carry no information about the tokens of their children. Any choice among
children by their tokens breaks the law: dropping unlikely ones, testing the likeliest first,
keeping the best nodes of a finished tree. The last is wrong even by the chances before sampling: an
unlikely child leaves room to expand another node, whose children may then displace it, and likely
children would be tested more often. One sample must not serve two nodes either, as the presence of
the second node may depend on the first one's child.

The chance of a child is that it is tested and accepted (decoding/stopping/planner.py).

All children are sampled from the complete vocabulary. If many tokens are likely, sampling from the
64 likeliest alone loses a third of the accepted tokens.

To avoid numbers for every token after every rejection, the unlikely tokens can be one symbol, the
*tail*, beside the candidates (`TopRows`). By the proof, the emitted symbol has the target's
distribution over symbols; if it is the tail, the right token must still be emitted. If the tail
remains after all rejections, a token is sampled from p restricted to the tail. If a sampled tail is
accepted, its token t, sampled from q restricted to the tail with unused noise, is accepted with
probability min(1, p(t) / q(t)), both as shares of their tails; otherwise a token is sampled from
max(p - q, 0) over the tail. Neither test reads t before, so nodes may be expanded and budgets set
as if it were unknown. One uniform serves both tests: below the first chance it is as good as new.

Shapes: B rows, P nodes, K children of a node, R rows of probabilities, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.errors import UserError
from decoding.interfaces import Chooser
from decoding.stopping.planner import chance_of, sibling_chance

KINDS = ("top_k", "sampled")


def check_kind(children: str, drafter: str) -> str:
    """Return `children`. Raises UserError if it is not in KINDS; drafter: name in the message."""
    if children not in KINDS:
        raise UserError(
            f"drafter '{drafter}': children is '{children}', expected {' or '.join(KINDS)}."
        )
    return children


def are_sampled(children: str, chooser: Chooser) -> bool:
    """Return whether a round samples children.

    Greedy decoding and the coupled rule use the top k in any case.
    """
    return children == "sampled" and chooser.tests_q


@dataclass(frozen=True, slots=True)
class Siblings:
    """Estimated chances of a node's K children, in the order of their tests.

    The later children's chances are constant; the first child's chance is an argument.
    """

    passes_K: Tensor  # chance of acceptance in a test; 0 for the first child
    rest_K: Tensor  # chance of a test after the first child is rejected; 0 for the first child
    first_K: Tensor  # 1 for the first child, else 0

    @classmethod
    def of(cls, count: int, like: Tensor) -> "Siblings":
        """Return the chances of `count` children in the dtype and on the device of `like`."""
        places_K = torch.arange(count, dtype=like.dtype, device=like.device)
        later_K = (places_K > 0).to(like.dtype)
        passes_K = sibling_chance(places_K) * later_K
        rest_K = (1 - passes_K).cumprod(0) / (1 - passes_K) * later_K
        return cls(passes_K, rest_K, 1 - later_K)

    def tested(self, first_BP1: Tensor) -> Tensor:
        """Return the chances (B, P, K) that children are tested.

        first_BP1: the chance that the first child is accepted in its test.
        """
        return torch.addcmul(self.first_K, 1 - first_BP1, self.rest_K)

    def passing(self, first_BPX: Tensor) -> Tensor:
        """Return the chances (B, P, K) that children are accepted if they are tested.

        first_BPX: the first child's chance, X = 1 or K (only column 0 is read).
        """
        return torch.addcmul(self.passes_K, first_BPX, self.first_K)


class ChildSampler:
    """Sampler of one round's children.

    The drafter's distributions are numbered: 0 is the tip's, the others follow in the order in
    which they were added.
    """

    def __init__(self, chooser: Chooser, logits_BV: Tensor, levels: int) -> None:
        """Start with the distributions of the logits after the tips."""
        self.chooser, self.levels = chooser, levels
        self._q_BRV = chooser.warper.probs(logits_BV[:, None])

    def add(self, logits_BPV: Tensor) -> None:
        """Add the distributions after P more nodes."""
        self._q_BRV = torch.cat((self._q_BRV, self.chooser.warper.probs(logits_BPV)), 1)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the probabilities."""
        return self._q_BRV.dtype

    def tips(self) -> Tensor:
        """Return the numbers (B, 1) of the tips' distributions."""
        return torch.zeros(len(self._q_BRV), 1, dtype=torch.long, device=self._q_BRV.device)

    def q(self, rows_BP: Tensor) -> Tensor:
        """Return the distributions (B, P, V) with these numbers."""
        if rows_BP.shape[1] == self._q_BRV.shape[1] == 1:
            return self._q_BRV
        B, _, V = self._q_BRV.shape
        return self._q_BRV.gather(1, rows_BP[:, :, None].expand(B, -1, V))

    def sample(
        self, q_BPV: Tensor, count: int, level: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Sample at most `count` children of P nodes; return tokens and probabilities (B, P, K).

        first: number of the first of these nodes, which is part of the key of their noise. If fewer
        distinct tokens were sampled, the last children have probability 0
        (decoding.sampling.token_chooser.draw_different).
        """
        return self.chooser.draw_children(q_BPV, min(count, q_BPV.shape[2]), level, first)


def child_chances(q_BPV: Tensor, probs_BPK: Tensor) -> tuple[Tensor, Tensor]:
    """Return log chances (B, P, K) that children are tested and accepted, given their node is.

    Returns two estimates: one from the distributions q alone, which is known before the children
    are sampled, and one that also uses the children's probabilities `probs_BPK`. Both are -inf
    where no token was left to sample.
    """
    mean_BP1 = chance_of(q_BPV.square().sum(-1, keepdim=True))
    siblings, is_missing_BPK = Siblings.of(probs_BPK.shape[2], probs_BPK), probs_BPK <= 0
    tested_BPK = siblings.tested(mean_BP1)
    before_BPK, after_BPK = (
        (tested_BPK * siblings.passing(first)).log().masked_fill(is_missing_BPK, float("-inf"))
        for first in (mean_BP1, chance_of(probs_BPK))
    )
    return before_BPK, after_BPK

"""Children that are drawn without replacement from what a drafter says, so that they are tested by
p / q and not as point masses.

Recursive rejection (decoding/verification/rules.py) keeps the target's distribution at a node if,
given all that the verifier has looked at before, the node's children are x_1 ~ q, then x_2 ~ q
without x_1, and so on in that order, and if whether there is a j-th child does not depend on which
token it would be. Proof: while x_1 .. x_(j-1) have failed, x_j ~ q_j, so accepting it with
probability min(1, p_j / q_j) and going on with p_(j+1) = norm(max(p_j - q_j, 0)) emits p_j,
whichever way p_(j+1) is then met: by a test of the next child, or by a draw where there is none. By
induction from the last child back, p_1 = p is emitted.

So how many children a node gets is decided before they are drawn, from the levels above it and what
the drafter says there, and every child that is drawn is tested. Which of the drawn nodes are
expanded may depend on their tokens, as that says nothing of the tokens of their own children. What
breaks the law is any choice among children that looks at them: leaving out the unlikely ones,
testing the likeliest first, taking the best nodes of the finished tree. The last would be wrong by
what nodes were worth before they were drawn, too: an unlikely child leaves room in its level for
another node's expansion, whose children may then be worth more than it and push it out, so that it
is tested more often if it is likely. And a draw must not serve two nodes: that the second one is
there may depend on what the first one's child is.

The j-th child of a node is worth the chance that it is reached and passes. A first child with
probability q(x) passes by a chance that is taken for 0.55 + 0.4 q(x), before it is drawn for the
mean of this. A later one, tested on what the failed ones left, passes rarely, whatever its own
probability: the j-th by 0.15 / (j - 1). These are rates of a head of chat24m at temperature 1
(docs/experiments/2026-11-23-acceptance-of-sampled-children.md).

All draw from the whole vocabulary: where many tokens are likely, leaving out all but the 64
likeliest has cost a third of the accepted tokens.

That takes numbers for every token after every failure, unless the unlikely tokens, the *tail*, are
one symbol among the candidates (`TopRows`). By the proof above the symbol that is emitted then has
the target's distribution over symbols, and it is left to emit the right token where that symbol is
the tail. If the tail is what the failed children left, a token is drawn from what p has there. If
the tail was drawn and passed, its token t was drawn from what q has there, by a number that nothing
else has used; it passes with probability min(1, p(t) / q(t)), both as shares of their tails, and if
it does not, a token is drawn from max(p - q, 0) over the tail: the usual test of one drawn token.
Neither test looks at t before; so nodes may be expanded and budgets set as if it were unknown. One
uniform does for both: below the first chance it is as good as a new one.

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
    """Return `children`, how a drafter's tree gets its children. Raises UserError for an unknown
    way.
    """
    if children not in KINDS:
        raise UserError(
            f"drafter '{drafter}': children is '{children}', expected {' or '.join(KINDS)}."
        )
    return children


def are_sampled(children: str, chooser: Chooser) -> bool:
    """Return whether children are sampled: greedy decoding and the coupled rule take the top k
    whatever `children` is.
    """
    return children == "sampled" and chooser.tests_q


@dataclass(frozen=True, slots=True)
class Siblings:
    """Of K children of a node: the chances of the later ones, whatever their probabilities are. The
    first has none of its own here.
    """

    passes_K: Tensor  # where it is tested; 0 of the first
    rest_K: Tensor  # to be tested, where the first has failed; 0 of the first
    first_K: Tensor  # 1 of the first

    @classmethod
    def of(cls, count: int, like: Tensor) -> "Siblings":
        """In the dtype and on the device of `like`."""
        later = torch.arange(count) > 0
        chances = [0.0, *(sibling_chance(place) for place in range(1, count))]
        passes_K = torch.tensor(chances[:count], dtype=torch.float64)
        rest_K = torch.cat((torch.ones(1), (1 - passes_K).cumprod(0)))[:count].where(later, 0.0)
        return cls(*(each.to(like) for each in (passes_K, rest_K, (~later).double())))

    def tested(self, first_BP1: Tensor) -> Tensor:
        """(B, P, K): the chance to come to be tested, if the first passes by `first_BP1`."""
        return torch.addcmul(self.first_K, 1 - first_BP1, self.rest_K)

    def passing(self, first_BPX: Tensor) -> Tensor:
        """(B, P, K): the chance to pass where it is tested, if the first passes by `first_BPX` (X =
        1 or K, of which the first is read).
        """
        return torch.addcmul(self.passes_K, first_BPX, self.first_K)


class ChildSampler:
    """The draws of one round. The drafter's distributions are numbered: 0 is behind the tip, the
    others in the order they were added.
    """

    def __init__(self, chooser: Chooser, logits_BV: Tensor, levels: int) -> None:
        """logits_BV: behind the tips."""
        self.chooser, self.levels = chooser, levels
        self._q_BRV = chooser.warper.probs(logits_BV[:, None])

    def add(self, logits_BPV: Tensor) -> None:
        """The model has said what may follow P more nodes."""
        self._q_BRV = torch.cat((self._q_BRV, self.chooser.warper.probs(logits_BPV)), 1)

    @property
    def dtype(self) -> torch.dtype:
        """Of probabilities."""
        return self._q_BRV.dtype

    def tips(self) -> Tensor:
        """The numbers (B, 1) of the distributions behind the tips."""
        return torch.zeros(len(self._q_BRV), 1, dtype=torch.long, device=self._q_BRV.device)

    def q(self, rows_BP: Tensor) -> Tensor:
        """The distributions (B, P, V) with these numbers."""
        if rows_BP.shape[1] == self._q_BRV.shape[1] == 1:
            return self._q_BRV
        return self._q_BRV.gather(
            1, rows_BP[:, :, None].expand(len(self._q_BRV), -1, self._q_BRV.shape[2])
        )

    def children(
        self, q_BPV: Tensor, count: int, level: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Tokens and probabilities (B, P, K) of at most `count` children of P nodes, in the order
        of their draws.

        first: the number of the level's first node, which keys its draws. Where fewer were drawn
        the last children are fillers, of probability 0 (`sampling.draw_different`).
        """
        return self.chooser.draw_children(q_BPV, min(count, q_BPV.shape[2]), level, first)


def child_chances(q_BPV: Tensor, drawn_BPK: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms (B, P, K), given that the node is reached, of what each child is worth before it
    is drawn, and of the chance that it passes once its probability `drawn_BPK` is known; both
    include that its earlier siblings fail. -inf where there is no token left to draw.
    """
    mean_BP1 = chance_of(q_BPV.square().sum(-1, keepdim=True))
    siblings, none_BPK = Siblings.of(drawn_BPK.shape[2], drawn_BPK), drawn_BPK <= 0
    tested_BPK = siblings.tested(mean_BP1)
    worth_BPK = (tested_BPK * siblings.passing(mean_BP1)).log()
    reached_BPK = (tested_BPK * siblings.passing(chance_of(drawn_BPK))).log()
    return worth_BPK.masked_fill(none_BPK, float("-inf")), reached_BPK.masked_fill(
        none_BPK, float("-inf")
    )

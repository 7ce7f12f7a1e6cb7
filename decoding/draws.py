"""Children that are drawn without replacement from what a drafter says, so that they are tested by p / q and not as point masses.

Recursive rejection (decoding/verify.py) keeps the target's distribution at a node if, given all that the verifier has looked at before, the
node's children are x_1 ~ q, then x_2 ~ q without x_1, and so on in that order, and if whether there is a j-th child does not hang on which
token it would be. Proof: while x_1 .. x_(j-1) have failed, x_j ~ q_j, so accepting it with probability min(1, p_j / q_j) and going on with
p_(j+1) = norm(max(p_j - q_j, 0)) emits p_j, whichever way p_(j+1) is then met: by a test of the next child, or by a draw where there is none.
By induction from the last child back, p_1 = p is emitted.

So how many children a node gets is decided before they are drawn, from the levels above it and what the drafter says there, and every child
that is drawn is tested. Which of the drawn nodes are expanded may hang on their tokens, as that says nothing of the tokens of their own
children. What breaks the law is any choice among children that looks at them: leaving out the unlikely ones, testing the likeliest first,
taking the best nodes of the finished tree. The last is a trap where worths are not looked at, too: an unlikely child leaves room in its level for
the expansion of another node, whose children may then be worth more than it and push it out, so it stays in the tree more often if it is likely.
A draw that serves two nodes is another: that the second one is there may hang on what the first one's child is.

The j-th child of a node is worth the chance that it is reached and passes. The chance of a child with probability q(x) is taken for
0.3 + 0.65 q(x), that of one not drawn yet for the mean of this.

A node's children are the first of C clocks with the rates q in the order in which they ring (Gumbel top-k: Kool et al. 2019, arXiv 1903.06059,
section 2.3).

Shapes: B rows, L levels, P nodes that a level expands, C candidates, K children of a node, V vocabulary.
"""

import torch
from torch import Tensor

from decoding import cuda, noise
from decoding.chooser import FRESH, Chooser
from decoding.drafter import TopRows
from decoding.errors import UserError

KINDS = ("picked", "drawn")
CANDIDATES = 64  # of a drafter's likeliest tokens that a child is drawn from; q is its distribution over these
LEAST_CHANCE, CHANCE_SLOPE = 0.3, 0.65  # an untried token's chance to pass, by its probability; as `CostRatio.prior`


def check_kind(draws: str, drafter: str) -> str:
    """`draws`, how a drafter's tree gets its children. Raises UserError for what is no way to."""
    if draws not in KINDS:
        raise UserError(f"drafter '{drafter}': draws is '{draws}', expected {' or '.join(KINDS)}.")
    return draws


def are_drawn(draws: str, chooser: Chooser) -> bool:
    """Whether children are drawn: greedy decoding and the coupled rule pick whatever `draws` says."""
    return draws == "drawn" and chooser.rule in FRESH


def clocks(chooser: Chooser, rows: int, levels: int, nodes: int, candidates: int) -> Tensor:
    """Standard exponentials (B, L, `nodes`, `candidates`) that nothing else uses: keys are of (seed, request, round, position, node, candidate)."""
    keys = [[chooser.draft_key(row, level) for level in range(levels)] for row in range(rows)]
    counters_PC = torch.arange(nodes * candidates, device=chooser.device).view(nodes, candidates)
    keys_BL11 = cuda.tensor(keys, chooser.device)[:, :, None, None]
    return noise.exponentials(keys_BL11, noise.scaled_ids(counters_PC))


def chance(q: Tensor) -> Tensor:
    """The chance of a drawn token to pass, before anything was seen, by its probability."""
    return LEAST_CHANCE + CHANCE_SLOPE * q


class Draws:
    """The draws of one round. Rows of candidates are numbered: 0 is the tip's, the others are those of the nodes in the order they were added."""

    def __init__(self, chooser: Chooser, logits_BV: Tensor, levels: int, nodes: int) -> None:
        """logits_BV: behind the tips. nodes: that draw children in a level, at most."""
        self.chooser, self.levels = chooser, levels
        self.candidates = min(CANDIDATES, chooser.vocab_size)
        self._waits_BLPC = clocks(chooser, len(logits_BV), levels, nodes, self.candidates)
        self._ids_BRC, self._q_BRC = self._among(logits_BV[:, None])

    @property
    def dtype(self) -> torch.dtype:
        """Of probabilities."""
        return self._q_BRC.dtype

    def tips(self) -> Tensor:
        """The numbers (B, 1) of the tips' rows."""
        return torch.zeros_like(self._ids_BRC[:, :1, 0])

    def _among(self, logits_BPV: Tensor) -> tuple[Tensor, Tensor]:
        """What children are drawn from: ids and warped probabilities, (B, P, C)."""
        top = logits_BPV.topk(self.candidates, dim=-1)
        return top.indices, self.chooser.warper.probs(top.values)

    def add(self, logits_BPV: Tensor) -> None:
        """The model has said what may follow P more nodes."""
        ids_BPC, q_BPC = self._among(logits_BPV)
        self._ids_BRC, self._q_BRC = torch.cat((self._ids_BRC, ids_BPC), 1), torch.cat((self._q_BRC, q_BPC), 1)

    def rows(self, rows_BP: Tensor | None = None) -> TopRows:
        """The rows with these numbers; None: all of them."""
        if rows_BP is None:
            return TopRows(self._ids_BRC, self._q_BRC)
        index_BPC = rows_BP[:, :, None].expand(len(self._q_BRC), -1, self.candidates)
        return TopRows(self._ids_BRC.gather(1, index_BPC), self._q_BRC.gather(1, index_BPC))

    def children(self, rows: TopRows, count: int, level: int, places_P: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and probabilities (B, P, K) of at most `count` children of P nodes, in the order of their draws.

        places_P: each node's own among the `nodes` of its level. Where fewer tokens have any probability the last children are fillers, of
        probability 0.
        """
        clocks_BPC = rows.probs_BPK / self._waits_BLPC[:, level, places_P]
        order_BPK = clocks_BPC.topk(min(count, self.candidates), dim=-1).indices
        return rows.ids_BPK.gather(2, order_BPK), rows.probs_BPK.gather(2, order_BPK)


def worths(rows: TopRows, drawn_BPK: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms (B, P, K), given that the node is reached, of what each child is worth before it is drawn, and of the chance that it passes
    once its probability `drawn_BPK` is known; both include that its earlier siblings fail. -inf where there is no token left to draw."""
    mean_BP1 = chance(rows.probs_BPK.square().sum(-1, keepdim=True))
    fail_BPK = torch.arange(drawn_BPK.shape[2], device=drawn_BPK.device) * torch.log1p(-mean_BP1)
    none_BPK = drawn_BPK <= 0
    worth_BPK = (fail_BPK + mean_BP1.log()).masked_fill(none_BPK, float("-inf"))
    return worth_BPK, (fail_BPK + chance(drawn_BPK).log()).masked_fill(none_BPK, float("-inf"))

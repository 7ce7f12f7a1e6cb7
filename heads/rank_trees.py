"""Trees of ranks, chosen from the accuracy of each rank at each depth, and from costs.

Medusa's static trees are chosen once, from measured accuracies, and the trees of block drafters in
each round, from the probabilities of their tokens (heads/block/tree.py).

A node is a path of ranks (k_0, ..., k_d): at depth i it takes the token of rank k_i among head i's
predictions. Let a[i][k] be the accuracy of rank k: the share of held-out positions at which head
i's token of that rank is right. If the heads are right independently of each other, the chance that
a node is accepted is the product of the accuracies along its path, and a round emits 1 plus the sum
of these chances in expectation (arXiv 2401.10774, section 2.3.3). Repeatedly adding the likeliest
node gives the best tree of every size, of which the one with the most expected tokens per
millisecond is chosen.

Shapes: K heads, R ranks.
"""

import heapq
from collections.abc import Sequence

from decoding.interfaces import RoundCosts
from decoding.stopping.planner import best_prefix

Path = tuple[int, ...]
MOST_NODES = 64
RANKS = 10  # ranks of a head that a tree may hold


def grow_tree(accuracy_KR: Sequence[Sequence[float]], nodes: int) -> list[tuple[Path, float]]:
    """Return the `nodes` likeliest nodes with their chances of acceptance, likeliest first.

    Parents precede their children; nodes of equal chances are in the order of their paths.
    accuracy_KR: for each head, the accuracies of its R likeliest tokens.
    """
    first = accuracy_KR[0]
    waiting: list[tuple[float, Path]] = [
        (-share, (rank,)) for rank, share in enumerate(first) if share > 0
    ]
    heapq.heapify(waiting)
    chosen: list[tuple[Path, float]] = []
    while waiting and len(chosen) < nodes:
        value, path = heapq.heappop(waiting)
        chosen.append((path, -value))
        if len(path) < len(accuracy_KR):
            for rank, share in enumerate(accuracy_KR[len(path)]):
                if share > 0:
                    heapq.heappush(waiting, (value * share, (*path, rank)))
    return chosen


def choose_tree(
    accuracy_KR: Sequence[Sequence[float]],
    costs: RoundCosts | None,
    most: int = MOST_NODES,
    has_passed: bool = False,
) -> list[Path]:
    """Return the tree with the most expected tokens per millisecond; empty if no draft pays.

    costs: None selects the `most` likeliest nodes. A draft of any tree costs one pass of all heads
    (t_draft_ms), and its nodes are verified in one forward. has_passed: whether the pass has
    already run, so that an empty tree costs it too.
    """
    grown = grow_tree(accuracy_KR, most)
    if costs is None:
        return [path for path, _ in grown]

    def round_ms(nodes: int) -> float:
        drafts = nodes > 0 or has_passed
        return costs.drafted_ms(costs.t_draft_ms, nodes) if drafts else costs.plain_ms

    size, _ = best_prefix((value for _, value in grown), round_ms)
    return [path for path, _ in grown[:size]]


def default_tree(num_heads: int) -> list[Path]:
    """Return a tree for heads without measured accuracies.

    It is a chain of the likeliest tokens, with two alternatives at each depth.
    """
    chain = [(0,) * depth for depth in range(1, num_heads + 1)]
    others = [(0,) * (depth - 1) + (rank,) for depth in range(1, num_heads + 1) for rank in (1, 2)]
    return sorted([*chain, *others], key=lambda path: (len(path), path))

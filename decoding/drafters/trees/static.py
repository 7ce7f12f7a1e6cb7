"""Draft trees of fixed shape, as in Medusa (Cai et al. 2024, arXiv 2401.10774, section 2.3.3).

A node is a path of ranks. Children are sampled (decoding/drafters/trees/sampled_children.py; a
fixed shape does not depend on the samples) or the model's top-k tokens. The model runs over its
tree again at each level, as in decoding/drafters/trees/ranked.py.

Shapes: B rows, P nodes of the deepest level, K children of a node, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decoding import devices
from decoding.drafters.chain import ChainDrafter
from decoding.drafters.trees.sampled_children import ChildSampler, are_sampled, check_kind
from decoding.errors import UserError
from decoding.interfaces import Capabilities, Chooser, Policies, Proposal, Tokens

Path = tuple[int, ...]


class StaticTree(ChainDrafter):
    """A tree of fixed shape. Hydra: `_target_: decoding.drafters.trees.static.StaticTree`.

    choices: nodes as paths of ranks, such as [0], [0, 0], [1]: the likeliest token, the likeliest
    token after it, the second likeliest token. With sampled children, ranks number the samples.
    Missing prefixes of paths are added. The draft length limits the depth. children: `sampled` or
    `top_k`. The other arguments are those of ChainDrafter.
    """

    capabilities = Capabilities(shape="tree")
    DEFAULT = ((0, 0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 2), (1, 1), (2, 0), (3,))

    def __init__(
        self,
        *arguments: Any,
        choices: Sequence[Sequence[int]] = DEFAULT,
        children: str = "sampled",
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self.children = check_kind(children, self.name)
        self.capabilities = Capabilities(shape="tree", has_q=children == "sampled")
        paths = {tuple(path[:end]) for path in choices for end in range(1, len(path) + 1)}
        if not paths or min(min(path) for path in paths) < 0:
            raise UserError(
                f"choices is {list(choices)}, expected paths of ranks >= 0, such as [[0, 0], [1]]."
            )
        self._set_paths(paths)
        self._depth = 1  # of the last proposal

    def _set_paths(self, paths: set[Path]) -> None:
        self.paths = sorted(paths, key=lambda path: (len(path), path))
        self._index = {path: n for n, path in enumerate(self.paths)}
        parents = [path[:-1] for path in self.paths]
        # index among the siblings
        self._place = {path: parents[:n].count(path[:-1]) for n, path in enumerate(self.paths)}

    def width(self, gamma: int) -> int:
        """Return the number of nodes of depth at most gamma."""
        return sum(len(path) <= gamma for path in self.paths)

    def open(self, prompts_B: Tokens, prefill_hidden_BNC: Tensor | None, capacity: int) -> None:
        """Read the prompts, with room in the cache for the tree."""
        super().open(prompts_B, prefill_hidden_BNC, capacity + 1)

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft each row's tree as deep as its budget; rows past this model's context get none."""
        depths_B = self._within_context(sequences_B, budgets_B)
        depth = min(max(depths_B), len(self.paths[-1]))
        if depth == 0:
            return Proposal(torch.empty(len(depths_B), 0, dtype=torch.long), [0] * len(depths_B))
        logits_BPV = self._fit(self._catch_up(sequences_B, depths_B), chooser)[:, None]
        sampled = are_sampled(self.children, chooser)
        sampler = ChildSampler(chooser, logits_BPV[:, 0], depth) if sampled else None
        level: list[Path] = [()]
        tokens: list[Tensor] = []
        for d in range(depth):
            nodes = [path for path in self.paths if len(path) == d + 1]
            ranks = [path[-1] if sampler is None else self._place[path] for path in nodes]
            K = min(max(ranks) + 1, logits_BPV.shape[-1])
            if sampler is None:
                best_BPK = chooser.log_scores(logits_BPV, d).topk(K, dim=-1).indices
            else:
                best_BPK = self._sample_children(sampler, d, len(level), K)
            places = {path: p for p, path in enumerate(level)}
            slots = [
                places[path[:-1]] * K + min(rank, K - 1)
                for path, rank in zip(nodes, ranks, strict=True)
            ]
            tokens.append(best_BPK.flatten(1)[:, devices.tensor(slots, best_BPK.device)])
            if d + 1 < depth:
                # Leaves are included: they are few, and the tree stays contiguous.
                logits_BNV, _ = self.model.forward(
                    self._fit_ids(torch.cat(tokens, 1), chooser),
                    self._parents(d + 1, len(depths_B)),
                )
                logits_BPV = self._fit(logits_BNV[:, -len(nodes) :], chooser)
                if sampler is not None:
                    sampler.add(logits_BPV)
            level = nodes
        self._depth = depth
        counts_B = [self.width(row_depth) for row_depth in depths_B]
        parents_BN = self._parents(depth, len(depths_B))
        q_BNV = None if sampler is None else sampler.q(parents_BN + 1)
        siblings = max(self._place.values()) + 1
        return Proposal(torch.cat(tokens, 1), counts_B, parents_BN, q_BNV, depth, siblings=siblings)

    def _sample_children(self, sampler: ChildSampler, depth: int, nodes: int, count: int) -> Tensor:
        """Sample `count` children (B, P, K) of each node of the deepest level."""
        first = self.width(depth - 1) + 1 if depth else 0
        rows_P = torch.arange(first, first + nodes, device=sampler.chooser.device)
        return sampler.sample(sampler.q(rows_P.expand(len(sampler.tips()), -1)), count, depth)[0]

    def _parents(self, depth: int, rows: int) -> Tensor:
        parents = [self._index.get(path[:-1], -1) for path in self.paths if len(path) <= depth]
        return devices.tensor(parents, self.model.device).expand(rows, -1)

    def time_step(self, frontier: int = 1) -> None:
        """Run one forward over half of the last tree's nodes without committing."""
        self._time_forward(max(1, self.width(self._depth) // 2))

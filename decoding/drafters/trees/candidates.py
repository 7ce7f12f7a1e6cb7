"""All nodes of growing trees, of which some are proposed.

Shapes: B rows, M nodes of the tree, N nodes proposed, P new nodes, L levels, W nodes of a level.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import NO_NODE

NONE = float("-inf")  # the score of a node that is not proposed


@dataclass
class CandidateTree:
    """The nodes of each row's tree, level by level. Scores are log path probabilities."""

    tokens_BM: Tensor
    parents_BM: Tensor  # index of the parent, -1 for the tip
    scores_BM: Tensor
    depths_BM: Tensor  # 1 for the tip's children
    levels: int = 0
    siblings: int = 1  # children of every expanded node

    @staticmethod
    def none(rows: int, device: torch.device, dtype: torch.dtype) -> "CandidateTree":
        """Return trees without nodes."""
        ids_B0 = torch.empty(rows, 0, dtype=torch.long, device=device)
        return CandidateTree(ids_B0, ids_B0, ids_B0.to(dtype), ids_B0)

    def add(
        self, tokens_BP: Tensor, parents_BP: Tensor, scores_BP: Tensor, depths_BP: Tensor
    ) -> None:
        """Append P nodes to every row."""
        self.tokens_BM = torch.cat((self.tokens_BM, tokens_BP), 1)
        self.parents_BM = torch.cat((self.parents_BM, parents_BP), 1)
        self.scores_BM = torch.cat((self.scores_BM, scores_BP), 1)
        self.depths_BM = torch.cat((self.depths_BM, depths_BP), 1)

    def down_to(self, depths_B: list[int]) -> Tensor:
        """Return the scores (B, M), with NONE for nodes that are deeper than their row's depth."""
        limits_B1 = devices.tensor(depths_B, self.scores_BM.device)[:, None]
        return self.scores_BM.masked_fill(self.depths_BM > limits_B1, NONE)

    def kept(self, order_BM: Tensor, counts_B: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, parents and places (B, N = `most`) of each row's first nodes in an order.

        order_BM: places of all nodes, parents before their children. counts_B: number of nodes to
        keep; padding follows them. The kept nodes stay in the tree's order.
        """
        B, M = order_BM.shape
        ranks_BM = torch.arange(M, device=order_BM.device).expand(B, -1)
        keep_BM = torch.empty_like(order_BM).scatter_(1, order_BM, ranks_BM) < counts_B[:, None]
        new_BM = keep_BM.cumsum(1) - 1
        places_BN = keep_BM.long().sort(descending=True, stable=True).indices[:, :most]
        old_BN = self.parents_BM.gather(1, places_BN)
        parents_BN = new_BM.gather(1, old_BN.clamp(min=0)).where(old_BN >= 0, old_BN)
        is_real_BN = keep_BM.gather(1, places_BN)
        return (
            self.tokens_BM.gather(1, places_BN) * is_real_BN,
            parents_BN.masked_fill(~is_real_BN, NO_NODE),
            places_BN,
        )

    def chances(self, width: int) -> Tensor:
        """Return the path probabilities of each level, descending, (B, L, at most W = `width`)."""
        width = min(width, self.scores_BM.shape[1])
        by_level = [
            self.scores_BM.masked_fill(self.depths_BM != level, NONE).topk(width, dim=-1).values
            for level in range(1, self.levels + 1)
        ]
        return torch.stack(by_level, 1).exp()

"""All nodes that a growing tree has seen, and the proposal of its likeliest ones.

Shapes: B rows, M nodes seen, N nodes proposed, P new nodes, L levels, W nodes of a level.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import NO_NODE

NONE = float("-inf")  # the score of what is not to be tested


@dataclass
class CandidateTree:
    """Nodes level after level, parents before children. Scores are log path probabilities."""

    tokens_BM: Tensor
    parents_BM: Tensor  # index among the nodes seen, -1 for the tip
    scores_BM: Tensor
    depths_BM: Tensor  # 1 for the tip's children
    levels: int = 0  # that the model has run for
    siblings: int = 1  # children of every node that was expanded

    def add(
        self, tokens_BP: Tensor, parents_BP: Tensor, scores_BP: Tensor, depths_BP: Tensor
    ) -> None:
        """Append nodes."""
        self.tokens_BM = torch.cat((self.tokens_BM, tokens_BP), 1)
        self.parents_BM = torch.cat((self.parents_BM, parents_BP), 1)
        self.scores_BM = torch.cat((self.scores_BM, scores_BP), 1)
        self.depths_BM = torch.cat((self.depths_BM, depths_BP), 1)

    @staticmethod
    def none(rows: int, device: torch.device, dtype: torch.dtype) -> "CandidateTree":
        """No nodes yet."""
        whole = torch.empty(rows, 0, dtype=torch.long, device=device)
        return CandidateTree(whole, whole, torch.empty(rows, 0, dtype=dtype, device=device), whole)

    def down_to(self, depths_B: list[int]) -> Tensor:
        """Scores (B, M) of the nodes down to each row's depth; NONE for the others."""
        return self.scores_BM.masked_fill(
            self.depths_BM > devices.tensor(depths_B, self.scores_BM.device)[:, None], NONE
        )

    def kept(self, order_BM: Tensor, counts_B: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents and places here (B, `most`) of the first counts_B nodes of an order, as
        they were seen, and padding behind them.

        A parent is to stand before its children in the order too, so that paths stay whole.
        """
        B, M = order_BM.shape
        places_BM = torch.arange(M, device=order_BM.device).expand(B, -1)
        keep_BM = torch.empty_like(order_BM).scatter_(1, order_BM, places_BM) < counts_B[:, None]
        place_BM = keep_BM.cumsum(1) - 1
        kept_BN = keep_BM.long().sort(descending=True, stable=True).indices[:, :most]
        parents_BN = self.parents_BM.gather(1, kept_BN)
        placed_BN = place_BM.gather(1, parents_BN.clamp(min=0)).where(parents_BN >= 0, parents_BN)
        real_BN = keep_BM.gather(1, kept_BN)
        return (
            self.tokens_BM.gather(1, kept_BN) * real_BN,
            placed_BN.masked_fill(~real_BN, NO_NODE),
            kept_BN,
        )

    def chances(self, width: int) -> Tensor:
        """Path probabilities (B, L, at most W = `width`) of the likeliest nodes of each level."""
        width = min(width, self.scores_BM.shape[1])
        by_level = [
            self.scores_BM.masked_fill(self.depths_BM != level, NONE).topk(width, dim=-1).values
            for level in range(1, self.levels + 1)
        ]
        return torch.stack(by_level, 1).exp()

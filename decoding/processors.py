"""Changes to the logits that hang on the text so far: repetition penalty, and the tokens that a caller allows.

Every node of a draft has a text of its own, the row's and the path to it, and gets its own change: so the target's choice at a node is the one
that autoregressive decoding would make there, and the laws hold. A drafter that knows the processors drafts what will be allowed; one
that does not only loses acceptance.

Shapes: B rows, N drafted nodes, V vocabulary. Logits have one node more: the tip comes first.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decoding import cuda
from decoding.cache import ancestors
from decoding.errors import UserError

Allowed = Callable[[Sequence[int]], Sequence[int] | None]


class Processors:
    """Repetition penalty (Keskar et al. 2019, arXiv 1909.05858), then the allowed tokens."""

    def __init__(self, repetition_penalty: float, allowed: Allowed | None) -> None:
        self.repetition_penalty, self.allowed = repetition_penalty, allowed

    def __call__(
        self,
        logits_BNV: Tensor,
        sequences_B: Sequence[Sequence[int]],
        tokens_BN: Tensor | None = None,
        parents_BN: Tensor | None = None,
    ) -> Tensor:
        """The changed logits of the tip and of each node; without `parents_BN` the nodes are a chain.

        Raises UserError when `allowed` allows nothing after a row's own text.
        """
        paths_BN = None
        if tokens_BN is not None and tokens_BN.shape[1]:
            if parents_BN is None:
                parents_BN = torch.arange(-1, tokens_BN.shape[1] - 1, device=tokens_BN.device).expand_as(tokens_BN)
            paths_BN = ancestors(parents_BN)  # (B, N, N): which nodes lie on the way to each
        if self.repetition_penalty != 1:
            logits_BNV = self._penalised(logits_BNV, sequences_B, tokens_BN, paths_BN)
        if self.allowed is not None:
            logits_BNV = self._masked(logits_BNV, sequences_B, tokens_BN, paths_BN)
        return logits_BNV

    def drafting(self, logits_BV: Tensor, texts_B: Sequence[Sequence[int]]) -> Tensor:
        """A drafter's logits after each text, changed alike; free where it could say nothing that is allowed.

        A text may end with drafted tokens that decoding never comes to: behind a stop token a caller need not allow anything.
        """
        changed_BNV = logits_BV[:, None]
        if self.repetition_penalty != 1:
            changed_BNV = self._penalised(changed_BNV, texts_B, None, None)
        if self.allowed is not None:
            masked_BNV = self._masked(changed_BNV, texts_B, None, None, may_end=True)
            silent_BN1 = masked_BNV.isneginf().all(-1, keepdim=True)
            changed_BNV = torch.where(silent_BN1, changed_BNV, masked_BNV)
        return changed_BNV[:, 0]

    def _penalised(
        self,
        logits_BNV: Tensor,
        sequences_B: Sequence[Sequence[int]],
        tokens_BN: Tensor | None,
        paths_BN: Tensor | None,
    ) -> Tensor:
        V = logits_BNV.shape[-1]
        longest = max(len(sequence) for sequence in sequences_B)
        padded = [[*sequence, *[sequence[-1]] * (longest - len(sequence))] for sequence in sequences_B]
        seen_BV = torch.zeros(len(padded), V, dtype=torch.bool, device=logits_BNV.device)
        seen_BV.scatter_(1, cuda.tensor(padded, logits_BNV.device).clamp_(max=V - 1), True)
        seen_BNV = seen_BV[:, None].expand(-1, logits_BNV.shape[1], -1)
        if tokens_BN is not None and paths_BN is not None:
            on_path_BNV = paths_BN.float() @ F.one_hot(tokens_BN.clamp(max=V - 1), V).float() > 0
            seen_BNV = seen_BNV | F.pad(on_path_BNV, (0, 0, 1, 0))
        penalty = self.repetition_penalty
        return torch.where(
            seen_BNV, torch.where(logits_BNV > 0, logits_BNV / penalty, logits_BNV * penalty), logits_BNV
        )

    def _masked(
        self,
        logits_BNV: Tensor,
        sequences_B: Sequence[Sequence[int]],
        tokens_BN: Tensor | None,
        paths_BN: Tensor | None,
        may_end: bool = False,
    ) -> Tensor:
        """may_end: a sequence after which nothing is allowed has no rule, rather than being an error."""
        assert self.allowed is not None
        forbidden_BNV = np.zeros(logits_BNV.shape, dtype=bool)
        drafted = [[]] * len(sequences_B) if tokens_BN is None else tokens_BN.tolist()
        paths = None if paths_BN is None else paths_BN.tolist()
        for row, sequence in enumerate(sequences_B):
            for node in range(logits_BNV.shape[1]):
                way = paths[row][node - 1] if paths is not None and node else []
                ids = self.allowed([*sequence, *(token for token, on in zip(drafted[row], way) if on)])
                # Behind a token that ends the text, or is not allowed itself, there is no rule.
                if ids is None or (not len(ids) and (node or may_end)):
                    continue
                if not len(ids):
                    raise UserError(
                        f"allowed() allows no token after {len(sequence)} tokens: let it allow a stop token there."
                    )
                forbidden_BNV[row, node] = True
                forbidden_BNV[row, node, list(ids)] = False
        return logits_BNV.masked_fill(torch.from_numpy(forbidden_BNV).to(logits_BNV.device), float("-inf"))


def make_processors(repetition_penalty: float, allowed: Allowed | None) -> Processors | None:
    """None where nothing is to be changed. Raises UserError for a penalty that is none."""
    if repetition_penalty <= 0:
        raise UserError(f"repetition_penalty is {repetition_penalty}, expected more than 0 (1 is off).")
    return None if repetition_penalty == 1 and allowed is None else Processors(repetition_penalty, allowed)

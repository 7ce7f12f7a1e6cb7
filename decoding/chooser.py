"""How a token is chosen from logits in one round: greedily, by fresh uniforms, or by noise that draft and target share.

One `Chooser` serves a whole `decode`; the loop tells it before each round which rows are running (`begin`). Drafters ask
it for their tokens, verification rules for the target's, so both sides use the same warpers and the same keys.

Shapes: B rows, N nodes (the tip and the drafted tokens), W depths of a round, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding import noise
from decoding.errors import UserError
from decoding.sampling import Warper, draw

RULES = ("greedy", "token", "coupled")


class Chooser:
    """Warper, rule and noise of one decode call."""

    def __init__(self, warper: Warper, verify: str, seed: int, vocab_size: int, device: torch.device) -> None:
        if verify not in RULES:
            raise UserError(f"verify '{verify}' is unknown, expected one of {', '.join(RULES)}.")
        if verify == "greedy" and not warper.greedy:
            raise UserError(
                f"verify 'greedy' needs temperature 0, found {warper.temperature}; take 'token' or 'coupled'."
            )
        self.warper, self.seed = warper, seed
        self.rule = "greedy" if warper.greedy else verify
        self.vocab_size, self.device = vocab_size, device
        self._scaled_V = noise.scaled_ids(torch.arange(vocab_size, device=device)) if self.rule == "coupled" else None
        self._sparse = warper.top_k > 0 or warper.top_p < 1 or warper.min_p > 0
        self._requests_B: Sequence[int] = ()
        self._rounds_B: Sequence[int] = ()
        self._positions_B: Sequence[int] = ()
        self._keys_BW = torch.empty(0)
        self._race_BWV: Tensor | None = None

    def begin(
        self, request_keys_B: Sequence[int], rounds_B: Sequence[int], positions_B: Sequence[int], depths: int
    ) -> None:
        """Start a round. request_keys_B: `noise.key(seed, request)`; positions_B: index in its sequence of the first
        token that the round emits; depths: tokens that a row can gain at most."""
        self._requests_B, self._rounds_B, self._positions_B = request_keys_B, rounds_B, positions_B
        if self.rule == "coupled":
            keys = [
                [noise.signed(noise.extend(request, position + depth)) for depth in range(depths)]
                for request, position in zip(request_keys_B, positions_B, strict=True)
            ]
            self._keys_BW = torch.tensor(keys, device=self.device)
            self._race_BWV = None

    def uniform(self, row: int, depth: int, purpose: int) -> float:
        """The uniform of (seed, request, round, position, purpose)."""
        state = noise.extend(self._requests_B[row], self._rounds_B[row])
        return noise.uniform(noise.extend(noise.extend(state, self._positions_B[row] + depth), purpose))

    def draft(self, logits_BV: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """A drafter's next token at this depth (0 is the first): tokens_B, and probs_BV where the rule tests them."""
        if self.rule == "greedy":
            return logits_BV.argmax(-1), None
        probs_BV = self.warper.probs(logits_BV)
        if self.rule == "coupled":
            return self.race(probs_BV[:, None], depth).squeeze(1), None
        uniforms_B = [self.uniform(row, depth, noise.DRAFT) for row in range(len(probs_BV))]
        return draw(probs_BV, uniforms_B), probs_BV

    def race(self, probs_BNV: Tensor, first_depth: int = 0, depths_BN: Tensor | None = None) -> Tensor:
        """Tokens (B, N) that win p / E with the shared noise. Node n stands at depth first_depth + n, or at depths_BN."""
        if self._sparse:
            return self._sparse_race(probs_BNV, first_depth, depths_BN)
        if self._race_BWV is None:
            assert self._scaled_V is not None
            self._race_BWV = noise.exponentials(self._keys_BW[:, :, None], self._scaled_V)
        if depths_BN is None:
            race_BNV = self._race_BWV[:, first_depth : first_depth + probs_BNV.shape[1]]
        else:
            race_BNV = self._race_BWV[torch.arange(len(depths_BN), device=self.device)[:, None], depths_BN]
        return (probs_BNV / race_BNV).argmax(-1)

    def _sparse_race(self, probs_BNV: Tensor, first_depth: int, depths_BN: Tensor | None) -> Tensor:
        """`race` with noise only for the ids that survive the warpers; the same tokens win."""
        assert self._scaled_V is not None
        rows, nodes, ids = probs_BNV.nonzero(as_tuple=True)
        depths = nodes + first_depth if depths_BN is None else depths_BN[rows, nodes]
        race = noise.exponentials(self._keys_BW[rows, depths], self._scaled_V[ids])
        scores_BNV = torch.zeros(probs_BNV.shape, dtype=torch.float64, device=probs_BNV.device)
        scores_BNV[rows, nodes, ids] = probs_BNV[rows, nodes, ids] / race
        return scores_BNV.argmax(-1)

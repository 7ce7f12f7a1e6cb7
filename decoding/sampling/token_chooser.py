"""Token choice from logits: greedy, by fresh uniforms, or by noise shared by draft and target.

One `TokenChooser` serves a whole `decode`; the loop calls `begin` before each round. Drafters and
verification rules use the same chooser, and therefore the same warpers and keys.

Shapes: B rows, N nodes (the tip and the drafted tokens), P nodes with children, M samples, W depths
of a round, V vocabulary.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoding import devices
from decoding.errors import UserError
from decoding.interfaces import Chooser, Draws
from decoding.sampling import noise
from decoding.sampling.logits_processors import Processors
from decoding.sampling.row_warpers import RowWarpers
from decoding.sampling.rule_names import FRESH, LOSSY, check_verify, split_rule
from decoding.sampling.warpers import SAMPLES_PER_CHILD, Warper, draw, draw_different

# Depths whose shared noise is made at once on a CPU, where the eight operations of a depth cost
# more than their arithmetic.
AT_ONCE = 4
MOST_KEPT = 1 << 24  # maximum number of cached noise values (64 MiB)
FEW = 16  # keyed numbers up to which Python is faster than numpy


class TokenChooser:
    """The warper, rule and noise of one decode call."""

    def __init__(
        self,
        warper: Warper | RowWarpers,
        verify: str,
        seed: int,
        vocab_size: int,
        device: torch.device,
        processors: Processors | None = None,
    ) -> None:
        check_verify(verify)
        if verify == "greedy" and not warper.greedy:
            raise UserError(
                f"verify 'greedy' needs temperature 0, found {warper.temperature}. Use 'token', "
                f"'block' or 'coupled'."
            )
        self.warper, self.seed = warper, seed
        self.rule, self.lenience = ("greedy", 1.0) if warper.greedy else split_rule(verify)
        self.vocab_size, self.device = vocab_size, device
        self._scaled_V: Tensor | None = None
        if self.rule == "coupled":
            self._scaled_V = noise.scaled_ids(torch.arange(vocab_size, device=device))
        # with `begun`, all that another process needs to build an equal chooser
        self.spec = (warper, verify, seed, vocab_size)
        self.begun: tuple[Sequence[int], Sequence[int], Sequence[int], int] = ((), (), (), 0)
        self.processors = processors
        self._round_keys_B: list[int] = []
        self._positions_B: Sequence[int] = ()
        self._keys_BW = torch.empty(0)
        self._keys: list[list[int]] = []
        # key of a position -> its noise (V,), oldest first
        self._cached: dict[int, Tensor] = {}
        self._race_BWV: Tensor | None = None

    def begin(
        self,
        request_keys_B: Sequence[int],
        rounds_B: Sequence[int],
        positions_B: Sequence[int],
        depths: int,
    ) -> None:
        """Start a round.

        request_keys_B: each row's `noise.key(seed, request)`. rounds_B: each row's number of
        earlier rounds. positions_B: the index, in each row's sequence, of the first token that the
        round emits. depths: the maximum number of tokens that a row can gain.
        """
        self._positions_B = positions_B
        self.begun = (request_keys_B, rounds_B, positions_B, depths)
        if self.rule in (*FRESH, *LOSSY):
            pairs = zip(request_keys_B, rounds_B, strict=True)
            self._round_keys_B = [noise.extend(*pair) for pair in pairs]
        if self.rule == "coupled":
            self._keys = keys = [
                [noise.signed(noise.extend(request, position + depth)) for depth in range(depths)]
                for request, position in zip(request_keys_B, positions_B, strict=True)
            ]
            self._keys_BW = devices.tensor(keys, self.device)
            self._race_BWV = None
            self._forget(min(4 * len(keys) * depths, MOST_KEPT // self.vocab_size))

    @property
    def tests_q(self) -> bool:
        """Whether the rule tests sampled tokens by p / q, with new random numbers every round."""
        return self.rule in FRESH

    @property
    def drafts_likeliest(self) -> bool:
        """Whether `draft` returns the tokens with the largest logits."""
        return self.rule in ("greedy", "typical")

    @property
    def depths(self) -> int:
        """Number of depths that have shared noise in this round."""
        return self._keys_BW.shape[1]

    @property
    def draws(self) -> Draws:
        """The keys of this round's random numbers, for calls outside Python."""
        keys = self._round_keys_B, self._positions_B, self._keys
        return Draws(self.warper.temperature, *keys)

    def uniform(self, row: int, depth: int, purpose: int, node: int | None = None) -> float:
        """Return the round's number in (0, 1) for this row, depth and purpose.

        It is keyed by seed, request, round, position, purpose and, if given, node.
        """
        state = noise.extend(self._round_keys_B[row], self._positions_B[row] + depth)
        state = noise.extend(state, purpose)
        return float(noise.uniform(state if node is None else noise.extend(state, node)))

    def uniforms(self, rows: Any, depths: Any, purposes: Any, nodes: Any = None) -> Any:
        """Return `uniform` for integers or arrays of them, in their broadcast shape."""
        parts = [rows, depths, purposes] if nodes is None else [rows, depths, purposes, nodes]
        if isinstance(rows, range) and len(rows) == 1 and not np.ndim(depths):
            return [self.uniform(rows[0], depths, purposes, nodes)]  # the least overhead of one row
        keys = np.broadcast(*parts)
        if keys.size <= FEW:
            return np.array([self.uniform(*map(int, key)) for key in keys]).reshape(keys.shape)
        return noise.uniform(self._states(*parts))

    def draft_keys(self, depths: Sequence[int]) -> Any:
        """Return the keys (B, len(depths)) of (seed, request, round, position) for drafts."""
        rows_B1 = np.arange(len(self._positions_B))[:, None]
        return self._states(rows_B1, np.array(depths), noise.DRAFT).view(np.int64)

    def _states(self, rows: Any, depths: Any, *parts: Any) -> Any:
        """Return keys of (seed, request, round, position) and these parts, broadcast."""
        positions = np.array(self._positions_B, np.uint64)[rows] + np.asarray(depths, np.uint64)
        states = noise.extend(np.array(self._round_keys_B, np.uint64)[rows], positions)
        return reduce(noise.extend, (np.asarray(part, np.uint64) for part in parts), states)

    def draft(self, logits_BV: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """Return a drafter's next tokens (B,) at this depth, and q (B, V) if the rule tests it."""
        if self.drafts_likeliest:
            return devices.argmax(logits_BV), None
        if self.rule == "coupled":
            return self.race(logits_BV[:, None], depth).squeeze(1), None
        probs_BV = self.warper.probs(logits_BV)
        uniforms_B = self.uniforms(range(len(probs_BV)), depth, noise.DRAFT)
        # NaN has no weight and would sample past the vocabulary; the round rejects NaN later.
        return draw(probs_BV, uniforms_B).clamp_(max=probs_BV.shape[-1] - 1), probs_BV

    def draw_children(
        self, q_BPV: Tensor, count: int, depth: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return `count` distinct children sampled at each of P nodes, and their probabilities.

        The nodes are at one depth and numbered from `first`. See `draw_different`.
        """
        rows_B1 = np.arange(len(q_BPV))[:, None]
        nodes_P = np.arange(first, first + q_BPV.shape[1])
        keys_BP = self._states(rows_B1, depth, noise.DRAFT, nodes_P).view(np.int64)
        keys_BP1 = devices.tensor(keys_BP, q_BPV.device)[:, :, None]
        scaled_M = noise.scaled_ids(
            torch.arange(1 if count == 1 else SAMPLES_PER_CHILD * count, device=q_BPV.device)
        )
        return draw_different(q_BPV, noise.uniforms(keys_BP1, scaled_M), count)

    def log_scores(self, logits_BPV: Tensor, depth: int) -> Tensor:
        """Return the log probabilities (B, P, V) of acceptance by which a drafter ranks tokens.

        These are the warped probabilities when sampling, the model's probabilities when decoding
        greedily, and the normalised p / E under shared noise.
        """
        if self.rule == "greedy":
            dtype = torch.promote_types(logits_BPV.dtype, torch.float32)
            return logits_BPV.log_softmax(-1, dtype)
        if self.rule == "coupled":
            race_BPV = self._race_at(logits_BPV, depth)
            return (race_BPV / race_BPV.sum(-1, keepdim=True)).log()
        return self.warper.probs(logits_BPV).log()

    def _race_at(self, logits_BPV: Tensor, depth: int) -> Tensor:
        """Return `race_scores` of nodes at one depth."""
        return self.warper.probs(logits_BPV) / self._shared(depth, 1)

    def race_scores(self, logits_BNV: Tensor, depths_BN: Tensor) -> Tensor:
        """Return p / E (B, N, V) at these depths; the target chooses the token with the largest."""
        return self.warper.probs(logits_BNV) / self._at_depths(depths_BN)

    def race(
        self, logits_BNV: Tensor, first_depth: int = 0, depths_BN: Tensor | None = None
    ) -> Tensor:
        """Return the tokens (B, N) with the highest p / E under the shared noise.

        Node n is at depth first_depth + n, or at depths_BN[:, n]. Noise is made only for tokens
        that survive the warpers.
        """
        keys_BN = self._keys_BW[:, first_depth : first_depth + logits_BNV.shape[1]]
        if depths_BN is not None:
            keys_BN = self._keys_BW.gather(1, depths_BN)
        assert self._scaled_V is not None
        if isinstance(self.warper, Warper) and self.warper.truncates:
            probs_BNK, ids_BNK = self.warper.survivors(logits_BNV)
            race_BNK = noise.exponentials(keys_BN[:, :, None], self._scaled_V[ids_BNK])
            return ids_BNK.gather(-1, (probs_BNK / race_BNK).argmax(-1, keepdim=True)).squeeze(-1)
        if depths_BN is not None:
            return devices.argmax(self.race_scores(logits_BNV, depths_BN))
        noise_BNV = self._shared(first_depth, logits_BNV.shape[1])
        return devices.argmax(self.warper.probs(logits_BNV) / noise_BNV)

    def _at_depths(self, depths_BN: Tensor) -> Tensor:
        """Return the noise (B, N, V) of nodes at these depths.

        It is made once for each depth if there are more nodes than depths.
        """
        assert self._scaled_V is not None
        if depths_BN.shape[1] <= self.depths:
            keys_BN = self._keys_BW.gather(1, depths_BN)
            return noise.exponentials(keys_BN[:, :, None], self._scaled_V)
        rows_B1 = torch.arange(len(depths_BN), device=self.device)[:, None]
        return self._shared(0, self.depths)[rows_B1, depths_BN]

    def _shared(self, first: int, count: int) -> Tensor:
        """Return the noise (B, count, V) of the round's depths from `first`.

        Draft and target use the same noise, and so does the next round if it returns to a position
        (after a rejection, or in every chunk of an overlapped schedule), so the noise is cached. A
        GPU makes the noise of a whole round at once.
        """
        assert self._scaled_V is not None
        if devices.runs_ahead(self.device):
            if self._race_BWV is None:
                self._race_BWV = noise.exponentials(self._keys_BW[:, :, None], self._scaled_V)
            return self._race_BWV[:, first : first + count]
        wanted = [key for row in self._keys for key in row[first : first + count]]
        if any(key not in self._cached for key in wanted):
            ahead = max(count, AT_ONCE)
            keys = [key for row in self._keys for key in row[first : first + ahead]]
            missing = [key for key in keys if key not in self._cached]
            made_MV = noise.exponentials(torch.tensor(missing)[:, None], self._scaled_V)
            self._cached.update(zip(missing, made_MV))
        return torch.stack([self._cached[key] for key in wanted]).view(len(self._keys), count, -1)

    def _forget(self, most: int) -> None:
        """Drop old noise if more than `most` positions have some; keep the newest `most` / 2."""
        if len(self._cached) > most:
            for key in list(self._cached)[: -most // 2]:
                del self._cached[key]


def likeliest_chooser(chooser: Chooser) -> TokenChooser:
    """Return a chooser of the likeliest tokens, without q, for the drafts of another's round."""
    return TokenChooser(
        Warper(0.0, 0, 1.0, 0.0),
        "greedy",
        0,
        chooser.vocab_size,
        chooser.device,
        chooser.processors,
    )

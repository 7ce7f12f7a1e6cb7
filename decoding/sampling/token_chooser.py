"""How a token is chosen from logits in one round: greedily, by fresh uniforms, or by noise that
draft and target share.

One `TokenChooser` serves a whole `decode`; the loop tells it before each round which rows are
running (`begin`). Drafters ask it for their tokens, verification rules for the target's, so both
sides use the same warpers and the same keys.

Shapes: B rows, N nodes (the tip and the drafted tokens), W depths of a round, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding import devices
from decoding.errors import UserError
from decoding.sampling import noise
from decoding.sampling.logits_processors import Processors
from decoding.sampling.warpers import TRIES, Warper, draw, draw_different

LOSSY = ("typical",)  # rules under which the output has not the target's distribution
SAMPLING = ("token", "block", "coupled", *LOSSY)  # rules where temperature > 0
RULES = ("greedy", *SAMPLING)
# depths whose shared noise is made in one go on a CPU, where eight operations a depth cost more
# than their arithmetic
AT_ONCE = 4
MOST_KEPT = 1 << 24  # numbers of shared noise that outlive their round (64 MiB)
FRESH = ("token", "block")  # rules whose numbers are new in every round


class TokenChooser:
    """Warper, rule and noise of one decode call."""

    def __init__(
        self,
        warper: Warper,
        verify: str,
        seed: int,
        vocab_size: int,
        device: torch.device,
        processors: Processors | None = None,
    ) -> None:
        if verify not in RULES:
            raise UserError(f"verify '{verify}' is unknown, expected one of {', '.join(RULES)}.")
        if verify == "greedy" and not warper.greedy:
            raise UserError(
                f"verify 'greedy' needs temperature 0, found {warper.temperature}; take 'token', "
                f"'block' or 'coupled'."
            )
        self.warper, self.seed = warper, seed
        self.rule = "greedy" if warper.greedy else verify
        self.vocab_size, self.device = vocab_size, device
        self._scaled_V = (
            noise.scaled_ids(torch.arange(vocab_size, device=device))
            if self.rule == "coupled"
            else None
        )
        # all that an equal chooser elsewhere needs, with `begun`
        self.spec = (warper, verify, seed, vocab_size)
        self.begun: tuple[Sequence[int], Sequence[int], Sequence[int], int] = ((), (), (), 0)
        self.processors = processors
        self._round_keys_B: list[int] = []
        self._positions_B: Sequence[int] = ()
        self._keys_BW = torch.empty(0)
        self._keys: list[list[int]] = []
        # position's key -> its noise (vocabulary,), oldest first
        self._known: dict[int, Tensor] = {}
        self._race_BWV: Tensor | None = None

    def begin(
        self,
        request_keys_B: Sequence[int],
        rounds_B: Sequence[int],
        positions_B: Sequence[int],
        depths: int,
    ) -> None:
        """Start a round. request_keys_B: `noise.key(seed, request)`; positions_B: index in its
        sequence of the first token that the round emits; depths: tokens that a row can gain at
        most.
        """
        self._positions_B = positions_B
        self.begun = (request_keys_B, rounds_B, positions_B, depths)
        if self.rule in (*FRESH, *LOSSY):
            self._round_keys_B = [
                noise.extend(key, number) for key, number in zip(request_keys_B, rounds_B)
            ]
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
        """Whether the rule tests sampled tokens by p / q, with numbers that are new every round."""
        return self.rule in FRESH

    @property
    def depths(self) -> int:
        """Depths of this round that have shared noise."""
        return self._keys_BW.shape[1]

    def uniform(self, row: int, depth: int, purpose: int, node: int | None = None) -> float:
        """The uniform of (seed, request, round, position, purpose), and of the node where a
        position has several.
        """
        state = noise.extend(
            noise.extend(self._round_keys_B[row], self._positions_B[row] + depth), purpose
        )
        return noise.uniform(state if node is None else noise.extend(state, node))

    def draft_key(self, row: int, depth: int) -> int:
        """The key of (seed, request, round, position) for a drafter that makes its own numbers of
        it (`noise.exponentials`).
        """
        state = noise.extend(self._round_keys_B[row], self._positions_B[row] + depth)
        return noise.signed(noise.extend(state, noise.DRAFT))

    def draft(self, logits_BV: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """A drafter's next token at this depth (0 is the first): tokens_B, and probs_BV where the
        rule tests them.
        """
        if self.rule in ("greedy", *LOSSY):
            return logits_BV.argmax(-1), None
        if self.rule == "coupled":
            return self.race(logits_BV[:, None], depth).squeeze(1), None
        probs_BV = self.warper.probs(logits_BV)
        uniforms_B = [self.uniform(row, depth, noise.DRAFT) for row in range(len(probs_BV))]
        # NaN has no weight, and no weight draws past the end: the round refuses it, if the drafter
        # comes so far.
        return draw(probs_BV, uniforms_B).clamp_(max=probs_BV.shape[-1] - 1), probs_BV

    def children(self, logits_BPV: Tensor, count: int, depth: int) -> tuple[Tensor, Tensor | None]:
        """`count` different next tokens (B, P, count) of each of the P nodes of a depth, and their
        probs_BPV where the rule tests them.

        Drawn without replacement; the likeliest ones where decoding is greedy, the first ones of
        the race where noise is shared.
        """
        if self.rule in ("greedy", *LOSSY):
            return logits_BPV.topk(count, dim=-1).indices, None
        if self.rule == "coupled":
            return self._race_at(logits_BPV, depth).topk(count, dim=-1).indices, None
        probs_BPV = self.warper.probs(logits_BPV)
        return self.draw_children(probs_BPV, count, depth)[0], probs_BPV

    def node_keys(self, depth: int, nodes: Sequence[int]) -> list[list[int]]:
        """The keys (B, P) of (seed, request, round, position, node) for the children of these
        nodes.
        """
        states_B = [
            noise.extend(noise.extend(key, position + depth), noise.DRAFT)
            for key, position in zip(self._round_keys_B, self._positions_B, strict=True)
        ]
        return [[noise.signed(noise.extend(state, node)) for node in nodes] for state in states_B]

    def draw_children(
        self, q_BPV: Tensor, count: int, depth: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """`draw_different` at the P nodes of a depth, which are numbered from `first` on."""
        keys = self.node_keys(depth, range(first, first + q_BPV.shape[1]))
        keys_BP1 = devices.tensor(keys, q_BPV.device)[:, :, None]
        scaled_M = noise.scaled_ids(
            torch.arange(1 if count == 1 else TRIES * count, device=q_BPV.device)
        )
        return draw_different(q_BPV, noise.uniforms(keys_BP1, scaled_M), count)

    def log_scores(self, logits_BPV: Tensor, depth: int) -> Tensor:
        """Log probabilities (B, P, V) by which a drafter ranks the next tokens of P nodes at this
        depth: how likely each is to pass.

        The warped distribution where tokens are drawn, the model's own where decoding is greedy;
        under the shared noise, the shares of the race.
        """
        if self.rule == "greedy":
            return logits_BPV.to(torch.promote_types(logits_BPV.dtype, torch.float32)).log_softmax(
                -1
            )
        if self.rule == "coupled":
            race_BPV = self._race_at(logits_BPV, depth)
            return (race_BPV / race_BPV.sum(-1, keepdim=True)).log()
        return self.warper.probs(logits_BPV).log()

    def _race_at(self, logits_BPV: Tensor, depth: int) -> Tensor:
        """`race_scores` of nodes that all stand at one depth."""
        return self.warper.probs(logits_BPV) / self._shared(depth, 1)

    def race_scores(self, logits_BNV: Tensor, depths_BN: Tensor) -> Tensor:
        """p / E over the vocabulary under the shared noise of these depths; its largest entry is
        the target's choice.
        """
        return self.warper.probs(logits_BNV) / self._at_depths(depths_BN)

    def race(
        self, logits_BNV: Tensor, first_depth: int = 0, depths_BN: Tensor | None = None
    ) -> Tensor:
        """Tokens (B, N) with the highest p / E under the shared noise.

        Node n stands at depth first_depth + n, or at depths_BN[:, n]. Noise is made for the tokens
        that survive the warpers, or for the whole vocabulary where none are removed.
        """
        keys_BN = self._keys_BW[:, first_depth : first_depth + logits_BNV.shape[1]]
        if depths_BN is not None:
            keys_BN = self._keys_BW.gather(1, depths_BN)
        assert self._scaled_V is not None
        if self.warper.truncates:
            probs_BNK, ids_BNK = self.warper.survivors(logits_BNV)
            race_BNK = noise.exponentials(keys_BN[:, :, None], self._scaled_V[ids_BNK])
            return ids_BNK.gather(-1, (probs_BNK / race_BNK).argmax(-1, keepdim=True)).squeeze(-1)
        if depths_BN is not None:
            race_BNV = self._at_depths(depths_BN)
        else:
            race_BNV = self._shared(first_depth, logits_BNV.shape[1])
        return (self.warper.probs(logits_BNV) / race_BNV).argmax(-1)

    def _at_depths(self, depths_BN: Tensor) -> Tensor:
        """The noise (B, N, V) of nodes at these depths: made once a depth where more nodes than
        depths ask.
        """
        assert self._scaled_V is not None
        if depths_BN.shape[1] <= self.depths:
            return noise.exponentials(
                self._keys_BW.gather(1, depths_BN)[:, :, None], self._scaled_V
            )
        rows_B1 = torch.arange(len(depths_BN), device=self.device)[:, None]
        return self._shared(0, self.depths)[rows_B1, depths_BN]

    def _shared(self, first: int, count: int) -> Tensor:
        """The noise (B, count, V) of a round's depths from `first` on.

        Draft and target meet the same noise, and so does the next round wherever it comes to a
        position again (what was drafted behind a failure; under an overlapped schedule every
        chunk): it is made once. A GPU makes a whole round's in one go.
        """
        assert self._scaled_V is not None
        if devices.runs_ahead(self.device):
            if self._race_BWV is None:
                self._race_BWV = noise.exponentials(self._keys_BW[:, :, None], self._scaled_V)
            return self._race_BWV[:, first : first + count]
        wanted = [key for row in self._keys for key in row[first : first + count]]
        if any(key not in self._known for key in wanted):
            ahead = max(count, AT_ONCE)
            missing = [
                key
                for row in self._keys
                for key in row[first : first + ahead]
                if key not in self._known
            ]
            made_MV = noise.exponentials(torch.tensor(missing)[:, None], self._scaled_V)
            self._known.update(zip(missing, made_MV))
        return torch.stack([self._known[key] for key in wanted]).view(len(self._keys), count, -1)

    def _forget(self, most: int) -> None:
        """Drop the oldest half of the noise when there is more than a few rounds can use."""
        if len(self._known) > most:
            for key in list(self._known)[: -most // 2]:
                del self._known[key]

"""Changes to the logits that depend on the text so far: repetition penalty and allowed tokens.

The text at a draft node is the row's text followed by the path to the node, and it determines how
the node's logits change. The target's choice at a node is therefore the same as in autoregressive
decoding, and the output stays exact. A drafter that ignores the processors only has a lower
acceptance rate.

The penalty needs the set of tokens in a text. Their ids stay on the device, where each drafted
token is added, so an asynchronous host does not wait. `allowed` is an arbitrary Python function of
the text: the host must read every drafted token first. A round then waits once more for its draft,
and a chain waits for every drafted token.

Shapes: B rows, N drafted nodes, V vocabulary, X token ids of a text. Logits have one node more: the
tip comes first.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from operator import index
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoding import devices
from decoding.errors import UserError
from decoding.interfaces import ancestors
from decoding.values import check_value, quote

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
        """Return the changed logits of the tip and of each node.

        sequences_B: each row's text. tokens_BN: the nodes; None if nothing was drafted. Without
        `parents_BN` the nodes are a chain. Raises UserError when `allowed` allows no token after a
        row's text.
        """
        if tokens_BN is not None and tokens_BN.shape[1] == 0:
            tokens_BN = None
        if self.repetition_penalty != 1:
            held_BNX = text_ids(sequences_B, logits_BNV)[:, None]
            if tokens_BN is not None:
                known_BN = tokens_BN.clamp(max=logits_BNV.shape[-1] - 1)
                held_BNX = _ids_at_nodes(held_BNX, known_BN, _on_path(tokens_BN, parents_BN))
            logits_BNV = self.penalised(logits_BNV, held_BNX)
        if self.allowed is not None:
            texts_BN = [[list(sequence)] for sequence in sequences_B]
            if tokens_BN is not None:
                paths_BNN = _on_path(tokens_BN, parents_BN)
                texts_BN = _texts_at_nodes(sequences_B, tokens_BN, paths_BNN)
            logits_BNV = self.masked(logits_BNV, texts_BN)
        return logits_BNV

    def drafting(self, texts_B: Sequence[Sequence[int]]) -> "DraftProcessors":
        """Return these processors for a drafter that extends the texts token by token."""
        return DraftProcessors(self, texts_B)

    def penalised(self, logits_BNV: Tensor, held_BNX: Tensor) -> Tensor:
        """Return the logits, with the tokens of each node's text penalised; ids may repeat."""
        of_held_BNX = logits_BNV.gather(-1, held_BNX)
        penalty = self.repetition_penalty
        changed_BNX = torch.where(of_held_BNX > 0, of_held_BNX / penalty, of_held_BNX * penalty)
        return logits_BNV.scatter(-1, held_BNX, changed_BNX)

    def masked(
        self, logits_BNV: Tensor, texts_BN: Sequence[Sequence[Sequence[int]]], may_end: bool = False
    ) -> Tensor:
        """Return the logits, with -inf for tokens that `allowed` forbids after each node's text.

        may_end: leave the logits unchanged if nothing is allowed after a row's text, instead of
        raising UserError. Also raises UserError if `allowed` returns anything but token ids.
        """
        assert self.allowed is not None
        B, N, V = logits_BNV.shape
        bound, allowed = list[int](), list[NDArray[np.int64]]()  # places of nodes, and their tokens
        for row, texts_N in enumerate(texts_BN):
            for node, text in enumerate(texts_N):
                ids = _check_ids(self.allowed(text), len(text), V)
                # After a token that ends the text or is forbidden itself, there is no constraint.
                if ids is None or (not len(ids) and (node or may_end)):
                    continue
                if not len(ids):
                    raise UserError(
                        f"allowed() allows no token after {len(text)} tokens, expected at least "
                        f"one. Let it allow a stop token there."
                    )
                bound.append(row * N + node)
                allowed.append(ids)
        forbidden_XV = np.zeros((B * N, V), dtype=bool)
        forbidden_XV[bound] = True
        ids_of_all = np.concatenate([np.empty(0, np.int64), *allowed])
        places = np.repeat(np.array(bound, np.int64), list(map(len, allowed)))
        forbidden_XV[places, ids_of_all] = False
        mask_BNV = devices.tensor(forbidden_XV, logits_BNV.device).view(B, N, V)
        return logits_BNV.masked_fill(mask_BNV, float("-inf"))


def _check_ids(found: Any, length: int, V: int) -> NDArray[np.int64] | None:
    """Return the ids that `allowed` returned after `length` tokens; None if there is no constraint.

    Raises UserError for anything but token ids.
    """
    if found is None:
        return None
    try:
        ids = np.fromiter(map(index, found), np.int64)
    except (TypeError, OverflowError):
        pass
    else:
        if not len(ids) or (ids.min() >= 0 and ids.max() < V):
            return ids
    raise UserError(
        f"allowed() returned {quote(found)} after {length} tokens, expected None or a list of "
        f"token ids, whole numbers from 0 to {V - 1}. Correct the function."
    )


class DraftProcessors:
    """Logits processors for the chains of one proposal.

    A chain may continue past a stop token, where `allowed` need not allow anything.
    """

    def __init__(self, processors: Processors, texts_B: Sequence[Sequence[int]]) -> None:
        self._processors = processors
        self._texts_B = [list(text) for text in texts_B]
        self._held_BX: Tensor | None = None

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """Apply the repetition penalty and `allowed` to the logits after each text and its draft.

        `allowed` is ignored for a row in which it allows nothing, or only tokens with logit -inf.
        """
        processors = self._processors
        if processors.repetition_penalty != 1:
            if self._held_BX is None:
                self._held_BX = text_ids(self._texts_B, logits_BV)
            logits_BV = processors.penalised(logits_BV, self._held_BX)
        if processors.allowed is not None:
            # copies, since the caller's function may keep or change them
            texts_BN = [[list(text)] for text in self._texts_B]
            masked_BNV = processors.masked(logits_BV[:, None], texts_BN, may_end=True)
            silent_B1 = masked_BNV[:, 0].isneginf().all(-1, keepdim=True)
            logits_BV = torch.where(silent_B1, logits_BV, masked_BNV[:, 0])
        return logits_BV

    def add(self, tokens_B: Tensor) -> None:
        """Append a drafted token to each text."""
        if self._held_BX is not None:
            self._held_BX = torch.cat((self._held_BX, tokens_B[:, None]), 1)
        if self._processors.allowed is not None:
            (drawn_B,) = devices.read(tokens_B)
            for text, token in zip(self._texts_B, drawn_B, strict=True):
                text.append(token)


def text_ids(texts_B: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """Return the token ids (B, X) of each text, on the device of the logits (B, ..., V).

    Shorter rows repeat one of their ids.
    """
    ids_B = [list(set(text)) for text in texts_B]
    most = max(len(ids) for ids in ids_B)
    padded = [ids + ids[-1:] * (most - len(ids)) for ids in ids_B]
    return devices.tensor(padded, logits.device).clamp_(max=logits.shape[-1] - 1)


def _on_path(tokens_BN: Tensor, parents_BN: Tensor | None) -> Tensor:
    """Return which nodes (B, N, N) lie on the path to each node, itself included.

    Without parents the nodes are a chain.
    """
    if parents_BN is not None:
        return ancestors(parents_BN)
    B, N = tokens_BN.shape
    return torch.ones(N, N, dtype=torch.bool, device=tokens_BN.device).tril_().expand(B, N, N)


def _ids_at_nodes(held_B1X: Tensor, tokens_BN: Tensor, paths_BNN: Tensor) -> Tensor:
    """Return the token ids (B, N + 1, X + N) of the texts at the tip and at each node."""
    B, N = tokens_BN.shape
    # the node's token replaces the tokens that are not on its path
    on_way_BNN = torch.where(paths_BNN, tokens_BN[:, None], tokens_BN[:, :, None])
    below_tip_BNN = torch.cat((held_B1X[:, :, :1].expand(B, 1, N), on_way_BNN), 1)
    return torch.cat((held_B1X.expand(B, N + 1, -1), below_tip_BNN), 2)


def _texts_at_nodes(
    sequences_B: Sequence[Sequence[int]], tokens_BN: Tensor, paths_BNN: Tensor
) -> list[list[list[int]]]:
    """Return the texts at the tip and at each node; waits for the drafted tokens."""
    drafted, paths = devices.read(tokens_BN, paths_BNN)
    return [
        [list(sequence)] + [[*sequence, *compress(tokens, way)] for way in ways]
        for sequence, tokens, ways in zip(sequences_B, drafted, paths, strict=True)
    ]


def make_processors(repetition_penalty: float, allowed: Allowed | None) -> Processors | None:
    """Return the processors of these settings, or None if they change no logits.

    Raises UserError for an invalid penalty.
    """
    check_value("repetition_penalty", repetition_penalty)
    if repetition_penalty == 1 and allowed is None:
        return None
    return Processors(repetition_penalty, allowed)

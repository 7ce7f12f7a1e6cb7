"""Where the heads of a packed batch look and what they predict, as indices.

Head i (from 0) of the draft that begins at position t reads the target's hidden state h_t, takes in
the tokens at t + 1 .. t + 1 + i and predicts the one at t + 2 + i. It is trained where that token
is supervised and all of them lie in one document of the row; nothing else goes through the head.
The indices are made on the host from what the batch keeps there, and travel with the batch in one
copy that nobody waits for.

Shapes: R rows, T tokens a row, K heads, M drafts (positions where at least one head predicts), O
those that go on from the head's own tokens, N predictions of all heads, P hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from decoding.errors import UserError
from training.data.packing import PackedBatch, Sample
from training.losses.chunked import CHUNK

_SPREAD = 2654435761  # Knuth's multiplicative hash: consecutive positions fall all over 32 bits


@dataclass
class Positions:
    """Indices of one batch on its device."""

    kept_P: Tensor  # of the flattened batch, rising: where the target's hidden states are read
    drafts_M: Tensor  # of kept_P: where drafts begin
    tokens_MK: Tensor  # ids of the true tokens that the heads take in, one after another
    own_O: Tensor  # of the drafts: those that go on from the head's own tokens
    # whether any may: the same on every rank, as ranks that hold weights in shares read them
    # together
    asks_own: bool
    # of the drafts: the one that a prediction belongs to; predictions of one token lie together, or
    # in one chunk of the loss
    draft_N: Tensor
    head_N: Tensor  # its head
    heads: np.ndarray  # the same on the host
    labels_N: Tensor  # ids of the tokens that stand there
    # of kept_P, rising from one chunk of the loss to the next: where the target itself predicts
    # that token; empty where nobody asks
    judges_N: Tensor
    judges: np.ndarray  # the same on the host
    counts_K: list[int]  # predictions of each head
    kept_R: list[int]  # of kept_P, in each row

    def with_tokens(self, said_MK: Tensor) -> "Positions":
        """The same with other tokens behind each draft's position: those taken in, and one more."""
        return replace(
            self, tokens_MK=said_MK[:, :-1], labels_N=said_MK[self.draft_N, self.head_N + 1]
        )


def positions(
    batch: PackedBatch,
    heads: int,
    judged: bool,
    own_tokens: float = 0.0,
    step: int = 0,
    *,
    grouped: bool = False,
) -> Positions:
    """The indices of a batch.

    judged: hidden states of the target's own predictions are wanted too. own_tokens: share of the
    drafts that go on from the head's own tokens, others in every optimizer step, the same ones
    however ranks share the rows. grouped: in every chunk of the loss the predictions of one head
    lie together, for heads with output layers of their own.
    """
    documents_RT, supervised_RT = batch.host.documents_RT, batch.host.supervised_RT
    rows, length = documents_RT.shape
    predicts_KRT = np.zeros((heads, rows, length), dtype=bool)
    for number in range(min(heads, length - 1)):
        ahead = number + 1
        within = documents_RT[:, :-ahead] == documents_RT[:, ahead:]
        predicts_KRT[number, :, :-ahead] = supervised_RT[:, ahead:] & within
    predicts_KF = predicts_KRT.reshape(heads, rows * length)
    drafts = np.flatnonzero(predicts_KF.any(axis=0))
    head, draft = np.nonzero(predicts_KF[:, drafts])
    judges = drafts[draft] + 1 + head
    order = np.argsort(judges, kind="stable")
    if grouped:
        order = order[np.lexsort((head[order], np.arange(len(order)) // CHUNK))]
    head, draft, judges = head[order], draft[order], judges[order]
    kept = np.union1d(drafts, judges) if judged else drafts
    taken = np.minimum(drafts[:, None] + 1 + np.arange(heads), rows * length - 1)
    own = np.flatnonzero(
        (drafts % length + step % 2**16 * length) * _SPREAD % 2**32 < own_tokens * 2**32
    )
    seats = np.searchsorted(kept, judges) if judged else judges[:0]
    kept_P, drafts_M, taken_MK, own_O, draft_N, head_N, judges_N, seats_N = batch.send(
        kept, np.searchsorted(kept, drafts), taken, own, draft, head, judges, seats
    )
    ids_F = batch.ids_RT.flatten()
    return Positions(
        kept_P,
        drafts_M,
        ids_F[taken_MK],
        own_O,
        own_tokens > 0,
        draft_N,
        head_N,
        head,
        batch.next_RT.flatten()[judges_N],
        seats_N,
        seats,
        np.bincount(head, minlength=heads).tolist(),
        np.bincount(kept // length, minlength=rows).tolist(),
    )


def count_kept(mask_T: np.ndarray, heads: int, judged: bool) -> int:
    """How many hidden states `positions` keeps of one document, by its mask alone: documents share
    none.
    """
    # supervised tokens from the third on, before each
    before_T = np.concatenate(([0], np.cumsum(mask_T[2:])))
    begins = np.arange(len(mask_T) - 2)
    kept_T = np.zeros(len(mask_T), dtype=bool)
    kept_T[:-2] = before_T[np.minimum(begins + heads, len(begins))] > before_T[begins]
    if judged:
        kept_T[1:-1] |= mask_T[2:]
    return int(kept_T.sum())


def check_predictions(samples: Sequence[Sample], heads: int) -> None:
    """Raise UserError where no head has anything to predict: its first one is a document's third
    token.
    """
    if not any(sample.mask[2:].any() for sample in samples):
        raise UserError(
            f"zero supervised positions for {heads} heads in {len(samples)} samples: the first "
            f"token that a head can predict is a text's third, and none from there on is "
            f"supervised. Look at the chat template and data.train_on"
        )

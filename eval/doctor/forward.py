"""Predictions of target and drafter for given texts, in the parallel forward pass of training.

Shapes: N predicted tokens of all texts, V the target's vocabulary, T tokens of a text, S powers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoding.models.draft_vocabulary import spread, token_ids
from training.data.packing import PackedBatch, Sample, collate
from training.features.states import TargetStates
from training.heads.kind import HeadKind
from training.heads.positions import positions
from training.heads.predicting import output_layers
from training.objectives import hidden_states

CHUNK = 256  # predictions whose distributions are held at once
NEVER = -1e9  # log probability of a token that cannot be drafted
# powers that sharpen or flatten the drafter's distribution
POWERS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Predictions:
    """What target and drafter predict at the supervised tokens of texts, one after another."""

    text_N: np.ndarray  # index of the text
    place_N: np.ndarray  # index of the predicted token in the text
    label_N: np.ndarray  # the text's token
    best_N: np.ndarray  # the target's likeliest token
    confidence_N: np.ndarray  # its probability
    excess_N: np.ndarray  # -log p of the text's token less the entropy of p, in nats
    ends_N: np.ndarray  # the target's probability of the stop tokens
    undrafted_N: np.ndarray  # the target's probability of tokens that the drafter cannot draft
    drafted_N: np.ndarray  # the drafter's likeliest token
    margin_N: np.ndarray  # nats between its two likeliest tokens
    drafted_ends_N: np.ndarray  # the drafter's probability of the stop tokens

    def among(self, chosen_N: np.ndarray) -> Predictions:
        """Return some of the predictions."""
        return Predictions(*(column[chosen_N] for column in vars(self).values()))


def draft_vocabulary(kind: HeadKind | None, drafter: Any) -> Tensor | None:
    """Return the ids of the tokens that a drafter can draft; None: all."""
    found: Tensor | None = token_ids(drafter) if kind is None else drafter.token_ids_V
    return found


@torch.no_grad()
def predict(
    target: Any,
    kind: HeadKind | None,
    drafter: Any,
    taps: tuple[int, ...],
    samples: Sequence[Sample],
    stops: Sequence[int],
) -> Predictions:
    """Return the predictions of the supervised tokens that training predicts too.

    target: a frozen Hugging Face model with packed attention. drafter: such a model, or a head of
    this kind. taps: the head's layers. Without such tokens all columns are empty.
    """
    ids = draft_vocabulary(kind, drafter)
    vocab_size = target.config.vocab_size
    drafted_V = torch.ones(vocab_size, dtype=torch.bool)
    if ids is not None:
        drafted_V = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids.cpu(), True)
    stops_S = torch.tensor([token for token in stops if token < vocab_size], dtype=torch.long)
    parts = []
    for text_N, places_N, labels_N, p_NV, q_NV in _distributions(
        target, kind, drafter, taps, samples
    ):
        parts.append(
            (
                text_N,
                places_N,
                labels_N,
                *_of_target(p_NV, labels_N, stops_S, drafted_V),
                *_of_drafter(q_NV, stops_S),
            )
        )
    if not parts:
        return Predictions(*(np.zeros(0, dtype=np.int64) for _ in fields(Predictions)))
    columns = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
    return Predictions(*columns)


@dataclass(frozen=True)
class Sharpness:
    """The drafter's distribution raised to POWERS, against the target's, at tokens of texts."""

    text_N: np.ndarray
    overlap_NS: np.ndarray  # sum of min(p, q), the probability that a sampled draft is accepted
    log_q_NS: np.ndarray  # mean of log q over the target's tokens that can be drafted, in nats


@torch.no_grad()
def sharpen(
    target: Any,
    kind: HeadKind | None,
    drafter: Any,
    taps: tuple[int, ...],
    samples: Sequence[Sample],
    temperature: float,
) -> Sharpness:
    """Return how well sharper and flatter distributions of the drafter fit the target's.

    temperature: of the target and the drafter. The other arguments are those of `predict`.
    """
    parts = []
    for text_N, _, _, p_NV, q_NV in _distributions(target, kind, drafter, taps, samples):
        p_NV = (p_NV / temperature).softmax(-1)
        overlaps, logs = [], []
        for power in POWERS:
            sharper_NV = (q_NV * (power / temperature)).log_softmax(-1)
            overlaps.append(torch.minimum(p_NV, sharper_NV.exp()).sum(-1))
            logs.append((p_NV * sharper_NV.nan_to_num(neginf=0.0)).sum(-1))
        parts.append((text_N, torch.stack(overlaps, -1), torch.stack(logs, -1)))
    if not parts:
        return Sharpness(np.zeros(0, dtype=np.int64), *np.zeros((2, 0, len(POWERS))))
    columns = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
    return Sharpness(*columns)


def _distributions(
    target: Any,
    kind: HeadKind | None,
    drafter: Any,
    taps: tuple[int, ...],
    samples: Sequence[Sample],
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Yield text, place and id [N] of predicted tokens, and log p and log q [N, V] there."""
    states = None if kind is None else TargetStates(target, taps=taps, final=False)
    for text, sample in enumerate(samples):
        batch = collate([sample], [[0]], len(sample.ids), next(target.parameters()).device)
        p_TV = _log_softmax(target.get_output_embeddings(), hidden_states(target, batch)[0])
        for places_N, q_NV in _drafts(kind, drafter, states, batch, target.config.vocab_size):
            texts_N, labels_N = torch.full_like(places_N, text), batch.ids_RT[0, places_N]
            yield texts_N, places_N, labels_N, p_TV[places_N - 1], q_NV


def _log_softmax(layer: Any, hidden_TH: Tensor) -> Tensor:
    """Return log p of every place, [T, V]."""
    return torch.cat([layer(part).float().log_softmax(-1) for part in hidden_TH.split(CHUNK)])


def _drafts(
    kind: HeadKind | None,
    drafter: Any,
    states: TargetStates | None,
    batch: PackedBatch,
    vocab_size: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield places [N] of predicted tokens, and log q [N, V] there."""
    if kind is None or states is None:
        places_N = batch.places_N + 1
        hidden_NH = hidden_states(drafter, batch)[0][batch.places_N]
        for part_N, part_NH in zip(places_N.split(CHUNK), hidden_NH.split(CHUNK), strict=True):
            yield part_N, drafter.get_output_embeddings()(part_NH).float().log_softmax(-1)
        return
    depth, several = kind.target_depths, kind.layer_per_depth(drafter)
    where = positions(batch, depth + 1, False, grouped=several, context=kind.reads_context)
    if not len(where.draft_N):
        return
    states_PC = states.select_taps(states.read(batch, where))
    features_NE = kind.features(drafter, states, batch, where, states_PC)
    outputs = output_layers(kind, drafter, states, where)
    begins_N = where.kept_P[where.drafts_M[where.draft_N]]
    for start in range(0, len(features_NE), CHUNK):
        end = min(start + CHUNK, len(features_NE))
        chosen_N = where.head_N[start:end] == depth
        logits_NV = outputs.logits(features_NE, start, end).float()[chosen_N]
        logits_NV = spread(logits_NV, drafter.token_ids_V, vocab_size, float("-inf"))
        yield begins_N[start:end][chosen_N] + 2 + depth, logits_NV.log_softmax(-1)


def _of_target(
    p_NV: Tensor, labels_N: Tensor, stops_S: Tensor, drafted_V: Tensor
) -> tuple[Tensor, ...]:
    """Return the columns of the target, from `best_N` to `undrafted_N`."""
    confidence_N, best_N = p_NV.max(-1)
    entropy_N = torch.special.entr(p_NV.exp()).sum(-1)
    excess_N = -p_NV.gather(1, labels_N[:, None])[:, 0] - entropy_N
    probabilities_NV = p_NV.exp()
    ends_N = probabilities_NV[:, stops_S.to(p_NV.device)].sum(-1)
    undrafted_N = probabilities_NV[:, ~drafted_V.to(p_NV.device)].sum(-1)
    return best_N, confidence_N.exp(), excess_N, ends_N, undrafted_N


def _of_drafter(q_NV: Tensor, stops_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the columns of the drafter, from `drafted_N` on."""
    two_N2, tokens_N2 = q_NV.clamp_min(NEVER).topk(2, dim=-1)
    ends_N = q_NV[:, stops_S.to(q_NV.device)].exp().sum(-1)
    return tokens_N2[:, 0], two_N2[:, 0] - two_N2[:, 1], ends_N

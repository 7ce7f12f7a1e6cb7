"""The layout probe: whether a head reads its target's layers and slots as its folder says.

A head whose taps are read one layer off, or whose slots are read one token off, still decodes
losslessly: only its acceptance is low. The same key of config.json is read one layer apart by
different servers, and two layouts of blocks differ by one token. So the probe predicts the tokens
of a text that the target wrote, with the taps shifted by -1, 0 and +1 layers, and compares each
prediction with the text's tokens at neighbouring places. It also predicts them in the other layout
of blocks, in which the first slot has another part, so that it is no mere shift, at each shift of
the taps. The best reading must explain the text better than the text's commonest token. A folder is
refused if another reading than its own is better by more than three standard errors and by more
than 0.05 nats a token. A smaller sure gain is only a warning: a head that is read correctly may
gain as much from a neighbouring layer, whose states are alike. So is a neighbouring layer that is
as good as the folder's: heads of little training read both alike, and then the probe cannot tell.

Shapes: C channels, N predictions, V drafted vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decoding.errors import UserError
from training.data.packing import PackedBatch, Sample, best_fit, collate
from training.draft_vocabulary import index_tokens
from training.features.states import TargetStates
from training.features.taps import Layers
from training.heads.positions import Positions, positions
from training.heads.predicting import PredictingHead, output_layers
from training.losses.chunked import CHUNK

DEPTHS = 2  # drafted tokens that are compared, if a head drafts as many
SHIFTS = (-1, 0, 1)  # of the taps, in layers, and of the predicted token, in places
LEAST = 30  # predictions that are compared
LEAST_LOG_Q = -20.0  # of a token that a head with candidates cannot draft
LEAST_GAIN = 0.05  # nats by which a reading is better than that of a wrong folder
SURE = 3.0  # standard errors between two readings that tell them apart


@dataclass(frozen=True)
class Reading:
    """How well a head explains a text if its taps and slots are read in one way."""

    layers: int  # by which all taps are shifted
    places: int  # by which the predicted token comes later than the folder says
    agreement: float  # share of predictions whose likeliest token is the text's
    log_q_N: np.ndarray  # log probability of the text's token, in nats
    layout: str = ""  # of the slots; empty: that of the folder

    @property
    def score(self) -> float:
        """Return the mean log probability."""
        return float(self.log_q_N.mean()) if len(self.log_q_N) else -math.inf

    @property
    def as_stored(self) -> bool:
        """Return whether this is the reading of the folder."""
        return self.layers == self.places == 0 and not self.layout


@dataclass(frozen=True)
class Probe:
    """The readings of a head on one text."""

    readings: list[Reading]
    commonest: float  # share of the text's commonest token, which agrees without any head

    @property
    def best(self) -> Reading:
        """Return the reading with the highest mean log probability."""
        return max(self.readings, key=lambda reading: reading.score)

    @property
    def stored(self) -> Reading:
        """Return the reading of the folder."""
        return next(reading for reading in self.readings if reading.as_stored)

    @property
    def chance(self) -> float:
        """Return the largest agreement that the commonest token alone may reach."""
        share, predictions = self.commonest, max(len(self.best.log_q_N), 1)
        return share + SURE * math.sqrt(share * (1 - share) / predictions)

    @property
    def is_explained(self) -> bool:
        """Return whether the best reading explains more than the commonest token does."""
        return self.best.agreement > self.chance

    @property
    def is_misread(self) -> bool:
        """Return whether another reading than the folder's explains the text much better."""
        return self._is_surely_better and self.gain > LEAST_GAIN

    @property
    def is_doubtful(self) -> bool:
        """Return whether another reading is surely better, but by no more than LEAST_GAIN."""
        return self._is_surely_better and self.gain <= LEAST_GAIN

    @property
    def alike(self) -> list[Reading]:
        """Return the readings of neighbouring layers that are not surely and much worse."""
        others = [one for one in self.readings if one.layers and not (one.places or one.layout)]
        differences = [self.stored.log_q_N - one.log_q_N for one in others]
        worse = [each.mean() > LEAST_GAIN and _standard_errors(each) > SURE for each in differences]
        return [one for one, is_worse in zip(others, worse, strict=True) if not is_worse]

    @property
    def gain(self) -> float:
        """Return the nats a token by which the best reading is better than the folder's."""
        return self.best.score - self.stored.score

    @property
    def _is_surely_better(self) -> bool:
        return _standard_errors(self.best.log_q_N - self.stored.log_q_N) > SURE

    def table(self) -> str:
        """Return the readings as lines of text."""
        lines = ["taps shifted  token shifted  agreement  nats"]
        lines += [
            f"{one.layers:+12d}  {one.places:+13d}  {one.agreement:9.3f}  {one.score:7.2f}"
            f"{f'  as {one.layout}' if one.layout else ''}"
            for one in self.readings
        ]
        lines.append(f"the text's commonest token alone: {self.commonest:.3f}")
        return "\n".join(lines)


def probe(
    kind: PredictingHead,
    head: Any,
    taps: Layers,
    target: Any,
    samples: Sequence[Sample],
    device: torch.device,
    longest_draft: int | None = None,
) -> Probe:
    """Read a head in every way that its target allows, on texts of the target.

    taps: the head's layers; () for the state after the final norm. target: a frozen Hugging Face
    causal LM with packed attention. longest_draft: number of tokens that the head can draft;
    None: any.
    """
    depths = DEPTHS + kind.target_depths
    depths = min(depths, longest_draft or depths)
    last, length = target.config.num_hidden_layers, max(len(sample.ids) for sample in samples)
    rows = best_fit([len(sample.ids) for sample in samples], length)
    batches = [collate(samples, [row], length, device) for row in rows]
    readings: list[Reading] = []
    commonest = 0.0
    for layout, read in {"": head, **kind.other_layouts(head)}.items():
        for layers in SHIFTS:
            shifted = tuple(layer + layers for layer in taps or (last,))
            if not all(0 <= layer <= last for layer in shifted):
                continue
            states = TargetStates(target, taps=shifted, final=False)
            found = [_predict(kind, read, states, batch, depths) for batch in batches]
            q_NS, right_NS = (np.concatenate(part) for part in zip(*(one[:2] for one in found)))
            labels_N = np.concatenate([one[2] for one in found])
            commonest = float(np.bincount(labels_N, minlength=1).max() / max(len(labels_N), 1))
            for column, places in enumerate(SHIFTS):
                # a shift of places is another description of the other layout of blocks
                if places == 0 or not layout:
                    agreement = float(right_NS[:, column].sum()) / max(len(right_NS), 1)
                    readings.append(Reading(layers, places, agreement, q_NS[:, column], layout))
    return Probe(readings, commonest)


def choose_layout(found: Probe, name: str) -> str:
    """Return the layout of slots that fits a folder without one; empty: that of the stored reading.

    name: the head's folder. Raises UserError if no layout explains the text, or both alike.
    """
    check_explained(found, name)
    best: dict[str, Reading] = {}
    for one in found.readings:
        if one.places == 0 and (one.layout not in best or one.score > best[one.layout].score):
            best[one.layout] = one
    chosen, *others = sorted(best.values(), key=lambda one: one.score, reverse=True)
    for other in others:
        difference_N = chosen.log_q_N - other.log_q_N
        if difference_N.mean() <= LEAST_GAIN or _standard_errors(difference_N) <= SURE:
            raise UserError(
                f"the layouts of the blocks of {name} explain the target's text alike: they differ "
                f"by {difference_N.mean():.3f} nats a token in {len(difference_N)} predictions. "
                f"Ask whoever trained it for the layout, and give it as layout=."
            )
    return chosen.layout


def check_reading(found: Probe, name: str) -> None:
    """Raise UserError if another reading explains the text better, or if none does.

    name: the head's folder.
    """
    check_explained(found, name)
    best, stored = found.best, found.stored
    if found.is_misread:
        raise UserError(
            f"{name} is read in the wrong layout: its predictions agree with "
            f"{stored.agreement:.1%} of the target's text, and with {best.agreement:.1%} if "
            f"{_describe(best)}. Correct config.json, or convert the head again from the tool that "
            f"trained it."
        )


def check_explained(found: Probe, name: str) -> None:
    """Raise UserError if no reading explains the text. name: the head's folder."""
    best = found.best
    predictions = len(best.log_q_N)
    if predictions < LEAST:
        raise UserError(
            f"{name} can draft few of the tokens of the target's text: {predictions} predictions "
            f"can be compared, expected {LEAST} or more. Its draft vocabulary is of another "
            f"tokenizer, or of other texts."
        )
    if not found.is_explained:
        raise UserError(
            f"no reading of its taps and slots explains {name}: its predictions agree with "
            f"{best.agreement:.1%} of {predictions} tokens of the target's text, and the text's "
            f"commonest token alone with {found.commonest:.1%}. It is untrained, or of another "
            f"target."
        )


def describe_doubt(found: Probe) -> str:
    """Return a warning if other layers explain the text as well as the folder's; "" if none do."""
    if not found.is_doubtful:
        if found.is_misread or not found.alike:
            return ""
        changes = [
            f"{one.score - found.stored.score:+.3f} if {_describe(one)}" for one in found.alike
        ]
        return (
            f"neighbouring layers explain the target's text as well as the head's own. Its log "
            f"likelihood, in nats a token, changes by {', and by '.join(changes)}; a change below "
            f"{LEAST_GAIN}, or below {SURE:g} standard errors, is no evidence. The layers may be "
            f"numbered one off: compare the numbers with those of the tool that trained the head, "
            f"or train it longer."
        )
    return (
        f"the target's text is {found.gain:.3f} nats a token more likely if "
        f"{_describe(found.best)}. That is surely more, but a head that is read correctly may gain "
        f"up to {LEAST_GAIN} nats from a neighbouring layer. Compare the numbers of its layers "
        f"with those of the tool that trained it."
    )


def _describe(reading: Reading) -> str:
    """Describe what differs from the folder."""
    parts = [f"its blocks have the layout {reading.layout}"] if reading.layout else []
    if reading.layers:
        order = "later" if reading.layers > 0 else "earlier"
        parts.append(
            f"its taps are read one layer {order} (hidden_states[i{reading.layers:+d}] for i)"
        )
    if reading.places:
        order = "later" if reading.places > 0 else "earlier"
        parts.append(f"its slots predict the token one place {order} (another block layout)")
    return " and ".join(parts)


def _standard_errors(difference_N: np.ndarray) -> float:
    """Return a mean in units of its standard error."""
    error = float(difference_N.std()) / math.sqrt(len(difference_N))
    return float(difference_N.mean()) / max(error, 1e-12)


@torch.no_grad()
def _predict(
    kind: PredictingHead, head: Any, states: TargetStates, batch: PackedBatch, depths: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log q [N, S] of the text's tokens at all SHIFTS, whether they are likeliest, labels.

    Left out are predictions that lack a token at one of the shifts, those of which the head can
    draft none of the tokens, and the target's own; a single token that the head cannot draft counts
    as its least likely one.
    """
    several = kind.layer_per_depth(head)
    where = positions(batch, depths, False, grouped=several, context=kind.reads_context)
    states_PC = states.select_taps(states.read(batch, where))
    features_NE = kind.features(head, states, batch, where, states_PC)
    outputs = output_layers(kind, head, states, where)
    tokens_NS, inside_N = _tokens(batch, where)
    indices_NS = tokens_NS
    if head.token_ids_V is not None:
        indices_NS = index_tokens(head.token_ids_V, states.vocab_size)[tokens_NS]
    known_NS = indices_NS >= 0
    known_N = inside_N & known_NS.any(dim=1) & (where.head_N >= kind.target_depths)
    log_q, right = [], []
    for start in range(0, len(features_NE), CHUNK):
        end = min(start + CHUNK, len(features_NE))
        logits_NV = outputs.logits(features_NE, start, end)
        chosen_NS = indices_NS[start:end].clamp_min(0)
        log_q_NV = logits_NV.log_softmax(dim=-1).clamp_min(LEAST_LOG_Q)
        least_N1 = log_q_NV.amin(dim=-1, keepdim=True)
        log_q.append(log_q_NV.gather(1, chosen_NS).where(known_NS[start:end], least_N1))
        right.append((log_q_NV.argmax(dim=-1, keepdim=True) == chosen_NS) & known_NS[start:end])
    middle = SHIFTS.index(0)
    return (
        torch.cat(log_q)[known_N].double().cpu().numpy(),
        torch.cat(right)[known_N].cpu().numpy(),
        tokens_NS[known_N, middle].cpu().numpy(),
    )


def _tokens(batch: PackedBatch, where: Positions) -> tuple[Tensor, Tensor]:
    """Return the text's tokens [N, S] around each predicted one, and whether all are in it."""
    shifts_S = torch.tensor(SHIFTS, device=batch.device)
    begins_N = where.kept_P[where.drafts_M[where.draft_N]]
    places_NS = (begins_N + 2 + where.head_N)[:, None] + shifts_S
    inside_NS = places_NS < batch.ids_RT.numel()
    places_NS = places_NS.clamp_max(batch.ids_RT.numel() - 1)
    documents_F = batch.documents_RT.flatten()
    inside_NS &= documents_F[places_NS] == documents_F[begins_N, None]
    return batch.ids_RT.flatten()[places_NS], inside_NS.all(dim=1)

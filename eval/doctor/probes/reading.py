"""Probes of how the drafter is read: layers and slots of a head, and training against drafting."""

from __future__ import annotations

import math

import numpy as np
import torch

from eval.doctor.estimates import Counts, Estimate, difference, is_sure
from eval.doctor.findings import FAULT, Finding, fine, unknown
from eval.doctor.subject import Subject
from eval.doctor.texts import answer_samples, served_predictions
from training.heads.probe import LEAST, Probe, Reading, probe

# Nats between two tokens that rounding may swap.
TIE = 1e-3


def check_layout(subject: Subject) -> Finding:
    """Read a head with its taps and slots shifted, on the target's answers."""
    kind = subject.kind
    if kind is None:
        return fine("taps", "a model, which reads no layers of its target", "no layers")
    head, shape = subject.draft_model, subject.shape
    samples = answer_samples(subject.greedy)
    found = probe(
        kind,
        head,
        kind.taps(shape),
        subject.model,
        samples,
        torch.device(subject.device),
        kind.longest_draft(shape),
    )
    stored = found.stored
    if len(stored.log_q_N) < LEAST:
        return unknown(
            "taps", f"needs {LEAST} predictions of tokens that it drafts, and longer answers"
        )
    if not found.is_explained:
        return _unexplained(found)
    if found.is_misread:
        return _misread(found)
    return fine(
        "taps",
        f"predicts {stored.agreement:.3f} of the answers' tokens as stored",
        f"{_second(found).agreement:.3f} for the best other reading",
    )


def _unexplained(found: Probe) -> Finding:
    """Return the finding of a head that no reading explains."""
    return Finding(
        "untrained",
        FAULT,
        f"predicts {found.best.agreement:.3f} of the answers' tokens in its best reading",
        f"more than {found.commonest:.3f}, the share of the commonest token",
        "Use the target that the head was trained for, or train it",
    )


def _misread(found: Probe) -> Finding:
    """Return the finding of a head that is read in the wrong layout."""
    stored, best = found.stored, found.best
    cause = "shift" if best.places or best.layout else "taps"
    parts = [f"blocks have the layout {best.layout}"] if best.layout else []
    if best.places:
        parts.append(f"slots predict the token {_steps(best.places, 'place')}")
    if best.layers:
        parts.append(f"taps are read {_steps(best.layers, 'layer')}")
    return Finding(
        cause,
        FAULT,
        f"predicts {stored.agreement:.3f} of the answers' tokens, read as config.json says",
        f"{best.agreement:.3f} if its {' and its '.join(parts)}",
        "Correct config.json, or convert the head again from the tool that trained it",
        _gain(best, stored),
        "predicted in every reading",
    )


def _steps(shift: int, unit: str) -> str:
    return f"one {unit} {'later' if shift > 0 else 'earlier'}"


def _gain(best: Reading, stored: Reading) -> Estimate:
    """Return the agreement that the stored reading loses."""
    count = len(best.log_q_N)
    variance = sum(one.agreement * (1 - one.agreement) for one in (best, stored)) / count
    return Estimate(best.agreement - stored.agreement, math.sqrt(variance), count - 1)


def _second(found: Probe) -> Reading:
    return max((one for one in found.readings if not one.as_stored), key=lambda one: one.score)


def check_cache(subject: Subject) -> Finding:
    """Compare the first token of each draft with training's parallel forward at the same place."""
    served = subject.greedy
    if not served.first:
        return unknown("cache", "needs a drafter of chains")
    found = served_predictions(subject)
    places = zip(found.text_N, found.place_N, strict=True)
    lengths = [len(prompt) for prompt in served.prompts]
    drafted = [served.first.get((text, place - lengths[text]), -1) for text, place in places]
    first_N = np.asarray(drafted)
    known_N = (first_N >= 0) & (found.margin_N > TIE)
    if not known_N.any():
        return unknown("cache", "needs answers of some tokens")
    found, first_N = found.among(known_N), first_N[known_N]
    differ = float((first_N != found.drafted_N).mean())
    ones, tested_P = np.ones(len(first_N)), len(served.prompts)

    def counts(right_N: np.ndarray) -> Counts:
        columns = (np.bincount(found.text_N, values, tested_P) for values in (right_N, ones))
        return Counts(*columns)

    drafting = counts((first_N == found.label_N).astype(float))
    training = counts((found.drafted_N == found.label_N).astype(float))
    loss = difference(training, drafting)
    if differ == 0 or not is_sure(loss):
        words = f"{1 - differ:.1%} of first tokens equal those of training's forward"
        return fine("cache", words, "100 %")
    return Finding(
        "cache",
        FAULT,
        f"{drafting.rate:.3f} of first tokens right in drafting, {differ:.0%} of them others than "
        f"training's",
        f"{training.rate:.3f}, as in training's forward at the same places",
        "A fault of the drafter's code, cache or kernel: please report it with this page",
        loss,
        "both predicted at the same places",
    )

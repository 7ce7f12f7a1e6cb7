"""Texts of an examination as samples: the target's answers, and the training chats."""

from __future__ import annotations

import numpy as np

from eval.doctor.forward import Predictions, Sharpness, predict, sharpen
from eval.doctor.serving import Served
from eval.doctor.subject import Subject
from training.data.packing import Sample
from training.data.samples import ChatRules, chat_samples

_LONGEST = 1024  # tokens of a training chat that are examined, if its training is not here


def answer_samples(served: Served) -> list[Sample]:
    """Return prompts with their answers, which alone are supervised."""
    samples = []
    for prompt, answer in zip(served.prompts, served.answers, strict=True):
        ids = np.asarray([*prompt, *answer], dtype=np.int32)
        samples.append(Sample(ids, np.arange(len(ids)) >= len(prompt)))
    return samples


def training_samples(subject: Subject) -> list[Sample]:
    """Return the training chats as the training reads them, answers alone supervised."""
    data = subject.training.get("data", {})
    length = int(data.get("max_length", min(_LONGEST, subject.target_context)))
    tokenizer, template = subject.usual.tokenizer, subject.usual.template
    samples, _ = chat_samples(
        tokenizer, subject.chats, ChatRules(template, length, "answers"), max_bad=1.0
    )
    return [Sample(one.ids, one.mask) for one in samples]


def served_predictions(subject: Subject) -> Predictions:
    """Return the predictions of the greedy answers, once."""
    return _predictions(subject, "served")


def training_predictions(subject: Subject) -> Predictions:
    """Return the predictions of the training chats, once."""
    return _predictions(subject, "training")


def sharpness(subject: Subject) -> Sharpness:
    """Return how well powers of the drafter's distribution fit the answers as they are served."""
    kind = subject.kind
    return sharpen(
        subject.model,
        kind,
        subject.draft_model,
        () if kind is None else kind.taps(subject.shape),
        answer_samples(subject.serve()),
        subject.config.temperature,
    )


def _predictions(subject: Subject, what: str) -> Predictions:
    if what not in subject.predictions:
        samples = answer_samples(subject.greedy) if what == "served" else training_samples(subject)
        kind = subject.kind
        subject.predictions[what] = predict(
            subject.model,
            kind,
            subject.draft_model,
            () if kind is None else kind.taps(subject.shape),
            samples,
            subject.stop_token_ids,
        )
    return subject.predictions[what]

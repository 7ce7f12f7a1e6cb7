"""Probes of what was learned: draft vocabulary, end tokens, the training's text, and new text.

Shapes: N predicted tokens, P prompts or texts, S strata, V vocabulary.
"""

from __future__ import annotations

import numpy as np

from eval.doctor.estimates import Estimate, is_sure, mean_by_prompt
from eval.doctor.findings import FAULT, Finding, fine, unknown
from eval.doctor.forward import Predictions, draft_vocabulary
from eval.doctor.subject import Subject
from eval.doctor.texts import served_predictions, training_predictions, training_samples
from training.data.packing import Sample
from training.draft_vocabulary import choose_tokens

# Nats a token by which the training's text may be less likely than the target's own.
LEAST_EXCESS = 0.1
LEAST_ENDS = 3
STRATA = 5  # of the target's confidence, within which texts are compared


def check_vocabulary(subject: Subject) -> Finding:
    """Compare the draft vocabulary's misses with those of one chosen from other such text."""
    ids = draft_vocabulary(subject.kind, subject.draft_model)
    if ids is None:
        return fine("vocabulary", "every token of the target can be drafted", "every token")
    served = subject.serve()
    vocab_size = subject.model.config.vocab_size
    samples = [
        Sample(np.asarray(answer, dtype=np.int32), np.ones(len(answer), dtype=bool))
        for answer in served.answers
    ]
    known = training_samples(subject) if subject.chats else []
    stops = subject.stop_token_ids
    ours_V = np.zeros(vocab_size, dtype=bool)
    ours_V[ids.cpu().numpy()] = True
    missed_P, spared_P, tested_P = (np.zeros(len(samples)) for _ in range(3))
    tests = served.tests
    for half in (0, 1):
        others = [one for index, one in enumerate(samples) if index % 2 != half]
        best = choose_tokens([*others, *known], vocab_size, len(ids), False, stops)
        best_V = np.zeros(vocab_size, dtype=bool)
        best_V[best.numpy()] = True
        here_E = tests.prompt_E % 2 == half
        for sums_P, chosen_E in (
            (missed_P, here_E & ~ours_V[tests.token_E]),
            (spared_P, here_E & ~best_V[tests.token_E]),
            (tested_P, here_E),
        ):
            sums_P += np.bincount(tests.prompt_E[chosen_E], minlength=len(samples))
    tested = float(tested_P.sum())
    accepted = served.counts.rate * tested / max(tested - float(missed_P.sum()), 1.0)
    more = mean_by_prompt(missed_P - spared_P, tested_P)
    loss = Estimate(more.value * accepted, more.error * accepted, more.freedom)
    undrafted_N = served_predictions(subject).undrafted_N
    mass = float(undrafted_N.mean()) if len(undrafted_N) else 0.0
    found = (
        f"{missed_P.sum() / tested:.1%} of tested tokens cannot be drafted ({mass:.1%} of the "
        f"target's probability)"
    )
    expected = (
        f"{spared_P.sum() / tested:.1%} with the {len(ids):,} commonest of other such answers"
    )
    if not is_sure(loss):
        return fine("vocabulary", found, expected, loss)
    return Finding(
        "vocabulary",
        FAULT,
        found,
        expected,
        "Choose the draft vocabulary from answers such as those served, and train again",
        loss,
        "counted, half of the prompts against the other half",
    )


def check_ends(subject: Subject) -> Finding:
    """Compare the drafter's probability of the end of an answer with the target's."""
    served, found = subject.greedy, served_predictions(subject)
    ended = sum(served.ended)
    if ended < LEAST_ENDS:
        return unknown("ends", f"needs {LEAST_ENDS} answers that end (found {ended})")
    size = len(served.prompts)
    ours_P = np.bincount(found.text_N, found.drafted_ends_N, size)
    theirs_P = np.bincount(found.text_N, found.ends_N, size)
    counts_P = np.bincount(found.text_N, minlength=size).astype(float)
    # half of the target's probability, beyond doubt: cross-entropy fits the sum of all places
    short = mean_by_prompt(theirs_P / 2 - ours_P, counts_P)
    words = (
        f"expects {ours_P.sum():.2f} end tokens in all answers, by its probabilities",
        f"{theirs_P.sum():.2f}, by the target's",
    )
    tests = served.tests
    ends_E = np.isin(tests.token_E, subject.stop_token_ids)
    at_ends, elsewhere = tests.counts(size, ends_E), tests.counts(size, ~ends_E)
    # a drafter that is wrong everywhere has another fault
    rejected_P = at_ends.tested_P - at_ends.accepted_P
    lost_P = rejected_P - (1 - elsewhere.rate) * at_ends.tested_P
    loss = mean_by_prompt(lost_P, served.counts.tested_P)
    if short.low <= 0 or not is_sure(loss):
        return fine("ends", *words, loss)
    return Finding(
        "ends",
        FAULT,
        *words,
        "Keep the end tokens of the training's answers: check its template and data.max_length",
        loss,
        "rejected end tokens beyond the share that is rejected elsewhere",
    )


def check_on_policy(subject: Subject) -> Finding:
    """Test whether the target can have written the training's answers.

    The expected -log p of a token sampled at temperature 1 is the entropy of p, so its excess has
    mean 0 on the target's own text, and less at lower temperatures.
    """
    if not subject.chats:
        return unknown("off_policy", "needs the training's chats (chats=)")
    found = training_predictions(subject)
    if not len(found.label_N):
        return unknown("off_policy", "needs chats that the training's template renders")
    size = int(found.text_N.max()) + 1
    excess = mean_by_prompt(
        np.bincount(found.text_N, found.excess_N, size),
        np.bincount(found.text_N, minlength=size).astype(float),
    )
    agree = float((found.best_N == found.label_N).mean())
    side = "less" if excess.value >= 0 else "more"
    words = (
        f"its answers are {abs(excess.value):.2f} nats a token {side} likely than the target's own "
        f"({agree:.0%} of tokens its likeliest)"
    )
    if not is_sure(excess, LEAST_EXCESS):
        return fine("off_policy", words, "no less likely than its own")
    return Finding(
        "off_policy",
        FAULT,
        words,
        "0 or less, if the target had written them",
        "Let the target answer the training's prompts (distill.regenerate), and train again",
    )


def check_new_text(subject: Subject) -> Finding:
    """Compare the drafter on its training's text and on the target's new answers.

    Texts differ in difficulty, so places of about the same confidence of the target are compared.
    """
    if not subject.chats:
        return unknown("new_text", "needs the training's chats (chats=)")
    trained, new = training_predictions(subject), served_predictions(subject)
    length = subject.training.get("data", {}).get("max_length")
    if length:
        new = new.among(new.place_N < length)
    ids = draft_vocabulary(subject.kind, subject.draft_model)
    if ids is not None:
        known = ids.cpu().numpy()
        trained, new = (one.among(np.isin(one.best_N, known)) for one in (trained, new))
    loss, right = _stratified(trained, new)
    if loss is None:
        return unknown("new_text", "needs more text of both")
    found = f"{right:.3f} of the target's likeliest tokens on new answers"
    expected = f"{right + loss.value:.3f} on the training's text, at equal confidence of the target"
    if not is_sure(loss):
        return fine("new_text", found, expected, loss)
    return Finding(
        "new_text",
        FAULT,
        found,
        expected,
        "Train on more and other chats, such as those served; fewer passes over these",
        loss,
        "predicted on both texts",
    )


def _stratified(trained: Predictions, new: Predictions) -> tuple[Estimate | None, float]:
    """Return the agreement lost on new text, and the agreement there, over common strata."""
    edges = np.quantile(new.confidence_N, np.arange(1, STRATA) / STRATA) if len(new.label_N) else []
    strata = [np.searchsorted(edges, one.confidence_N) for one in (trained, new)]
    counts = [np.bincount(stratum_N, minlength=STRATA) for stratum_N in strata]
    common_S = (counts[0] > 0) & (counts[1] > 0)
    if not common_S.any():
        return None, 0.0
    weights_S = np.where(common_S, counts[1], 0) / counts[1][common_S].sum()
    value, variance, freedom, rights = 0.0, 0.0, [], []
    for one, stratum_N, count_S, sign in zip((trained, new), strata, counts, (1, -1), strict=True):
        right_N = (one.drafted_N == one.best_N).astype(float)
        size = int(one.text_N.max()) + 1
        deviations_P, mean = np.zeros(size), 0.0
        for stratum in np.flatnonzero(common_S):
            here_N = stratum_N == stratum
            share = right_N[here_N].mean()
            mean += weights_S[stratum] * share
            deviations_P += (
                weights_S[stratum]
                / count_S[stratum]
                * np.bincount(one.text_N[here_N], right_N[here_N] - share, size)
            )
        texts = len(np.unique(one.text_N))
        value += sign * mean
        variance += float((deviations_P**2).sum()) * texts / max(texts - 1, 1)
        freedom.append(texts - 1)
        rights.append(float(mean))
    return Estimate(value, variance**0.5, min(freedom)), rights[1]

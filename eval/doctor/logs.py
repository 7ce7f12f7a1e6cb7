"""Logged answers as samples of prompt and answer, and the refusal of those of another target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from decoding.errors import UserError
from decoding.models.folder import read_config
from eval.doctor.estimates import is_sure, mean_by_prompt
from eval.doctor.subject import LEAST_PROMPTS, Subject
from eval.logged.entries import Entry, Log
from eval.logged.reading import read_log
from eval.logged.texts import LoggedText, Reader
from eval.measure.benchmarks import spread
from training.data.packing import Sample, collate
from training.objectives import hidden_states

MOST_FOREIGN = 0.1  # nats a token, as for the answers of a training (probes/learning.py)
MOST_OTHER = 0.05  # share of greedy tokens that are not the target's likeliest: near ties are fewer


def read_answers(subject: Subject, path: str) -> list[Sample]:
    """Return at most max_chats answers from all over a log, in its order.

    Each sample is a prompt and its answer, of which the answer alone is supervised. Answers with
    fewer than two tokens within the target's context are left out. Raises UserError for a malformed
    log, too few answers, and those of another target or temperature.
    """
    config = subject.config
    log = read_log(path)
    reader = Reader(
        log,
        dataclasses.replace(log.benchmark or config.benchmark, turns="all"),
        subject.tokenizer,
        int(read_config(subject.target_folder)["vocab_size"]),
        subject.stop_token_ids,
    )
    chosen, _ = spread(_at_temperature(log, path, config.temperature), config.max_chats)
    samples = [_sample(text, subject.target_context) for text in reader.read(entries=chosen).texts]
    samples = [one for one in samples if int(one.mask.sum()) >= 2]
    if len(samples) < LEAST_PROMPTS:
        raise UserError(
            f"{path} has {len(samples)} answers of two tokens or more, expected {LEAST_PROMPTS} or "
            f"more: errors come from the spread over answers."
        )
    _refuse_foreign(subject, path, samples)
    return samples


def _at_temperature(log: Log, path: str, temperature: float) -> list[Entry]:
    """Return the answers that were sampled at a temperature, or at one that is not logged."""
    found = [one for one in log.entries if one.temperature in (None, temperature)]
    if not found:
        others = sorted({one.temperature for one in log.entries if one.temperature is not None})
        raise UserError(
            f"{path} holds answers at temperature {', '.join(f'{one:g}' for one in others)}, and "
            f"temperature is {temperature:g}. Set temperature= to that of the answers to examine."
        )
    return found


def _sample(text: LoggedText, max_length: int) -> Sample:
    ids = np.asarray(text.ids[:max_length], dtype=np.int32)
    return Sample(ids, np.arange(len(ids)) >= len(text.prompt))


def _refuse_foreign(subject: Subject, path: str, samples: Sequence[Sample]) -> None:
    """Raise UserError for answers that the target cannot have written at this temperature.

    A token sampled from p has -log p equal to the entropy of p in the mean; a greedy one is the
    likeliest.
    """
    temperature = subject.config.temperature
    sums, counts = np.transpose([_surprise(subject.model, one, temperature) for one in samples])
    found = mean_by_prompt(sums, counts)
    if not is_sure(found, MOST_FOREIGN if temperature else MOST_OTHER):
        return
    what = (
        f"{found.value:.2f} nats a token less likely than what it samples at temperature "
        f"{temperature:g}"
        if temperature
        else f"to {found.value:.0%} of other tokens than its likeliest, which it writes greedily"
    )
    raise UserError(
        f"{path} holds answers that {subject.config.target.path} cannot have written: they are "
        f"{what}. Set target.path (drift_against_target for older logs) to the target that wrote "
        f"them, temperature= to that of its sampling, and benchmark.chat_template= to its template."
    )


@torch.no_grad()
def _surprise(model: Any, sample: Sample, temperature: float) -> tuple[float, int]:
    """Return the sum over an answer's tokens of how foreign they are, and their number.

    That is -log p less the entropy of p in nats or, of greedy answers, 1 for each token that is not
    the likeliest.
    """
    batch = collate([sample], [[0]], len(sample.ids), next(model.parameters()).device)
    logits_NV = model.get_output_embeddings()(batch.at_supervised(hidden_states(model, batch)))
    next_N = batch.at_supervised(batch.next_RT)
    if not temperature:
        return float((logits_NV.argmax(-1) != next_N).sum()), len(next_N)
    log_p_NV = (logits_NV.float() / temperature).log_softmax(-1)
    entropy_N = torch.special.entr(log_p_NV.exp()).sum(-1)
    return float((-log_p_NV.gather(1, next_N[:, None])[:, 0] - entropy_N).sum()), len(next_N)

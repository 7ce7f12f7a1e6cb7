"""Probes of serving, measured both ways: template, system prompt, temperature, dtype, context."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from decoding.drafters.chain import ChainDrafter
from eval.doctor.estimates import (
    Counts,
    Estimate,
    difference,
    difference_of_groups,
    is_sure,
    mean_by_prompt,
)
from eval.doctor.findings import FAULT, Finding, fine, unknown
from eval.doctor.forward import POWERS
from eval.doctor.serving import Served
from eval.doctor.subject import EXACT, Conditions, Rendering, Subject
from eval.doctor.texts import sharpness
from training.data.readers import Chat

# what models write around thoughts; templates may write the first mark into the prompt
THOUGHTS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<|channel|>analysis")


def check_template(subject: Subject) -> Finding:
    """Decode with the training's template, if prompts rendered by it differ."""
    if subject.as_text:
        return fine("template", "prompts are plain text", "no template")
    trained = subject.trained_template
    if trained is None:
        return unknown("template", "needs a drafter folder with its card and a chat template")
    serving = subject.serving
    if subject.render(serving) == subject.render(Rendering(serving.system, *trained)):
        return fine("template", "prompts have the training's tokens", "the same tokens")
    return _compared(
        subject,
        "template",
        "the serving template",
        "the training's template",
        "Serve with the template of the drafter's folder, or regenerate and train with this one",
    )


def check_system(subject: Subject) -> Finding:
    """Decode with the system prompt of the training chats, if serving has another."""
    if subject.as_text:
        return fine("system", "prompts are plain text", "no system prompt")
    trained = subject.trained_system
    if trained is None:
        return unknown("system", "needs the training's chats (chats=)")
    if trained == subject.config.system:
        return fine("system", _quoted(trained), "that of the training chats")
    return _compared(
        subject,
        "system",
        _quoted(subject.config.system),
        f"{_quoted(trained)}, as in the training chats",
        "Serve with the training's system prompt, or regenerate and train with this one",
    )


def _compared(subject: Subject, cause: str, now: str, usual: str, remedy: str) -> Finding:
    """Return the finding of decoding with the training's rendering."""
    served, other = subject.serve(), subject.serve(Conditions(usual=True))
    loss = difference(other.counts, served.counts)
    found = f"{served.counts.rate:.3f} accepted with {now}"
    expected = f"{other.counts.rate:.3f} with {usual}"
    if not is_sure(loss):
        return fine(cause, found, expected, loss)
    return Finding(cause, FAULT, found, expected, remedy, loss, "decoded both ways")


def check_temperature(subject: Subject) -> Finding:
    """Compare the drafter's distribution with the sharper or flatter one that is likeliest.

    Acceptance differs between temperatures on healthy drafters too, so decoding at both shows
    nothing. A drafter that was trained for another temperature is too flat or too sharp instead:
    its likelihood of the target's tokens grows if its distribution is raised to a power.
    """
    temperature = subject.config.temperature
    if not temperature:
        return fine("temperature", "greedy, so only the likeliest token counts", "any")
    served = subject.serve()
    found = sharpness(subject)
    if not len(found.text_N):
        return unknown("temperature", "needs longer answers")
    size = len(served.prompts)
    best, as_is = int(found.log_q_NS.mean(0).argmax()), POWERS.index(1.0)
    gain_N = found.overlap_NS[:, best] - found.overlap_NS[:, as_is]
    counts_P = np.bincount(found.text_N, minlength=size).astype(float)
    loss = mean_by_prompt(np.bincount(found.text_N, gain_N, size), counts_P)
    overlaps_S = found.overlap_NS.mean(0)
    trained = subject.card.get("acceptance", {}).get("temperature")
    known = "" if trained is None else f" (the card's temperature is {trained:g})"
    words = (
        f"{overlaps_S[as_is]:.3f} expected to be accepted at temperature {temperature:g}{known}",
        f"{overlaps_S[best]:.3f} with its probabilities to the power {POWERS[best]:g}, the "
        f"likeliest",
    )
    if not is_sure(loss):
        return fine("temperature", *words, loss)
    return Finding(
        "temperature",
        FAULT,
        *words,
        f"Train on answers of temperature {temperature:g}, with held_out.temperature="
        f"{temperature:g}",
        loss,
        "computed at the places of the answers",
    )


def check_dtype(subject: Subject) -> Finding:
    """Decode in float32, if serving has a dtype of fewer bits."""
    dtype = subject.config.target.dtype
    if dtype in EXACT:
        return fine("dtype", dtype, "exact")
    served, exact = subject.serve(), subject.serve(Conditions(dtype="float32"))
    loss = difference(exact.counts, served.counts)
    found = f"{served.counts.rate:.3f} accepted in {dtype}"
    expected = f"{exact.counts.rate:.3f} in float32"
    if not is_sure(loss):
        return fine("dtype", found, expected, loss)
    return Finding(
        "dtype",
        FAULT,
        found,
        expected,
        "Serve the drafter in float32 (drafter={use: FOLDER, dtype: float32}), or in bfloat16 "
        "if this is float16",
        loss,
        "decoded in both",
    )


def check_context(subject: Subject) -> Finding:
    """Compare the acceptance before and after the end of the context in training, or of its own."""
    limits = {"the drafter's context": _own_context(subject)}
    if length := subject.training.get("data", {}).get("max_length"):
        limits["data.max_length of its training"] = int(length)
    what, limit = min(limits.items(), key=lambda one: one[1])
    served = subject.serve()
    lengths_P = np.asarray([len(prompt) for prompt in served.prompts])
    tests = served.tests
    beyond_E = tests.place_E + lengths_P[tests.prompt_E] >= limit
    if not beyond_E.any():
        return fine("context", f"no token after the {limit:,}th", f"at most {limit:,}, {what}")
    prompts = len(served.prompts)
    within, beyond = tests.counts(prompts, ~beyond_E), tests.counts(prompts, beyond_E)
    found = f"{beyond.rate:.3f} accepted after the {limit:,}th token"
    silent = beyond_E & ~tests.drafted_E
    if not within.tested:
        if silent.sum() == beyond_E.sum():
            return Finding(
                "context",
                FAULT,
                "nothing is drafted",
                f"prompts within {limit:,} tokens, {what}",
                _longer(what),
            )
        return unknown("context", f"needs prompts within {limit:,} tokens, {what}")
    loss = _loss_beyond(served, within, beyond)
    expected = f"{within.rate:.3f}, as before it ({what})"
    if not is_sure(loss):
        return fine("context", found, expected, loss)
    return Finding("context", FAULT, found, expected, _longer(what), loss, "compared by place")


def _longer(what: str) -> str:
    return f"Train with texts as long as those served: raise {what}"


def _own_context(subject: Subject) -> int:
    """Return the number of tokens that the drafter can read."""
    drafter = subject.drafter(subject.config.target.dtype, False)
    if subject.kind is None and isinstance(drafter, ChainDrafter):
        return drafter.model.max_length
    return subject.target_context


def _loss_beyond(served: Served, within: Counts, beyond: Counts) -> Estimate:
    """Return the acceptance within the limit less that of all tests."""
    apart = difference_of_groups(_only_tested(within), _only_tested(beyond))
    share = beyond.tested / served.counts.tested
    return Estimate(apart.value * share, apart.error * share, apart.freedom)


def _only_tested(counts: Counts) -> Counts:
    """Return the counts of prompts that have tests."""
    tested_P = counts.tested_P > 0
    return Counts(counts.accepted_P[tested_P], counts.tested_P[tested_P])


def check_thinking(subject: Subject) -> Finding:
    """Compare how often answers begin with thoughts in serving and in the training chats."""
    if not subject.chats:
        return unknown("thinking", "needs the training's chats (chats=)")
    answers = [str(subject.tokenizer.decode(answer)) for answer in subject.serve().answers]
    texts = [_answers_of(chat) for chat in subject.chats]
    served, trained = _share_of_thoughts(answers), _share_of_thoughts(texts)
    found, expected = f"{served.value:.0%} of the served answers think", f"{trained.value:.0%}"
    # equal answers have no spread, but half an answer more or less remains possible
    error = float(np.hypot(served.error, trained.error)) + 0.5 / min(len(answers), len(texts))
    freedom = min(served.freedom, trained.freedom)
    apart = Estimate(abs(served.value - trained.value), error, freedom)
    if not is_sure(apart):
        return fine("thinking", found, f"{expected} of the training chats")
    return Finding(
        "thinking",
        FAULT,
        found,
        f"{expected}, as in the training chats",
        "Regenerate the training chats in the mode that serves, and train again",
    )


def _answers_of(chat: Chat) -> str:
    """Return the text of a chat's answers."""
    return "\n".join(one["content"] for one in chat.messages if one["role"] == "assistant")


def _share_of_thoughts(texts: Sequence[str]) -> Estimate:
    """Return the share of the texts that hold thoughts."""
    thinks_P = np.asarray([any(mark in text for mark in THOUGHTS) for text in texts], dtype=float)
    return mean_by_prompt(thinks_P, np.ones(len(texts)))


def _quoted(system: str) -> str:
    """Return a system prompt in a few words."""
    if not system:
        return "no system prompt"
    short = " ".join(system.split())
    return f"the system prompt '{short[:40]}{'...' if len(short) > 40 else ''}'"

"""The examination: all probes, the acceptance in parts, and what is left if no fault is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from decoding.costs.prediction import expected_tokens
from decoding.models.folder import CARD
from eval.doctor.estimates import Counts, Estimate, rate
from eval.doctor.findings import FAULT, Finding, ordered
from eval.doctor.probes import conditions, engine, files, learning, reading
from eval.doctor.subject import Subject
from jobs.progress import ProgressBar

PROBES: tuple[Callable[[Subject], Finding], ...] = (
    files.check_target,
    files.check_folder,
    reading.check_layout,
    reading.check_cache,
    engine.check_engine,
    conditions.check_template,
    conditions.check_system,
    conditions.check_thinking,
    conditions.check_temperature,
    conditions.check_dtype,
    conditions.check_context,
    learning.check_vocabulary,
    learning.check_ends,
    files.check_mask,
    learning.check_on_policy,
    learning.check_new_text,
)
LETTERS = "word start", "inside a word"
CLASSES = ("special token", "space or new line", "digit", "punctuation", *LETTERS)


@dataclass(frozen=True)
class Part:
    """The acceptance of some of the tests."""

    group: str  # depth, category or token class
    name: str
    share: float  # of all tests
    rate: Estimate


@dataclass(frozen=True)
class Diagnosis:
    """Result of an examination."""

    acceptance: Estimate
    tau: float
    prompts: int
    tests: int
    parts: list[Part]
    findings: list[Finding]  # of all probes, in their order
    bound: str  # what is left, in a sentence
    warnings: list[str] = field(default_factory=list)  # what keeps probes from running

    @property
    def causes(self) -> list[Finding]:
        """Return the faults, first cause first."""
        return ordered(self.findings)


def diagnose(subject: Subject) -> Diagnosis:
    """Run all probes. Raises UserError if target or drafter cannot be decoded."""
    findings = []
    with ProgressBar("doctor", len(PROBES) + 1) as bar:
        served = subject.serve()
        for done, check in enumerate(PROBES, start=1):
            bar.update(done, check.__name__.replace("_", " "))
            findings.append(check(subject))
        bar.update(len(PROBES) + 1)
    return Diagnosis(
        rate(served.counts),
        served.tau,
        len(served.prompts),
        int(served.counts.tested),
        _parts(subject),
        findings,
        _bound(subject, findings),
        _warnings(subject),
    )


def _warnings(subject: Subject) -> list[str]:
    """Return what the drafter's folder lacks."""
    if subject.card:
        return []
    return [
        f"{subject.folder} has no {CARD}, so it cannot be compared with its training: changed "
        f"files, another target and another temperature stay hidden. Examine the folder that the "
        f"training wrote, or copy its card."
    ]


def _parts(subject: Subject) -> list[Part]:
    """Return the acceptance by depth, by category of the prompts, and by class of token."""
    served = subject.serve()
    tests, size = served.tests, len(served.prompts)
    categories = [one.category for one in subject.benchmark.prompts]
    groups: list[tuple[str, Sequence[Any], np.ndarray]] = [
        ("depth", range(1, int(tests.depth_E.max()) + 1), tests.depth_E),
        ("category", [*dict.fromkeys(categories)], np.asarray(categories)[tests.prompt_E]),
        ("token", CLASSES, _classes(subject)),
    ]
    parts = []
    for group, names, values_E in groups:
        for name in names:
            among_E = values_E == name
            if not among_E.any() or (group == "category" and len(names) == 1):
                continue
            found = tests.counts(size, among_E)
            here_P = found.tested_P > 0
            counts = Counts(found.accepted_P[here_P], found.tested_P[here_P])
            parts.append(Part(group, str(name), float(among_E.mean()), rate(counts)))
    return parts


def _classes(subject: Subject) -> np.ndarray:
    """Return the class of each tested token."""
    served, tokenizer = subject.serve(), subject.tokenizer
    special = {*tokenizer.all_special_ids, *subject.stop_token_ids}
    texts: dict[int, str] = {}

    def text(token: int) -> str:
        if token not in texts:
            piece = str(tokenizer.convert_ids_to_tokens(token) or "")
            for mark, shown in (
                ("\u2581", " "),
                ("\u0120", " "),
                ("\u010a", "\n"),
                ("\u0109", "\t"),
            ):
                piece = piece.replace(mark, shown)
            texts[token] = piece
        return texts[token]

    def name(token: int, before: int) -> str:
        if token in special:
            return CLASSES[0]
        piece, last = text(token), text(before)[-1:]
        if not piece.strip():
            return CLASSES[1]
        if any(character.isdigit() for character in piece):
            return CLASSES[2]
        if not any(character.isalnum() for character in piece):
            return CLASSES[3]
        continues = piece[0].isalnum() and last.isalnum() and before not in special
        return LETTERS[continues]

    pairs = zip(served.tests.token_E.tolist(), served.previous_E.tolist(), strict=True)
    return np.asarray([name(token, before) for token, before in pairs])


def _bound(subject: Subject, findings: Sequence[Finding]) -> str:
    """Describe how much acceptance is left to gain, and by what."""
    found = rate(subject.serve().counts)
    gamma = subject.config.num_draft_tokens
    tokens = expected_tokens([found.value], gamma) if found.value == found.value else 1.0
    first = f"At an acceptance of {found.value:.2f} a round of {gamma} drafted tokens emits "
    first += f"{tokens:.2f}"
    if tokens < gamma + 0.995:  # else the same figure twice
        first += f"; at 1 it would emit {gamma + 1}"
    parts = [f"{first}."]
    new_text = next(one for one in findings if one.cause == "new_text")
    if new_text.loss is not None and new_text.loss.value < 0.005:
        parts.append(
            "It is no better on its training's chats than on new ones, so more chats add little: "
            "train longer, or a larger drafter."
        )
    elif new_text.loss is not None:
        most = new_text.loss.value
        parts.append(
            f"More training chats can add at most {most:.2f}, by which the drafter is better on "
            f"those that it was trained on. The rest needs longer training or a larger drafter."
        )
    elif new_text.state != FAULT:
        parts.append(
            "Whether data or capacity limits it shows only with the training's chats (chats=)."
        )
    return " ".join(parts)

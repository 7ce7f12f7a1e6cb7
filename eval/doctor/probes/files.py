"""Probes of files: the target on the card, the drafter's own folder, the mask of its training."""

from __future__ import annotations

from pathlib import Path

from decoding.errors import UserError
from decoding.models.folder import CARD, hash_file, hash_input
from eval.doctor.estimates import Estimate, difference, is_sure, rate
from eval.doctor.findings import FAULT, Finding, fine, unknown
from eval.doctor.subject import Conditions, Subject
from training.data.chat import render_chat

# Files of a folder that change no prediction for given token ids.
TEXT_FILES = ("chat_template.jinja", "tokenizer_config.json", "generation_config.json")


def check_target(subject: Subject) -> Finding:
    """Compare the target with that on the card, and decode with that one too if it is here."""
    expected = subject.card.get("target_hash")
    if not expected:
        return unknown("target", f"needs {CARD} of a trained drafter")
    found = subject.target_hash
    if found == expected:
        return fine("target", f"hash {found[:12]}", "that of the card")
    original, name = subject.original_target, subject.card.get("target", "its own target")
    if original is None:
        loss, measured = loss_against_card(subject)
        if loss is not None and not is_sure(loss):
            return fine("target", "another target than the card's, without a loss", name, loss)
        return Finding(
            "target",
            FAULT,
            f"the target has the hash {found[:12]}",
            f"{expected[:12]}, that of {name} on the card: weights, tokenizer or template differ",
            f"Serve {name}, or continue the training on this target",
            loss,
            measured,
        )
    differing = _differing(original, subject.target_folder)
    if not differing:
        return fine("target", "it, but for texts of its tokenizer's files", "the card's target")
    now, before = subject.serve(), subject.serve(Conditions(target=original))
    loss = difference(before.counts, now.counts)
    if not is_sure(loss):
        what = f"{now.counts.rate:.3f} accepted, though {', '.join(differing)} differ"
        return fine("target", what, f"{before.counts.rate:.3f} with {name}", loss)
    return Finding(
        "target",
        FAULT,
        f"{now.counts.rate:.3f} accepted with this target; {', '.join(differing)} differ",
        f"{before.counts.rate:.3f}, with {name}, for which it was trained",
        f"Serve {name}, or continue the training on this target",
        loss,
        "decoded with both targets",
    )


def check_folder(subject: Subject) -> Finding:
    """Compare the drafter's folder with what its training wrote."""
    expected = subject.card.get("drafter_hash")
    if not expected:
        return unknown("folder", f"needs {CARD} of a trained drafter")
    found = hash_input(subject.folder)
    if found == expected:
        return fine("folder", f"hash {found[:12]}", "that of the card")
    loss, measured = loss_against_card(subject)
    if loss is not None and not is_sure(loss):
        return fine("folder", "files have changed since its training, without a loss", "none", loss)
    return Finding(
        "folder",
        FAULT,
        f"its files have the hash {found[:12]}",
        f"{expected[:12]}, written by its training: weights, config.json or tokenizer have changed",
        "Copy the folder again from its run, or write it again (checkpoint= of its training)",
        loss,
        measured,
    )


def check_mask(subject: Subject) -> Finding:
    """Measure which share of the supervised tokens of the training chats are the user's."""
    chats, data = subject.chats, subject.training.get("data")
    if not chats or not data:
        return unknown("mask", "needs the training's run and its chats")
    tokens = answers = 0
    for chat in chats:
        try:
            rendered = render_chat(subject.tokenizer, chat.messages, template=data["template"])
        except UserError:
            continue  # dropped by the training too, which counts them
        mask = rendered.mask[: data["max_length"]]
        tokens, answers = tokens + len(mask) - 1, answers + sum(mask)
    if data["train_on"] == "answers" or not tokens:
        return fine("mask", f"{answers:,} supervised tokens, all of answers", "answers alone")
    return Finding(
        "mask",
        FAULT,
        f"{1 - answers / tokens:.0%} of the supervised tokens are not of answers",
        "0 %: a drafter never drafts a prompt",
        "Train again with data.train_on=answers",
    )


def loss_against_card(subject: Subject) -> tuple[Estimate | None, str]:
    """Return the acceptance lost since the card was written, and how it was measured."""
    card = subject.card.get("acceptance", {})
    temperature = subject.config.temperature
    value = card.get("acceptance") if card.get("temperature") == temperature else None
    if temperature == 0:
        value = card.get("greedy_acceptance", value)
    if value is None:
        return None, ""
    found = rate(subject.serve().counts)
    loss = Estimate(value - found.value, found.error, found.freedom)
    return loss, "against the card's figure, of its held-out prompts"


def _differing(one: Path, other: Path) -> list[str]:
    """Return the names of files that differ, and change predictions for given token ids."""
    names = {file.name for folder in (one, other) for file in folder.iterdir() if file.is_file()}
    return sorted(
        name
        for name in names - {CARD, "README.md", *TEXT_FILES}
        if not ((one / name).is_file() and (other / name).is_file())
        or hash_file(one / name) != hash_file(other / name)
    )

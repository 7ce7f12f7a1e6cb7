"""The doctor names each planted fault as the first cause, and none on healthy drafters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Proposal
from decoding.models.draft_vocabulary import restrict_head
from decoding.models.folder import CARD
from eval.doctor.diagnosis import Diagnosis
from eval.doctor.findings import FAULT
from eval.doctor.job import run
from eval.doctor.report import doctor_page
from heads.registry import kind_in
from tests.heads import rows
from tests.support import planted, tiny_folders
from tests.support.examinations import (
    TARGET,
    causes,
    doctor_config,
    examined,
    healthy,
    training_run,
)
from tests.support.forks import succeed
from training.heads.checkpoint import save_head

STEPS = 25  # of further training
OTHER = 4  # the step of another author's chains
EAGLE = rows.eagle("eagle3", taps=[3, 2])


def taught(home: Path, *lessons: Sequence[Any], steps: int = STEPS) -> Path:
    """Write a drafter that is the target after further lessons."""
    model = planted.noisy(TARGET, 0.02)
    planted.fit(model, [sample for lesson in lessons for sample in lesson], steps)
    return planted.write_drafter(home / "drafter", TARGET, model)


def copied(home: Path, name: str) -> Path:
    """Return a copy of a trained head, with its card."""
    folder = Path(shutil.copytree(planted.MODELS / name, home / "head"))
    planted.write_card(folder, TARGET)
    return folder


def misread(folder: Path, **changes: Any) -> Path:
    """Write a head again, with other values of its shape in config.json and a new card."""
    kind = kind_in(folder)
    shape, head = kind.read_shape(folder), kind.load(folder)
    save_head(kind.layout, replace(shape, **changes), head, folder)
    planted.write_card(folder, TARGET)
    return folder


def chain(folder: Path) -> dict[str, str]:
    """Return the choice of an EAGLE head as a chain, which needs no measured costs."""
    return {"use": str(folder), "shape": "chain"}


# ------------------------------------------------------------------------------- healthy drafters


def test_no_fault_is_named_on_a_noisy_copy_with_its_training(tmp_path: Path) -> None:
    drafter = healthy(tmp_path)
    training_run(tmp_path, planted.write_chats(tmp_path / "chats.json"))
    found = examined(tmp_path, drafter)
    assert causes(found) == []
    states = {one.cause: one.state for one in found.findings}
    unknown = [cause for cause, state in states.items() if state == "unknown"]
    assert unknown == ["engine"], states
    assert found.acceptance.value > 0.8
    assert 1 < found.tau <= 5, "4 drafted tokens and the target's"


@pytest.mark.parametrize(("trained", "served"), [(1.0, 0.0), (0.0, 1.0)])
def test_no_fault_is_named_at_another_temperature_than_the_cards(
    trained: float, served: float, tmp_path: Path
) -> None:
    """Check that a healthy drafter, which is accepted differently there, is not blamed for it."""
    figures = {"temperature": trained}
    model = planted.noisy(TARGET, 0.05)
    drafter = planted.write_drafter(tmp_path / "drafter", TARGET, model, planted.TEMPLATE, figures)
    assert causes(examined(tmp_path, drafter, temperature=served)) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_fault_is_named_on_a_drafter_of_two_layers(temperature: float, tmp_path: Path) -> None:
    model = planted.noisy(TARGET, 0.02)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    planted.fit(model, planted.samples_of(planted.TEMPLATE), STEPS)
    drafter = planted.write_drafter(tmp_path / "drafter", TARGET, model)
    assert causes(examined(tmp_path, drafter, temperature=temperature)) == []


def test_no_fault_is_named_on_a_head(tmp_path: Path) -> None:
    found = examined(tmp_path, chain(copied(tmp_path, "eagle3")))
    assert causes(found) == []
    assert next(one for one in found.findings if one.cause == "taps").state == "fine"


def test_a_drafter_without_a_card_is_examined_as_far_as_possible(tmp_path: Path) -> None:
    drafter = healthy(tmp_path)
    (drafter / CARD).unlink()
    found = examined(tmp_path, drafter)
    assert causes(found) == []
    missing = [one.expected for one in found.findings if one.cause in ("target", "folder")]
    assert all("drafter_card.json" in one for one in missing)
    assert "has no drafter_card.json" in found.warnings[0]
    page = doctor_page(found, doctor_config(tmp_path, drafter), "")
    assert 'role="alert"' in page and "has no drafter_card.json" in page


# --------------------------------------------------------------------------------- planted faults


def another_target(home: Path) -> Diagnosis:
    model = planted.fit(
        planted.noisy(TARGET, 0.0), planted.samples_of(planted.TEMPLATE, step=OTHER), STEPS
    )
    tuned = planted.write_model(home / "tuned", model)
    return examined(home, healthy(home), tuned)


def rope_theta_changed(home: Path) -> Diagnosis:
    drafter = home / "drafter"

    def change(folder: Path) -> None:
        config = (folder / "config.json").read_text()
        assert "10000.0" in config
        (folder / "config.json").write_text(config.replace("10000.0", "20.0"))

    figures = {"greedy_acceptance": 0.97}
    planted.write_drafter(
        drafter, TARGET, planted.noisy(TARGET, 0.02), planted.TEMPLATE, figures, change
    )
    return examined(home, drafter)


def taps_one_layer_off(home: Path) -> Diagnosis:
    return examined(home, chain(misread(copied(home, "eagle3"), taps=(2, 1))))


def slots_one_token_off(home: Path) -> Diagnosis:
    drafter = copied(home, "dflash")
    wrong = misread(drafter, layout="anchor_first", block_size=4)
    return examined(home, {"use": str(wrong), "by_cost": False})


def another_template(home: Path) -> Diagnosis:
    served = shutil.copytree(TARGET, home / "served")
    (served / "chat_template.jinja").write_text(planted.OTHER_TEMPLATE)
    drafter = taught(
        home,
        planted.samples_of(planted.TEMPLATE),
        planted.samples_of(planted.OTHER_TEMPLATE, step=OTHER),
    )
    return examined(home, drafter, served)


def no_system_prompt(home: Path) -> Diagnosis:
    drafter = taught(
        home,
        planted.samples_of(planted.TEMPLATE, planted.SYSTEM),
        planted.samples_of(planted.TEMPLATE, step=OTHER),
    )
    chats = planted.write_chats(home / "chats.json", planted.SYSTEM)
    return examined(home, drafter, chats=[str(chats)])


def trained_greedily_served_hot(home: Path) -> Diagnosis:
    model = planted.noisy(TARGET, 0.02)
    model.lm_head.weight.data.mul_(0.1)
    drafter = planted.write_drafter(home / "drafter", TARGET, model)
    return examined(home, drafter, temperature=1.0)


def too_few_bits(home: Path) -> Diagnosis:
    model = planted.noisy(TARGET, 0.02)
    torch.manual_seed(3)
    model.lm_head.weight.data.add_(200.0 * torch.randn(model.config.hidden_size))
    drafter = planted.write_drafter(home / "drafter", TARGET, model)
    return examined(home, drafter, dtype="bfloat16")


def short_context(home: Path) -> Diagnosis:
    model = planted.noisy(TARGET, 0.02)
    model.config.max_position_embeddings = 24
    return examined(home, planted.write_drafter(home / "drafter", TARGET, model))


def vocabulary_of_another_text(home: Path) -> Diagnosis:
    model = planted.noisy(TARGET, 0.02)
    words = tiny_folders.tokenizer()
    letters = "".join(chr(code) for code in range(65, 91)) + " abcdefghi.,"
    ids = torch.tensor(sorted({*words(letters)["input_ids"], words.eos_token_id}))
    restrict_head(model, ids)
    return examined(home, planted.write_drafter(home / "drafter", TARGET, model))


def no_end_tokens(home: Path) -> Diagnosis:
    return examined(home, taught(home, planted.samples_of(planted.TEMPLATE, end=False)))


def mask_of_whole_chats(home: Path) -> Diagnosis:
    training_run(home, planted.write_chats(home / "chats.json"), train_on="all")
    return examined(home, healthy(home))


def chats_of_another_author(home: Path) -> Diagnosis:
    training_run(home, planted.write_chats(home / "chats.json", step=OTHER))
    return examined(home, healthy(home))


def few_chats_by_heart(home: Path) -> Diagnosis:
    known = planted.samples_of(planted.TEMPLATE)[: len(planted.WORDS)]
    wrong = planted.samples_of(planted.TEMPLATE, step=OTHER)[len(planted.WORDS) :]
    drafter = taught(home, known, wrong)
    pairs = planted.PAIRS[: len(planted.WORDS)]
    training_run(home, planted.write_chats(home / "chats.json", pairs=pairs))
    return examined(home, drafter)


def thinking_in_training_alone(home: Path) -> Diagnosis:
    chats = planted.write_chats(home / "chats.json", before="<think>well</think>")
    return examined(home, healthy(home), chats=[str(chats)])


def untrained_head(home: Path) -> Diagnosis:
    return examined(home, chain(planted.write_head(home / "head", TARGET, EAGLE, steps=0)))


FAULTS: dict[str, tuple[str, Callable[[Path], Diagnosis]]] = {
    "another target": ("target", another_target),
    "rope theta changed": ("folder", rope_theta_changed),
    "taps one layer off": ("taps", taps_one_layer_off),
    "slots one token off": ("shift", slots_one_token_off),
    "untrained head": ("untrained", untrained_head),
    "another template": ("template", another_template),
    "no system prompt": ("system", no_system_prompt),
    "thinking in training alone": ("thinking", thinking_in_training_alone),
    "trained greedily, served hot": ("temperature", trained_greedily_served_hot),
    "too few bits": ("dtype", too_few_bits),
    "short context": ("context", short_context),
    "vocabulary of another text": ("vocabulary", vocabulary_of_another_text),
    "no end tokens": ("ends", no_end_tokens),
    "mask of whole chats": ("mask", mask_of_whole_chats),
    "chats of another author": ("off_policy", chats_of_another_author),
    "few chats by heart": ("new_text", few_chats_by_heart),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_the_first_cause(name: str, tmp_path: Path) -> None:
    cause, plant = FAULTS[name]
    found = plant(tmp_path)
    assert causes(found)[:1] == [cause], [
        (one.cause, one.found, one.expected, str(one.loss)) for one in found.causes
    ]


def test_drafting_that_differs_from_training_is_the_first_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose = ChainDrafter.propose

    def late(self: ChainDrafter, sequences_B: Any, *given: Any) -> Proposal:
        """Draft as if the last token were the one before it."""
        return propose(self, [[*one[:-1], one[-2]] for one in sequences_B], *given)

    monkeypatch.setattr(ChainDrafter, "propose", late)
    assert causes(examined(tmp_path, healthy(tmp_path)))[:1] == ["cache"]


def test_faults_have_states_and_order(tmp_path: Path) -> None:
    found = mask_of_whole_chats(tmp_path)
    assert [one.state for one in found.causes] == [FAULT]
    assert found.causes[0].loss is None


# ---------------------------------------------------------------------------------------- the job


def test_the_job_writes_its_page_and_shows_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = doctor_config(tmp_path, healthy(tmp_path))
    folder = run(config)
    first = capsys.readouterr().out
    assert "no fault found" in first and "by depth" in first
    html = (folder / "doctor.html").read_text()
    assert "no fault found" in html and "http" not in html
    assert html.count('data-word="expected"') > html.count('<td class="words">not checked') > 0
    record = json.loads((folder / "doctor.json").read_text())
    assert record["first_cause"] == "" and record["tests"] > 0
    run(config)
    again = capsys.readouterr().out
    assert "nothing is examined again" in again and again.endswith(first)


@pytest.mark.long
def test_the_command_takes_the_folder_of_a_drafter(tmp_path: Path) -> None:
    """Check the command line, where a word after drafter= would name a file of conf/drafter."""
    words = [f"drafter={tmp_path}", "dry_run=true", f"output_dir={tmp_path}/run"]
    printed = succeed("eval.doctor", *words)
    assert f"would decode 32 prompts of embedded:prompts with {tmp_path} on" in printed

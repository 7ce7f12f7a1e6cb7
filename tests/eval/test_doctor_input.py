"""Input that the doctor refuses by name, or examines as far as it can."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decoding.errors import UserError
from decoding.models.folder import CARD
from eval.config import BenchmarkConfig
from eval.doctor.subject import Subject
from tests.support import planted
from tests.support.examinations import (
    TARGET,
    causes,
    doctor_config,
    examined,
    healthy,
    training_run,
)

RAISES = "{{ raise_exception('no chats today') }}"
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)


# ------------------------------------------------------------------------------------- the drafter


def test_a_drafter_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="drafter=prompt_lookup has no folder"):
        examined(tmp_path, Path("prompt_lookup"))
    with pytest.raises(UserError, match="nowhere"):
        examined(tmp_path, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("{", "line 1 is not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"acceptance": 0.5}', "acceptance is 0.5, expected an object"),
        ('{"target_hash": 7}', "target_hash is 7, expected text"),
    ],
)
def test_a_damaged_card_is_an_error_with_its_name(card: str, words: str, tmp_path: Path) -> None:
    drafter = healthy(tmp_path)
    (drafter / CARD).write_text(card)
    with pytest.raises(UserError, match=words) as error:
        Subject(doctor_config(tmp_path, drafter))
    assert str(drafter / CARD) in str(error.value)


def test_a_card_without_a_target_is_examined(tmp_path: Path) -> None:
    drafter = healthy(tmp_path)
    card = json.loads((drafter / CARD).read_text())
    del card["target"]
    (drafter / CARD).write_text(json.dumps(card))
    assert causes(examined(tmp_path, drafter)) == []


# ------------------------------------------------------------------------------------ the templates


def target_with(home: Path, template: str) -> Path:
    """Return a copy of the target with another chat template."""
    served = Path(shutil.copytree(TARGET, home / "served"))
    (served / "chat_template.jinja").write_text(template)
    return served


def test_a_template_that_raises_is_an_error_with_its_reason_and_remedy(tmp_path: Path) -> None:
    served = target_with(tmp_path, RAISES)
    with pytest.raises(UserError, match="no chats today") as error:
        examined(tmp_path, healthy(tmp_path), served)
    for words in ("prompt '", str(served), "benchmark.chat_template="):
        assert words in str(error.value)


def test_a_template_without_a_system_role_refuses_only_a_system_prompt(tmp_path: Path) -> None:
    served = target_with(tmp_path, NO_SYSTEM + planted.TEMPLATE)
    drafter = healthy(tmp_path)
    with pytest.raises(UserError, match="no system role"):
        examined(tmp_path, drafter, served, system=planted.SYSTEM)
    assert causes(examined(tmp_path, drafter, served)) == []


def test_the_template_of_the_training_is_named_if_it_raises(tmp_path: Path) -> None:
    drafter = healthy(tmp_path)
    (drafter / "chat_template.jinja").write_text(RAISES)
    with pytest.raises(UserError, match="no chats today") as error:
        examined(tmp_path, drafter)
    assert str(drafter) in str(error.value)


# -------------------------------------------------------------------------- the training, its chats


def test_another_trainings_run_is_refused(tmp_path: Path) -> None:
    drafter = healthy(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    training_run(other, planted.write_chats(tmp_path / "chats.json"))
    text = (other / "config.yaml").read_text().replace(str(TARGET), "another_target")
    (other / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="trained a drafter for the target another_target"):
        examined(tmp_path, drafter, training=str(other))
    with pytest.raises(UserError, match="holds no config.yaml"):
        examined(tmp_path, drafter, training=str(tmp_path / "nowhere"))


def of_a_domain(home: Path) -> dict[str, Any]:
    """Return data whose chats are those of a domain."""
    planted.write_chats(home / "chats.json")
    return {"chats": [], "domains": {"one": {"chats": ["chats.json"]}}, "root": str(home)}


def of_the_library(home: Path) -> dict[str, Any]:
    """Return data whose chats are those of Python's standard library."""
    return {"chats": ["embedded:stdlib"]}


@pytest.mark.long
@pytest.mark.parametrize("data", [of_a_domain, of_the_library])
def test_chats_of_domains_and_of_the_library_are_found(
    data: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    training_run(tmp_path, tmp_path / "chats.json", **data(tmp_path))
    subject = Subject(doctor_config(tmp_path, healthy(tmp_path), max_chats=8))
    assert 4 <= len(subject.chats) <= 8
    assert "assistant" in {one["role"] for one in subject.chats[0].messages}


def test_missing_chats_are_an_error_only_if_they_are_named(tmp_path: Path) -> None:
    drafter, gone = healthy(tmp_path), tmp_path / "gone.json"
    with pytest.raises(UserError, match="gone.json does not exist"):
        examined(tmp_path, drafter, chats=[str(gone)])
    training_run(tmp_path, gone)
    found = examined(tmp_path, drafter)
    states = {one.cause: one.state for one in found.findings}
    assert causes(found) == [] and states["new_text"] == states["off_policy"] == "unknown"


def test_chats_that_the_template_rejects_leave_out_the_probes_that_read_them(
    tmp_path: Path,
) -> None:
    """Check a training whose template renders the prompts that are served, but not its chats."""
    template = planted.TEMPLATE.replace(
        "{% generation %}", "{{ raise_exception('no answers') }}{% generation %}"
    )
    drafter = healthy(tmp_path)
    (drafter / "chat_template.jinja").write_text(template)
    planted.write_card(drafter, TARGET)
    chats = planted.write_chats(tmp_path / "chats.json")
    found = examined(tmp_path, drafter, target_with(tmp_path, template), chats=[str(chats)])
    states = {one.cause: one.state for one in found.findings}
    assert causes(found) == [] and states["new_text"] == states["off_policy"] == "unknown"


# ------------------------------------------------------------------------------------- the prompts


def test_too_few_prompts_are_refused(tmp_path: Path) -> None:
    few = planted.write_prompts(tmp_path / "few.jsonl", planted.PAIRS[:3])
    with pytest.raises(UserError, match="3 prompts to decode, expected 4 or more"):
        examined(tmp_path, healthy(tmp_path), benchmark=BenchmarkConfig(path=str(few)))

"""The drift monitor finds planted drifts alone, and refuses the logs of another target."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decoding.errors import UserError
from decoding.models.folder import CARD
from decoding.models.load import load_target
from eval.config import BenchmarkConfig
from eval.doctor.config import DoctorConfig
from eval.doctor.drift import (
    HEALTHY,
    RETARGET,
    UNSURE,
    Drift,
    describe,
    find_drift,
    measure_logs,
)
from eval.doctor.job import run
from eval.doctor.logs import read_answers
from eval.doctor.subject import Subject
from jobs.config import TargetConfig
from tests.support import planted, tiny_folders
from training.config import HeldOutConfig
from training.data.chat import render_prompt
from training.held_out.answers import answer_prompts

TARGET, OTHER = planted.MODELS / "target", 4
SOME = planted.shuffled()[:12]


def config(
    home: Path, logs: Path, drafter: Path, target: Path = TARGET, **more: Any
) -> DoctorConfig:
    values = {
        "job": "eval.doctor",
        "output_dir": str(home / "run"),
        "target": TargetConfig(path=str(target), device="cpu"),
        "benchmark": BenchmarkConfig(path="nowhere.jsonl"),  # no prompt is decoded
        "drafter": {"use": str(drafter)},
        "drift": str(logs),
    }
    return DoctorConfig(**{**values, **more})


def drift(*given: Any, **more: Any) -> Drift:
    return find_drift(Subject(config(*given, **more)))


def drafter_of(home: Path, logs: Path, **figures: Any) -> Path:
    """Write a drafter whose card records the acceptance that it has on these logs."""
    drafter = planted.write_drafter(home / "drafter", TARGET, planted.noisy(TARGET, 0.02))
    temperature = float(figures.get("temperature", 0.0))
    subject = Subject(config(home, logs, drafter, temperature=temperature))
    found = measure_logs(subject, str(logs)).acceptance.value
    name = "acceptance" if temperature else "greedy_acceptance"
    planted.write_card(drafter, TARGET, {name: found, **figures})
    return drafter


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the target after fine-tuning on the answers of another author."""
    lessons = planted.samples_of(planted.TEMPLATE, step=OTHER)
    model = planted.fit(planted.noisy(TARGET, 0.0), lessons, 40)
    return planted.write_model(tmp_path_factory.mktemp("drift") / "tuned", model)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory, tuned: Path) -> tuple[Path, Path]:
    """Write answers that the target and the tuned target sample at temperature 1."""
    home = tmp_path_factory.mktemp("sampled")
    return (
        sampled_logs(home / "before.jsonl", TARGET),
        sampled_logs(home / "after.jsonl", tuned),
    )


def logged(path: Path, step: int = 5, pairs: Sequence[tuple[str, str]] = SOME) -> Path:
    """Write greedy answers. step: of the chains; the tuned target writes those of OTHER."""
    return planted.write_chats(path, step=step, pairs=pairs)


def sampled_logs(path: Path, target: Path, copies: int = 1) -> Path:
    """Write answers that the target samples at temperature 1."""
    words = tiny_folders.tokenizer()
    words.chat_template = planted.TEMPLATE
    asked = [planted.question(*pair) for pair in planted.PAIRS] * copies
    prompts = [render_prompt(words, [{"role": "user", "content": one}]) for one in asked]
    settings: Any = SimpleNamespace(held_out=HeldOutConfig(max_new_tokens=24), seed=5)
    answers = answer_prompts(load_target(target, device="cpu"), prompts, target, words, settings)
    records = []
    for question, prompt, sample in zip(asked, prompts, answers, strict=True):
        text = words.decode(sample.ids[len(prompt) :], skip_special_tokens=True)
        if text:
            records.append({"prompt": question, "answer": text})
    return write_lines(path, records)


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def test_no_drift_is_found_on_healthy_logs(tmp_path: Path) -> None:
    logs = logged(tmp_path / "logs.json")
    found = drift(tmp_path, logs, drafter_of(tmp_path, logs))
    assert found.verdict == HEALTHY
    assert found.now.acceptance.value > 0.9 and len(found.now.parts) == 4
    assert found.now.answers == len(SOME)


def test_a_planted_drift_is_found(tmp_path: Path, tuned: Path) -> None:
    before, after = (logged(tmp_path / f"{step}.json", step) for step in (5, OTHER))
    found = drift(tmp_path, after, drafter_of(tmp_path, before), tuned)
    assert found.verdict == RETARGET and found.fall.low > 0 and found.fall.value > 0.2


def test_sampled_logs_are_compared_at_their_temperature(
    tmp_path: Path, tuned: Path, sampled: tuple[Path, Path]
) -> None:
    before, after = sampled
    drafter = drafter_of(tmp_path, before, temperature=1.0)
    assert drift(tmp_path, before, drafter, temperature=1.0).verdict == HEALTHY
    assert drift(tmp_path, after, drafter, tuned, temperature=1.0).verdict == RETARGET
    planted.write_card(drafter, TARGET, {"greedy_acceptance": 0.9, "temperature": 1.0})
    with pytest.raises(UserError, match="records an acceptance at temperature 1"):
        drift(tmp_path, before, drafter)


def test_older_logs_are_read_with_the_target_that_wrote_them(
    tmp_path: Path, tuned: Path, sampled: tuple[Path, Path]
) -> None:
    before, after = sampled
    drafter = planted.write_drafter(tmp_path / "drafter", TARGET, planted.noisy(TARGET, 0.02))
    given: dict[str, Any] = {"temperature": 1.0, "drift_against": str(before)}
    found = drift(tmp_path, after, drafter, tuned, drift_against_target=str(TARGET), **given)
    assert found.verdict == RETARGET
    with pytest.raises(UserError, match="drift_against_target for older logs"):
        drift(tmp_path, after, drafter, tuned, **given)


def test_logs_of_another_target_are_refused(tmp_path: Path, sampled: tuple[Path, Path]) -> None:
    drafter = planted.write_drafter(tmp_path / "drafter", TARGET, planted.noisy(TARGET, 0.02))
    planted.write_card(drafter, TARGET, {"greedy_acceptance": 0.9})
    with pytest.raises(UserError, match="cannot have written: they are to .* of other tokens"):
        drift(tmp_path, logged(tmp_path / "other.json", OTHER), drafter)
    planted.write_card(drafter, TARGET, {"acceptance": 0.9, "temperature": 1.0})
    with pytest.raises(UserError, match="nats a token less likely than what it samples"):
        drift(tmp_path, sampled[1], drafter, temperature=1.0)


def test_a_drafter_without_a_card_needs_older_logs(tmp_path: Path) -> None:
    logs = logged(tmp_path / "logs.json")
    drafter = planted.write_drafter(tmp_path / "drafter", TARGET, planted.noisy(TARGET, 0.02))
    with pytest.raises(UserError, match="records no held-out acceptance"):
        drift(tmp_path, logs, drafter)
    (drafter / CARD).unlink()
    with pytest.raises(UserError, match=r"has no drafter_card.json.*drift_against"):
        drift(tmp_path, logs, drafter)
    found = drift(tmp_path, logs, drafter, drift_against=str(logs))
    assert found.verdict == HEALTHY and abs(found.fall.value) < 1e-9


def test_a_fall_within_its_error_is_unsure_until_more_answers_decide(tmp_path: Path) -> None:
    logs = logged(tmp_path / "logs.json")
    drafter = drafter_of(tmp_path, logs)
    value = json.loads((drafter / CARD).read_text())["acceptance"]["greedy_acceptance"]
    planted.write_card(drafter, TARGET, {"greedy_acceptance": value + 0.022})
    given = config(tmp_path, logs, drafter)
    found = find_drift(Subject(given))
    assert found.verdict == UNSURE and found.fall.low < 0 < found.fall.value
    assert "unsure: the fall is large enough" in describe(found, given)


def test_a_head_is_measured_by_its_chain(tmp_path: Path) -> None:
    head, logs = planted.MODELS / "eagle3", logged(tmp_path / "logs.json")
    found = drift(tmp_path, logs, head, drift_against=str(logs))
    assert 0.3 < found.now.acceptance.value <= 1 and found.verdict == HEALTHY


def test_the_job_writes_its_result_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = logged(tmp_path / "logs.json")
    given = config(tmp_path, logs, drafter_of(tmp_path, logs))
    capsys.readouterr()
    folder = run(given)
    first = capsys.readouterr().out
    assert "healthy: no fall of 0.02 or more" in first
    assert json.loads((folder / "drift.json").read_text())["verdict"] == HEALTHY
    run(given)
    assert first.splitlines() == capsys.readouterr().out.splitlines()[1:]


# ------------------------------------------------------------------------------------------- logs

ASKED = [{"role": "user", "content": "what is fox?"}]


def response(text: str = "kit map.", **request: Any) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"request": {"messages": ASKED, **request}, "response": {"choices": [choice]}}


def test_logs_of_requests_are_read_at_their_temperature(tmp_path: Path) -> None:
    before = logged(tmp_path / "logs.json")
    drafter = drafter_of(tmp_path, before)
    records = []
    for chat in json.loads(before.read_text()):
        asked, answered = (turn["content"] for turn in chat["messages"])
        record = response(answered, temperature=0.0)
        record["request"]["messages"] = [{"role": "user", "content": asked}]
        # a sampled answer beside each greedy one, which the target would never write greedily
        records += [record, response("fox fox fox fox", temperature=0.7)]
    mixed = write_lines(tmp_path / "mixed.jsonl", records)
    same, found = drift(tmp_path, before, drafter), drift(tmp_path, mixed, drafter)
    assert found.now == same.now
    hot = write_lines(tmp_path / "hot.jsonl", records[1::2])
    with pytest.raises(UserError, match=r"holds answers at temperature 0.7, and temperature is 0"):
        drift(tmp_path, hot, drafter)


def test_answers_are_taken_from_all_over_the_log(tmp_path: Path) -> None:
    logs = logged(tmp_path / "logs.json", pairs=planted.shuffled())
    drafter = drafter_of(tmp_path, logs)

    def answers(count: int) -> list[list[int]]:
        subject = Subject(config(tmp_path, logs, drafter, max_chats=count))
        return [one.ids.tolist() for one in read_answers(subject, str(logs))]

    every = answers(len(planted.PAIRS))
    places = [every.index(ids) for ids in answers(8)]
    assert len(every) == len(planted.PAIRS) and len(places) == 8 and places == sorted(places)
    assert places[0] <= len(every) / 8 and places[-1] >= len(every) * 7 // 8


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "what?"}, "log.jsonl:1: found the keys prompt"),
        ({"answer": "yes"}, "log.jsonl:1: the log holds no prompts"),
        ({"messages": ASKED, "choices": []}, "expected a list of choices"),
        ([1], "log.jsonl:1: found a number, expected an object"),
        ({"prompt": "a", "token_ids": [5000]}, "found token 5000"),
    ],
)
def test_bad_logs_are_named(record: Any, message: str, tmp_path: Path) -> None:
    drafter = planted.write_drafter(tmp_path / "drafter", TARGET, planted.noisy(TARGET, 0.02))
    planted.write_card(drafter, TARGET, {"greedy_acceptance": 0.9})
    logs = write_lines(tmp_path / "log.jsonl", [record])
    with pytest.raises(UserError, match=message):
        drift(tmp_path, logs, drafter, benchmark=BenchmarkConfig(path=""))


def test_too_few_logs_and_no_file_are_errors(tmp_path: Path) -> None:
    drafter = planted.write_drafter(tmp_path / "drafter", TARGET, planted.noisy(TARGET, 0.02))
    planted.write_card(drafter, TARGET, {"greedy_acceptance": 0.9})
    few = logged(tmp_path / "few.json", pairs=SOME[:3])
    with pytest.raises(UserError, match="3 answers of two tokens or more, expected 4 or more"):
        drift(tmp_path, few, drafter)
    with pytest.raises(UserError, match="does not exist"):
        drift(tmp_path, tmp_path / "nowhere.jsonl", drafter)

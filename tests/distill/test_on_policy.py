"""Test on-policy distillation: the schedule, the student's text, its supervision, exact resume."""

import json
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.hf import HFTarget
from decoding.rounds.settings import Settings
from decoding.sampling import noise
from distill.config import OnPolicyConfig, StudentLossConfig, TrainConfig
from distill.on_policy.data import OnPolicyData
from distill.on_policy.prompts import TEXT_PROMPT_TOKENS, Prompts, lengths_of
from distill.on_policy.schedule import Schedule
from distill.on_policy.start import add_student_rows, report_texts
from distill.train import check
from jobs.config import ParallelConfig
from jobs.interrupts import Interrupted
from tests.support.on_policy_job import (
    CONFIG,
    ROW,
    STOP,
    Job,
    make_data,
    make_model,
    make_samples,
    make_writer,
)
from training.checkpoint import Checkpoint
from training.config import DataConfig, DomainConfig
from training.data.mixture import MixedData
from training.data.packing import PackedData, Sample, collate
from training.held_out.texts import Text, measure_text
from training.objectives import TeacherStates, freeze, hidden_states
from training.parallel.strategy import Parallel


@pytest.mark.parametrize("share", [0.1, 0.25, 0.7, 0.99])
@pytest.mark.parametrize("warmup", [0, 10])
def test_the_share_of_rows_follows_the_schedule(share: float, warmup: int):
    config = OnPolicyConfig(share=share, start=5, warmup_steps=warmup, refresh=7)
    schedule = Schedule(config, rows_per_step=4, last_step=100)
    rows = [schedule.rows_in(step) for step in range(100)]
    assert not any(rows[:5])
    assert max(rows) <= math.ceil(4 * share)
    # over a rise from 0 to the share, half of it
    assert sum(rows) == pytest.approx(4 * share * (95 - warmup / 2), abs=1)
    refreshes = [step for step in range(100) if schedule.refreshes_at(step)]
    assert refreshes == list(range(5, 100, 7))
    written = [sum(rows[step : step + 7]) for step in refreshes]
    assert [schedule.rows_from(step) for step in refreshes] == written


def test_a_prompt_ends_where_an_answer_begins():
    chat = Sample(np.arange(9), np.array([0, 0, 1, 1, 0, 0, 0, 1, 1], dtype=bool))
    assert lengths_of(chat) == [2, 7]
    text = Sample(np.arange(40), np.arange(40) > 0)
    assert lengths_of(text) == [TEXT_PROMPT_TOKENS]
    assert lengths_of(Sample(np.arange(32), np.arange(32) > 0)) == [], "nothing would follow"
    prompts = Prompts([chat, text], room=7, seed=0)
    assert prompts.too_long == 1
    assert sorted(prompts[number] for number in range(2)) == [[0, 1], [0, 1, 2, 3, 4, 5, 6]]


def test_data_without_prompts_are_refused():
    with pytest.raises(UserError, match=r"no prompt to answer. Of 60 prompts in 30 samples, none"):
        Prompts(make_samples(), room=2, seed=0)


def with_answer(prompt: list[int], answer: list[int]) -> Sample:
    ids = np.asarray(prompt + answer)
    return Sample(ids, np.arange(len(ids)) >= len(prompt))


def test_the_text_equals_decoding_the_student_alone():
    """Check that an answer is a function of seed, step, prompt and weights, in another backend."""
    student, teacher = make_model(1, 0, torch.float64), make_model(3, 1, torch.float64)
    prompts = Prompts(make_samples(), room=40, seed=7)
    answers = make_writer(student, teacher).write(6, prompts, first=3, tokens=200)
    assert len(answers) > 5
    student.set_attn_implementation("eager")
    alone = HFTarget(student, "alone")
    settings = Settings(8, 1.0, seed=7, stop_token_ids=(STOP,))

    def decoded(step: int, number: int) -> list[int]:
        keys = [noise.key(step, number)]
        return decode(alone, None, [prompts[number]], settings, request_ids=keys)[0].tokens

    assert answers == [decoded(6, 3 + number) for number in range(len(answers))]
    assert answers != [decoded(7, 3 + number) for number in range(len(answers))]  # control


def test_only_the_tokens_of_the_student_are_supervised():
    job = Job()
    rows = job.data.step_rows(0)
    count = len(job.data.ordinary.samples)
    assert [all(index >= count for index in row) for row in rows] == [False, False, True, True]
    for row in rows[2:]:
        batch = collate(job.data.samples, [row], ROW)
        written = [job.data.written.answers[index - count] for index in row]
        assert batch.at_supervised(batch.next_RT).tolist() == list(chain(*written))
        assert job.data.supervised_in([row]) == batch.supervised
        assert batch.tokens > batch.supervised
    assert not {tuple(row) for row in rows} & {tuple(row) for row in job.data.step_rows(1)[2:]}


def test_the_rows_of_a_refresh_are_used_once():
    job = Job(replace(CONFIG, share=0.6))
    used = [
        tuple(row)
        for step in range(2)
        for row in job.data.step_rows(step)
        if row[0] >= len(job.data.ordinary.samples)
    ]
    assert len(used) == len(set(used)) == math.floor(0.6 * 4 * 2)


def train(folder: Path, stop_after: int = 0, **given: Any) -> tuple[Checkpoint, Job]:
    job = Job(**given)
    return job.run(folder, stop_after), job


def equal(a: Checkpoint, b: Checkpoint) -> bool:
    return a.state["data"] == b.state["data"] and all(
        torch.equal(ours[name], theirs[name])
        for ours, theirs in ((a.model, b.model), (a.optimizer, b.optimizer))
        for name in ours
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Job]:
    return train(tmp_path_factory.mktemp("straight"))


# before the refresh of step 2 (counted from 0), and in its rows
@pytest.mark.parametrize("stop_after", [2, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(
    straight: tuple[Checkpoint, Job], tmp_path: Path, stop_after: int
):
    with pytest.raises(Interrupted):
        train(tmp_path, stop_after)
    resumed, job = train(tmp_path)
    assert equal(resumed, straight[0])
    records = straight[1].log.records
    assert [{**one, "tokens_per_second": 0} for one in job.log.records] == [
        {**one, "tokens_per_second": 0} for one in records[-len(job.log.records) :]
    ]
    assert records[-1]["on_policy_log_prob"] < 0


class Rewriting(OnPolicyData):
    """Control: a resumed run that writes its rows again, with the weights of the checkpoint."""

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if self.written is not None:
            step = self.written.step
            answers = self.writer.write(step, self.prompts, self.written.first, 6 * ROW)
            self._use(replace(self.written, answers=answers))


def test_rows_of_other_weights_are_detected(straight: tuple[Checkpoint, Job], tmp_path: Path):
    """Control: other rows for the rest of an interval give other weights."""
    with pytest.raises(Interrupted):
        train(tmp_path, stop_after=3)
    resumed, _ = train(tmp_path, kind=Rewriting)
    assert not equal(resumed, straight[0])


class Fixed:
    """Writer of the answer (step + 3, 4)."""

    def write(self, step: int, prompts: Prompts, first: int, tokens: int) -> list[list[int]]:
        return [[step + 3, 4]] * tokens

    def measure(self, samples: Any, rows: Any) -> dict[str, float]:
        return {"log_prob": -1.0}


@pytest.mark.parametrize("recurring", [1, math.inf])
def test_the_cache_of_the_teacher_ignores_rows_of_the_student(recurring: float):
    """Check that rows of later refreshes, with the numbers of earlier ones, are read anew.

    Control: a cache of all rows returns the states of the first refresh.
    """
    teacher, chat = freeze(make_model(3, 1)), make_samples()[0]
    ordinary = PackedData([chat], ROW, rows_per_step=2, seed=7)
    data = OnPolicyData(ordinary, Prompts([chat], 9, 7), Schedule(CONFIG, 2), Fixed())
    states, fresh = TeacherStates(teacher, 10**8, recurring), TeacherStates(teacher, 0)
    rows: list[list[int]] = []
    for step in (0, 2):
        rows = rows or data.step_rows(step)
        if step:
            data.step_rows(step)
        batch = collate(data.samples, rows, ROW)
        found, right = states(batch), torch.cat([fresh(batch.row(index)) for index in range(2)])
    assert torch.equal(found, right) == (recurring == 1)
    assert states.tokens_read == (3 if recurring == 1 else 2) * ROW, "the ordinary row is cached"


def test_without_a_share_the_data_are_unchanged():
    data, parallel = make_data(), Parallel(ParallelConfig(), "cpu")
    assert add_student_rows(data, None, None, TrainConfig(), parallel, ()) is data


def test_writing_and_measuring_use_no_random_generator():
    """Check that the report before the first step changes no later random number."""
    before = torch.get_rng_state()
    np_before = np.random.get_state()[1].copy()
    job = Job()
    torch.set_rng_state(before)
    job.data.step_rows(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == np_before).all()


def test_figures_of_a_text_equal_those_of_the_complete_logits():
    teacher, student, data = make_model(3, 1), make_model(1, 0), make_data()
    rows = data.rows[:3]
    found = measure_text(Text(data.samples, rows), ROW, teacher, student, most_tokens=3 * ROW)
    batch = collate(data.samples, rows, ROW)
    with torch.no_grad():
        p_NV, q_NV = (
            model.lm_head(batch.at_supervised(hidden_states(model, batch))).log_softmax(-1)
            for model in (teacher, student)
        )
    labels_N = batch.at_supervised(batch.next_RT)
    kl = (p_NV.exp() * (p_NV - q_NV)).sum(-1).mean()
    assert found.tokens == len(labels_N)
    assert found.log_prob == pytest.approx(float(p_NV.gather(1, labels_N[:, None]).mean()), 1e-5)
    assert found.argmax == pytest.approx(float((p_NV.argmax(-1) == labels_N).double().mean()))
    assert found.kl == pytest.approx(float(kl), 1e-5)
    alone = measure_text(Text(data.samples, rows), ROW, teacher)
    assert alone == replace(found, kl=None) and "kl" not in alone.values()
    one = measure_text(Text(data.samples, data.rows), ROW, teacher, student, most_tokens=1)
    assert one.tokens == data.supervised_in(data.rows[:1]), "bounded"


def test_a_student_with_nan_is_named():
    job = Job()
    with torch.no_grad():
        job.student.model.norm.weight[0] = math.nan
    with pytest.raises(
        UserError, match="the target 'student after 0 steps' computes non-finite logits"
    ):
        job.data.step_rows(0)


def test_a_student_that_cannot_be_decoded_is_refused():
    student = make_model(1, 0)
    student.config.model_type = "gpt2"
    with pytest.raises(UserError, match="model_type is 'gpt2', expected one of llama"):
        make_writer(student, None)


@pytest.mark.parametrize(
    ("chosen", "loss", "words"),
    [
        ({"share": 1.0}, "forward_kl", "share is 1.0, expected from 0 .off. to below 1"),
        ({"share": -0.1}, "forward_kl", "share is -0.1"),
        ({"share": 0.5}, "cross_entropy", "share is 0.5, .*no teacher"),
        ({"share": 0.5}, "mixture", "share is 0.5, .*no teacher"),
        ({"refresh": 0}, "forward_kl", "refresh is 0, expected 1 or more"),
        ({"start": -1}, "forward_kl", "start is -1, expected 0 or more"),
        ({"warmup_steps": -1}, "forward_kl", "warmup_steps is -1, expected 0 or more"),
        ({"temperature": -1.0}, "forward_kl", "temperature is -1"),
        ({"max_new_tokens": 0}, "forward_kl", "max_new_tokens is 0"),
        (
            {"share": 0.5, "max_new_tokens": 512},
            "forward_kl",
            "max_new_tokens is 512, expected less than data.max_length .512.",
        ),
    ],
)
def test_invalid_values_are_refused(chosen: dict[str, Any], loss: str, words: str):
    config = TrainConfig(on_policy=OnPolicyConfig(**chosen), loss=StudentLossConfig(name=loss))
    if loss == "mixture":
        config.loss.parts |= {"forward_kl": 0.9, "cross_entropy": 0.1}
    with pytest.raises(UserError, match=f"on_policy.{words}"):
        check(config)
    check(TrainConfig())


def report(share: float, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """Return the lines and figures of the report on the small job."""
    config = TrainConfig(on_policy=replace(CONFIG, share=share), data=DataConfig(max_length=ROW))
    teacher, student, data = make_model(3, 1), make_model(1, 0), make_data()
    parallel = Parallel(ParallelConfig(), "cpu")
    prompts = Prompts(data.samples, 40, 7)
    answers = make_writer(teacher, teacher).write(0, prompts, 0, 100)
    samples = [with_answer(prompts[number], answer) for number, answer in enumerate(answers)]
    models = (student, teacher)
    data = add_student_rows(data, *models, config, parallel, (STOP,))
    printed: list[str] = []
    found = report_texts(data, *models, samples, config, parallel, printed)
    words = capsys.readouterr().out
    assert "".join(printed) in words
    return words, found


def test_the_texts_are_reported_before_the_first_step(capsys: pytest.CaptureFixture[str]):
    words, figures = report(0.25, capsys)
    assert words.startswith("on-policy: the student writes 25% of the rows, answers to 60 prompts;")
    assert figures.keys() == {"data", "target", "student"}
    for name, title in (
        ("data", "training data"),
        ("target", "the target's answers, temperature 1"),
        ("student", "the student's answers, temperature 1"),
    ):
        shown = figures[name]
        cells = f"{shown['argmax']:.0%} {shown['log_prob']:.2f} nats {shown['kl']:.2f} nats"
        assert f" {title} {cells}" in " ".join(words.split())
    assert figures["target"]["log_prob"] > figures["student"]["log_prob"]
    assert figures["target"]["log_prob"] > figures["data"]["log_prob"]
    words, figures = report(0.0, capsys)
    assert figures.keys() == {"data", "target"}
    assert "student's" not in words and "on-policy" not in words and "KL to the student" in words


def test_a_mixture_keeps_its_state_beside_rows_of_the_student():
    def made() -> OnPolicyData:
        settings = DataConfig(
            domains={name: DomainConfig(texts=["x"]) for name in ("a", "b")}, max_length=ROW
        )
        samples = make_samples()
        data = MixedData({"a": samples[:15], "b": samples[15:]}, settings, 4, seed=7)
        return OnPolicyData(data, Prompts(samples, 40, 7), Schedule(CONFIG, 4), Fixed())

    data, again = made(), made()
    for step in range(3):
        data.step_rows(step)
    state = json.loads(json.dumps(data.state()))
    again.load(state)
    assert again.state() == state == data.state()
    assert again.step_rows(3) == data.step_rows(3) != made().ordinary.step_rows(0)
    values = data.adapt({})
    assert values["on_policy_log_prob"] == -1.0
    assert sum(values[f"rows/{name}"] for name in ("a", "b")) == 4 * 4

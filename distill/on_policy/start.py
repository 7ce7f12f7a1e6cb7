"""What `distill.train` does with the student's text before its first step: set it up, report it."""

import time
from typing import Any

from distill.config import TrainConfig
from distill.on_policy.data import OnPolicyData
from distill.on_policy.prompts import Prompts
from distill.on_policy.schedule import Schedule
from distill.on_policy.writer import MEASURED_TOKENS, StudentWriter
from training.data.packing import PackedData, Sample, best_fit
from training.held_out.texts import Text, describe_texts, measure_text, measure_texts
from training.parallel.strategy import Parallel
from training.plan import bounds_of


def add_student_rows(
    data: PackedData,
    student: Any,
    teacher: Any,
    config: TrainConfig,
    parallel: Parallel,
    stop_token_ids: tuple[int, ...],
) -> PackedData:
    """Return the data with rows of the student; the data itself if on_policy.share is 0.

    Raises UserError if the data have no prompts, or if the student cannot be decoded.
    """
    chosen, max_length = config.on_policy, config.data.max_length
    if not chosen.share:
        return data
    writer = StudentWriter(
        student,
        teacher,
        chosen,
        parallel,
        max_length=max_length,
        stop_token_ids=stop_token_ids,
        seed=config.seed,
    )
    prompts = Prompts(data.samples, max_length - chosen.max_new_tokens, config.seed)
    schedule = Schedule(chosen, data.rows_per_step, bounds_of(config.loop, data).steps)
    return OnPolicyData(data, prompts, schedule, writer)


def report_texts(
    data: PackedData,
    student: Any,
    teacher: Any,
    answers: list[Sample],
    config: TrainConfig,
    parallel: Parallel,
    printed: list[str],
) -> dict[str, dict[str, float]]:
    """Measure the training data, the target's text and the student's, and print a table of them.

    answers: the target's answers to the held-out prompts. The student's text is measured if it is
    trained on. printed: receives the table. All ranks must call it. Returns the figures for the
    manifest.
    """
    found = measure_texts(data, answers, teacher, student)
    if isinstance(data, OnPolicyData):
        began = time.monotonic()
        written = data.write_samples(MEASURED_TOKENS)
        seconds = time.monotonic() - began
        text = Text(written, best_fit([len(one.ids) for one in written], data.capacity))
        found["student"] = measure_text(text, data.capacity, teacher, student, MEASURED_TOKENS)
        if parallel.is_main:
            pace = sum(len(one.ids) for one in written) / seconds
            print(_describe_plan(data, pace))
    if parallel.is_main:
        own = {"target": config.held_out.temperature, "student": config.on_policy.temperature}
        print(table := describe_texts(found, own))
        printed.append(table)
    return {name: figures.values() for name, figures in found.items()}


def _describe_plan(data: OnPolicyData, pace: float) -> str:
    """Return the line on the student's rows. pace: tokens of such rows per second."""
    config, prompts = data.schedule.config, data.prompts
    steps = min(config.refresh, data.schedule.last_step)
    seconds = config.share * steps * data.rows_per_step * data.capacity / pace
    left_out = f" ({prompts.too_long:,} too long)" if prompts.too_long else ""
    since = f" from step {config.start + 1} on" if config.start else ""
    return (
        f"on-policy: the student writes {config.share:.0%} of the rows{since}, answers to "
        f"{len(prompts):,} prompts{left_out}; every {steps:,} steps this takes some "
        f"{seconds:,.1f} s"
    )

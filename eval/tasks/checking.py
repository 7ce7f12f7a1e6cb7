"""Checks of a run's answers, which show that drafting leaves the score of a task as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from eval.measure.records import AUTOREGRESSIVE, Condition, Record, write_records
from eval.statistics.schema import Row
from eval.tasks.answers import Number, Program
from eval.tasks.execution import PASSED, check_platform, run_program
from eval.tasks.forms import Problem
from training.data.readers import Prompt

FILE = "answers.jsonl"


@dataclass(frozen=True)
class CheckedAnswer:
    """The check of one answer of one arm."""

    temperature: float
    batch_size: int
    drafter: str
    num_draft_tokens: int
    prompt_id: str
    sample: int
    right: bool
    found: str  # its number, or passed, failed or timed out
    expected: str  # the solution's number, or passed

    @property
    def condition(self) -> Condition:
        return Condition(self.temperature, self.batch_size)


def kinds_of_checks(prompts: Sequence[Prompt]) -> set[type]:
    """Return the kinds of checks that the prompts have, Number or Program."""
    return {type(one.check) for one in prompts if isinstance(one, Problem) and one.check}


def describe_checks(prompts: Sequence[Prompt], execute: bool) -> str:
    """Describe how answers are checked, as part of a sentence; "" if none can be.

    Raises UserError if code is to be executed on a system without limits.
    """
    kinds = kinds_of_checks(prompts)
    if Program in kinds and execute:
        check_platform()
        return "the target's code is run against the published tests, in processes with limits"
    if Program in kinds:
        return "not checked, as this would run code that the target writes (benchmark.execute=true)"
    return "the last number is compared with the published solution's" if Number in kinds else ""


def check_answers(
    prompts: Sequence[Prompt],
    records: Sequence[Record],
    text_of: Callable[[Sequence[int]], str],
    execute: bool,
) -> list[CheckedAnswer]:
    """Return the checks of all first answers of the main part whose prompts have one.

    execute: whether to run programs; without it they are left out. Equal programs run once.
    """
    problems = {one.id: one for one in prompts if isinstance(one, Problem)}
    outcome = cache(run_program)
    checked = []
    for record in records:
        problem = problems.get(record.prompt_id)
        if problem is None or record.part != "main" or record.turn:
            continue
        text = text_of(record.tokens)
        if isinstance(problem.check, Number):
            found, expected = problem.check.found(text), f"{problem.check.expected.normalize():f}"
            right = problem.check.accepts(text)
            shown = "none" if found is None else f"{found.normalize():f}"
        elif isinstance(problem.check, Program) and execute:
            shown, expected = outcome(problem.check.source(text)), PASSED
            right = shown == PASSED
        else:
            continue
        checked.append(
            CheckedAnswer(
                record.temperature,
                record.batch_size,
                record.drafter,
                record.num_draft_tokens,
                record.prompt_id,
                record.sample,
                right,
                shown,
                expected,
            )
        )
    return checked


def write_answers(folder: Path, answers: Sequence[CheckedAnswer]) -> None:
    """Write answers.jsonl into a run folder in one atomic step, if any answer was checked."""
    if answers:
        write_records(folder / FILE, answers)


def with_answers(rows: Sequence[Row], answers: Sequence[CheckedAnswer]) -> list[Row]:
    """Return the rows; those of the main part have the counts of right answers."""

    def count(row: Row, drafter: str, gamma: int) -> tuple[int, int]:
        here = [
            one.right
            for one in answers
            if (one.condition, one.drafter, one.num_draft_tokens) == (row.condition, drafter, gamma)
        ]
        return len(here), sum(here)

    found = []
    for row in rows:
        if row.part == "main" and answers:
            checked, right = count(row, row.drafter, row.num_draft_tokens)
            _, base_right = count(row, AUTOREGRESSIVE, 0)
            row = replace(
                row,
                answers_checked=checked,
                answers_right=right,
                baseline_answers_right=base_right,
            )
        found.append(row)
    return found

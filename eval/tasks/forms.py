"""Prompts of benchmarks in the forms in which they are published, with the checks of their answers.

Every form also reads `{"id", "category", "turns", "reference"}`, this project's own form, whose
first reference is the solution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.values import check_choice
from eval.tasks.answers import Check, Number, Program, number_of
from training.data.counts import BadRecordError, Counts
from training.data.readers import (
    MAX_BAD,
    NUMBER_KEYS,
    Prompt,
    check_text,
    parse_prompt,
    read_prompts,
)

AUTO = "auto"
# form -> prompts of the published benchmark, of the smallest published file if there are several:
# MBPP's sanitized tasks, the test split of HellaSwag, AlpacaEval's instructions
PUBLISHED = {"mt_bench": 80, "spec_bench": 480, "gsm8k": 1319, "mgsm": 2750, "humaneval": 164}
PUBLISHED |= {"mbpp": 427, "hellaswag": 10003, "alpaca": 805}
SEVERAL_FILES = ("mbpp", "hellaswag", "alpaca")
# Spec-Bench's first 80 questions are MT-bench's, in its eight categories.
_MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
)
_SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")
# text of SPEED-Bench's turns that its own script must fill in from their sources
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
# Austin et al. 2021 (arXiv 2108.07732), figure 1.
_MBPP = (
    "You are an expert Python programmer, and here is your task: {task} Your code should pass "
    "these tests:\n\n{tests}\n"
)


@dataclass(frozen=True)
class Problem(Prompt):
    """A prompt with its published solution and the check of its answer, where it has them."""

    solution: str = ""
    check: Check | None = None


def read_problems(
    form: str, path: str, max_bad: float = MAX_BAD, counts: Counts | None = None
) -> list[Prompt]:
    """Read the prompts of a file in a published form.

    form: a key of FORMS, or auto for those that `read_prompts` knows, without checks. path: a file,
    or a folder of them. counts: receives the numbers of used and skipped records. Raises UserError
    for an unknown form and an invalid file.
    """
    check_choice("benchmark.format", form, (AUTO, *FORMS))
    if form == AUTO:
        return read_prompts(path, max_bad=max_bad, counts=counts)
    parse, expected = FORMS[form]
    return read_prompts(path, max_bad=max_bad, parse=parse, expected=expected, counts=counts)


def _turns(record: Mapping[str, Any], place: str) -> Prompt:
    """Return the prompt of a record with turns, as MT-bench has them."""
    if "turns" not in record:
        raise BadRecordError('no "turns"')
    return parse_prompt(dict(record), place)


def _spec_bench(record: dict[str, Any], place: str) -> Prompt:
    """Return a question of Spec-Bench, whose category is one of its six groups."""
    prompt = _turns(record, place)
    known = (*_MT_BENCH, *_SPEC_BENCH)
    if prompt.category not in known:
        raise BadRecordError(f"category {prompt.category!r} (known: {', '.join(known)})")
    group = "mt_bench" if prompt.category in _MT_BENCH else prompt.category
    return Prompt(prompt.id, group, prompt.turns)


def _speed_bench(record: dict[str, Any], place: str) -> Prompt:
    """Return a prompt of SPEED-Bench; one whose text must still be fetched is bad."""
    prompt = _turns(record, place)
    if any(_PLACEHOLDER in turn for turn in prompt.turns):
        raise BadRecordError("a placeholder, which SPEED-Bench's own prepare_data.py fills in")
    return prompt


def _gsm8k(record: dict[str, Any], place: str) -> Prompt:
    """Return a question of GSM8K, {"question", "answer": "... #### 18"}.

    Worked examples may end with "The answer is 18." instead.
    """
    question, solution = _ours(record) or (_string(record, "question"), _string(record, "answer"))
    return _number_problem(question, solution, _name(record, place), "gsm8k")


def _mgsm(record: dict[str, Any], place: str) -> Prompt:
    """Return a question of MGSM, a line of mgsm_LANGUAGE.tsv: question, tab, number.

    A table's columns are question and answer_number. The category is mgsm_LANGUAGE.
    """
    name = Path(place.rpartition(":")[0]).stem
    category = str(record.get("category", name if name.startswith("mgsm_") else "mgsm"))
    if (cells := record.get("columns")) is not None:
        if len(cells) != 2:
            raise BadRecordError(
                f"expected a question, a tab and a number, found columns: {len(cells)}"
            )
        question, solution = cells
    else:
        question, solution = _ours(record) or (
            _string(record, "question"),
            str(record.get("answer_number", "")),
        )
    line = place.rpartition(":")[2]
    return _number_problem(question, solution, _name(record, f"{category}/{line}"), category)


def _humaneval(record: dict[str, Any], place: str) -> Prompt:
    """Return a function to complete, {"task_id", "prompt", "entry_point", "test"}."""
    prompt = parse_prompt(record, place)
    given = [record.get(key) for key in ("entry_point", "test")]
    if given == [None, None]:  # without tests: prompts alone
        return prompt
    name, tests = (_string(record, key) for key in ("entry_point", "test"))
    check = Program(_string(record, "prompt"), name, f"{tests}\n\ncheck({name})")
    solution = record.get("canonical_solution", "")
    return Problem(prompt.id, "humaneval", prompt.turns, solution, check)


def _mbpp(record: dict[str, Any], place: str) -> Prompt:
    """Return a task of MBPP, {"task_id", "text", "test_list"}; the sanitized file has "prompt"."""
    if "test_list" not in record:  # without tests: prompts alone
        return parse_prompt(record, place)
    tests = record["test_list"]
    if not isinstance(tests, list) or not tests or not all(isinstance(one, str) for one in tests):
        raise BadRecordError("test_list is not a list of strings")
    task = _string(record, "text" if "text" in record else "prompt")
    before = [record.get("test_setup_code") or "", *(record.get("test_imports") or [])]
    check = Program("", "", "\n".join([*map(str, before), *tests]))
    turn = _MBPP.format(task=task.strip(), tests="\n".join(tests))
    solution = str(record.get("code", ""))
    return Problem(_name(record, place), "mbpp", [check_text(turn)], solution, check)


def _hellaswag(record: dict[str, Any], place: str) -> Prompt:
    """Return a context of HellaSwag to continue, {"ctx", "source_id"} or {"prompt"}.

    The category is the context's source, activitynet or wikihow, where the record names it.
    """
    if "ctx" not in record:
        return parse_prompt(record, place)
    source = str(record.get("source_id", "none")).partition("~")[0]
    name = str(record.get("ind", place))
    return Prompt(name, check_text(source), [check_text(_string(record, "ctx"))])


def _alpaca(record: dict[str, Any], place: str) -> Prompt:
    """Return an instruction of Alpaca or AlpacaEval, {"instruction", "input", "dataset"}.

    The category is the part of AlpacaEval, where the record names it.
    """
    if "instruction" not in record:
        return parse_prompt(record, place)
    turn, further = _string(record, "instruction"), record.get("input")
    if isinstance(further, str) and further.strip():
        turn = f"{turn}\n\n{further}"
    category = str(record.get("dataset", "alpaca"))
    return Prompt(_name(record, place), check_text(category), [check_text(turn)])


# form -> the function that reads a record, and the records that it accepts
FORMS: dict[str, tuple[Callable[[dict[str, Any], str], Prompt], str]] = {
    "mt_bench": (_turns, '{"question_id", "category", "turns"}'),
    "spec_bench": (_spec_bench, '{"question_id", "category", "turns"}'),
    "speed_bench": (_speed_bench, '{"question_id", "category", "turns"}'),
    "gsm8k": (
        _gsm8k,
        '{"question", "answer"}, which ends "#### NUMBER" or "The answer is NUMBER."',
    ),
    "mgsm": (_mgsm, 'lines "QUESTION, tab, NUMBER" or {"question", "answer_number"}'),
    "humaneval": (_humaneval, '{"task_id", "prompt", "entry_point", "test"}'),
    "mbpp": (_mbpp, '{"task_id", "text", "test_list"}'),
    "hellaswag": (_hellaswag, '{"ind", "ctx", "source_id"} or {"prompt"}'),
    "alpaca": (_alpaca, '{"instruction", "input"}'),
}


def _number_problem(question: str, solution: str, name: str, category: str) -> Problem:
    number = number_of(solution)
    if number is None:
        raise BadRecordError(
            'the solution has no single number, nor "#### NUMBER" or "The answer is NUMBER."'
        )
    if not question.strip():
        raise BadRecordError("an empty question")
    turns = [check_text(question)]
    return Problem(name, check_text(category), turns, check_text(solution), Number(number))


def _ours(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first turn and the first reference; None for a record without turns."""
    if "turns" not in record:
        return None
    pair = [record["turns"], record.get("reference")]
    if not all(isinstance(one, list) and one and isinstance(one[0], str) for one in pair):
        raise BadRecordError("turns and reference are not lists of strings")
    return record["turns"][0], record["reference"][0]


def _string(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise BadRecordError(f'no text in "{key}"')
    return check_text(value)


def _name(record: Mapping[str, Any], place: str) -> str:
    given = (record[key] for key in NUMBER_KEYS if record.get(key) is not None)
    return check_text(str(next(given, place)))

"""Checks of answers: numbers in many notations, and programs put together and run under limits."""

import os
import socket
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest

from decoding.errors import UserError
from eval.measure.records import BASELINE, Arm, Record
from eval.tasks.answers import Number, Program, number_of
from eval.tasks.checking import check_answers, describe_checks, with_answers
from eval.tasks.execution import FAILED, PASSED, TIMED_OUT, check_platform, run_program
from eval.tasks.forms import Problem, read_problems
from training.data.readers import Prompt


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("16 - 3 - 4 = 9\n9 * 2 = 18\n#### 18", "18"),
        ("#### 18\n\nQuestion: 3 more?", "18"),
        ("#### -7.50", "-7.5"),
        ("So she makes $18.", "18"),
        ("The answer is 1,234.", "1234"),
        ("Es sind 1.234 Euro.", "1234"),
        ("Cela fait 1\u202f234\u00a0567.", "1234567"),
        ("মোট 1,00,000 টাকা", "100000"),
        ("উত্তর ১৮", "18"),
        ("答案是18美元", "18"),
        ("It costs $3.50", "3.5"),
        ("It costs 18,00 Euro", "18"),
        ("0.125", "0.125"),
        ("3.14159", "3.14159"),
        ("10-5", "5"),
        ("x = -5", "-5"),
        ("\u22125", "-5"),
        ("(4)-5", "5"),
        ("one of 1,2,3", "3"),
        ("1,234.50", "1234.5"),
        ("1,234,567", "1234567"),
        ("18.0", "18"),
        ("none at all", None),
        ("", None),
        ("#### unknown, perhaps 4", "4"),
        ("The answer is 18. He had 3 more.", "18"),
        ("The answer is 7. No: the answer is $1,234.50.", "1234.5"),
        ("So the final answer is: -$6.", "-6"),
        ("The answer is 5 + 4 = 9 pens, of which 2 are new.", "9"),
        ("The answer is 0.75 of 4", "0.75"),
        ("The answer is eighteen, or 18.", "18"),
        ("The answer is clear. It is 4.", "4"),
        ("The answer is 3.\n#### 5", "5"),
    ],
)
def test_the_number_of_an_answer(answer: str, number: str | None) -> None:
    found = Number(Decimal(0)).found(answer)
    assert found == (None if number is None else Decimal(number))


def test_only_the_expected_number_is_accepted() -> None:
    check = Number(Decimal(18))
    assert check.accepts("#### 18") and check.accepts("18.00")
    assert not check.accepts("#### 17"), "control: another number"
    assert not check.accepts("18 eggs, of which 16 are left"), "control: not the last number"
    assert not check.accepts("eighteen"), "control: no number"
    assert Number(Decimal(3), until="Q:").accepts("3\nQ: And 4?")


def test_the_number_of_a_solution_is_unique() -> None:
    assert number_of("2 + 2 = 4\n#### 1,234") == 1234
    assert number_of("1,234") == 1234
    assert number_of("1 and 2 are 3. The answer is 3.") == 3
    assert number_of("The answer is 3.\n#### 5") == 5
    assert number_of("2 or 3") is None and number_of("") is None


PROMPT = 'import math\n\n\ndef double(x):\n    """Return twice x."""\n'
TESTS = "def check(f):\n    assert f(2) == 4\n    assert f(0) == 0\n\ncheck(double)"
RIGHT = [
    "    return 2 * x\n",
    "   return 2 * x\n",  # a tokenizer dropped the first space
    "\n    return 2 * x\n\n\ndef other(:\n",  # cut at the next function
    "    return math.prod((2, x))\n# Done\n",
    "def double(x):\n    return 2 * x\n",
    "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.",
    "```python\nfrom math import prod\n\ndef double(x):\n    return prod((2, x))",  # unfinished
]
WRONG = ["    return x\n", "    return 2 *\n", "I cannot.", "", "    import sys; sys.exit(0)\n"]


@pytest.mark.parametrize("answer", RIGHT)
def test_a_right_program_passes(answer: str) -> None:
    assert run_program(Program(PROMPT, "double", TESTS).source(answer)) == PASSED


@pytest.mark.parametrize("answer", WRONG)
def test_control_a_wrong_program_fails(answer: str) -> None:
    assert run_program(Program(PROMPT, "double", TESTS).source(answer)) == FAILED


@pytest.mark.parametrize("answer", ["def f(): return 1", "[BEGIN]\ndef f(): return 1\n[DONE]\nx ="])
def test_a_program_without_a_prompt_is_all_of_the_answer(answer: str) -> None:
    assert run_program(Program("", "", "assert f() == 1").source(answer)) == PASSED
    assert run_program(Program("", "", "assert f() == 2").source(answer)) == FAILED


def test_a_program_that_does_not_end_is_stopped() -> None:
    began = time.monotonic()
    assert run_program("while True: pass", seconds=1) == TIMED_OUT
    assert run_program("import time\ntime.sleep(60)", seconds=1) == TIMED_OUT
    assert time.monotonic() - began < 20


REFUSED = {
    "memory": "x = bytearray(2**33)",
    "file size": "with open('big', 'wb') as f:\n    f.write(bytes(2**22))\n    f.flush()",
    "file outside": "open('{outside}', 'w').write('x')",
    "secret": "open('{secret}').read()",
    "folder": "import os\nos.listdir('{home}')",
    "removal": "import os\nos.remove('{secret}')",
    "process": "import subprocess\nsubprocess.run(['true'])",
    "fork": "import os\nos.fork()",
    "shell": "import os\nos.system('true')",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', {port}))",
    "native code": "import ctypes\nctypes.CDLL(None)",
    "environment": "import os\nassert 'SECRET' in os.environ",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_reaches_nothing_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Check each limit, and as a control that the same program does its work without them."""
    monkeypatch.setenv("SECRET", "1")
    secret = tmp_path / "secret"
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"outside": tmp_path / "made", "secret": secret, "home": tmp_path}
        source = REFUSED[name].format(**values, port=server.getsockname()[1])
        secret.write_text("x")
        assert run_program(source) == FAILED
        assert secret.is_file() and not (tmp_path / "made").exists()
        if name in ("memory", "file size", "fork"):
            return
        monkeypatch.chdir(tmp_path)
        exec(compile(source, "control", "exec"), {})


def test_a_program_may_use_its_folder_and_the_library() -> None:
    source = "import collections, json, re, heapq, hashlib, itertools, random, string, typing\n"
    source += "open('note', 'w').write('x')\nassert open('note').read() == 'x'\n"
    assert run_program(source) == PASSED


def test_a_program_finds_no_module_of_the_project() -> None:
    for module in ("torch", "eval.tasks"):
        assert run_program(f"import {module}") == FAILED
    assert {"torch", "eval.tasks"} <= sys.modules.keys(), "control: they are here"


def test_execution_needs_limits_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    check_platform()
    with monkeypatch.context() as patched:
        patched.setattr(os, "name", "nt")
        with pytest.raises(UserError) as refused:
            check_platform()
    assert "benchmark.execute=true needs" in str(refused.value)


def record(arm: Arm, prompt: str, text: str, part: str = "main", turn: int = 0) -> Record:
    values = dict.fromkeys(("rounds", "drafted", "draft_steps", "verified", "unit"), 1)
    seconds = dict.fromkeys(
        ("prefill_seconds", "decode_seconds", "draft_seconds", "cpu_seconds"), 1.0
    )
    return Record(
        part=part,
        temperature=0.0,
        batch_size=1,
        drafter=arm.drafter,
        num_draft_tokens=arm.num_draft_tokens,
        prompt_id=prompt,
        category="x",
        turn=turn,
        prompt_tokens=1,
        tokens=[*map(ord, text)],
        finish="stop",
        tested_by_depth=[],
        accepted_by_depth=[],
        differs_at=None,
        gap=None,
        **values,
        **seconds,
    )


def text_of(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def test_answers_of_the_main_part_are_checked_and_counted(rows) -> None:  # type: ignore[no-untyped-def]
    """Check that a drafter that changes an answer is seen. The rows are simulated ones."""
    main = next(row for row in rows if row.part == "main" and row.temperature == 0)
    mine = Arm(main.drafter, main.num_draft_tokens)
    prompts = [
        Problem("a", "x", ["?"], "#### 1", Number(Decimal(1))),
        Problem("b", "x", ["?"], "", Program("", "", "assert f() == 1")),
        Prompt("c", "x", ["?"]),
    ]
    code = "def f(): return 1"
    records = [
        record(arm, prompt, text, part)
        for arm in (BASELINE, mine)
        for part in ("main", "sweep")
        for prompt, text in (("a", "1" if arm == BASELINE else "2"), ("b", code), ("c", "1"))
    ]
    records.append(record(mine, "a", "1", turn=1))
    found = check_answers(prompts, records, text_of, execute=True)
    assert [(one.drafter, one.prompt_id, one.right, one.found) for one in found] == [
        (BASELINE.drafter, "a", True, "1"),
        (BASELINE.drafter, "b", True, PASSED),
        (mine.drafter, "a", False, "2"),
        (mine.drafter, "b", True, PASSED),
    ]
    [row] = with_answers([main], found)
    assert (row.answers_checked, row.answers_right, row.baseline_answers_right) == (2, 1, 2)
    kept = check_answers(prompts, records, text_of, execute=False)
    assert {one.prompt_id for one in kept} == {"a"}, "no program runs unless asked"
    assert "compared" in describe_checks(prompts[:1], execute=False)
    assert "benchmark.execute=true" in describe_checks(prompts, execute=False)
    assert describe_checks(prompts[2:], execute=True) == ""


@pytest.mark.long
def test_published_solutions_of_humaneval_pass(shared_data: Path) -> None:
    """Check every eighth function. Control: the solution of another function fails."""
    path = shared_data / "eval" / "raw" / "HumanEval.jsonl"
    found = [one for one in read_problems("humaneval", str(path)) if isinstance(one, Problem)]
    for one, other in zip(found[::8], found[1::8], strict=False):
        assert isinstance(one.check, Program)
        assert run_program(one.check.source(one.solution)) == PASSED, one.id
        assert run_program(one.check.source(other.solution)) == FAILED, one.id

"""Checks of a task's answer: the number that it ends with, or a program that must pass tests.

A check shows that drafting leaves a task's score as it is. It is not the score that a leaderboard
would print, as prompts, extraction and length limits differ from harness to harness.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

# A number: digits of any script, perhaps in groups of thousands (1,234 or 1.234, with a no-break
# space, or 1,00,000 as in India), perhaps with decimals. A minus after a letter, a digit or a
# bracket is a hyphen or an operator; one before a currency's sign counts.
_NUMBER = re.compile(
    r"(?<![\d.])(?:(?P<sign>(?<![0-9A-Za-z)])[-\u2212])[$\u20ac\u00a3]?)?"
    r"(?:(?P<grouped>(?!0)\d{1,3}(?:(?:[,.\u00a0\u202f]\d{3})+|(?:,\d{2})+,\d{3})(?!\d))|(?P<plain>\d+))"
    r"(?:\.(?P<decimals>\d+)|,00(?!\d))?"
)
_MARK = "####"  # before the final number, as in GSM8K's solutions
# The last sentence of a worked example (Wei et al. 2022, arXiv 2201.11903, appendix G); a period
# before a digit does not end it.
_STATED = re.compile(r"\banswer is\b(?P<rest>(?:[^\n.]|\.(?=\d))*)", re.IGNORECASE)
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Lines that end the continuation of a function (Chen et al. 2021, arXiv 2107.03374, section 2.1).
_AFTER_FUNCTION = re.compile(r"\n(?=class |def |#|if |print|@)")
_INDENT = 4


@dataclass(frozen=True)
class Number:
    """Check for the number that an answer ends with. expected: the solution's number."""

    expected: Decimal
    # beginning of the next question, where an answer that continues with one is cut; empty: none
    until: str = ""

    def found(self, answer: str) -> Decimal | None:
        """Return the answer's number; None: it has none.

        It is the first one after `####`, else that of the last sentence "The answer is N", else the
        last one. A separator before exactly three digits counts as one of thousands, as solutions
        are whole numbers nearly everywhere.
        """
        if self.until:
            answer = answer.split("\n" + self.until, 1)[0]
        _, mark, after = answer.partition(_MARK)
        if mark and (first := _NUMBER.search(after)):
            return _value(first)
        if stated := _stated(answer):
            return _value(stated)
        numbers = [*_NUMBER.finditer(answer)]
        return _value(numbers[-1]) if numbers else None

    def accepts(self, answer: str) -> bool:
        """Return whether the answer's number is the expected one."""
        return self.found(answer) == self.expected


@dataclass(frozen=True)
class Program:
    """Check for code that must pass tests. It runs only where benchmark.execute is set."""

    prompt: str  # code that the answer continues; empty: the answer is all of it
    entry_point: str  # function that the tests call; empty: any
    tests: str  # code that raises an error for a wrong answer

    def source(self, answer: str) -> str:
        """Return the program to run: the prompt's code, that of the answer, and the tests."""
        return f"{self._code(answer)}\n\n{self.tests}\n"

    def _code(self, answer: str) -> str:
        block = fenced_code(answer)
        if not self.prompt:
            return answer if block is None else block
        code = answer if block is None else block
        if block is not None or re.search(rf"^def {self.entry_point}\b", code, re.MULTILINE):
            # All of the function: it replaces that of the prompt, which keeps imports and helpers.
            return f"{self.prompt.rstrip()}\n{' ' * _INDENT}pass\n\n{code}"
        code = _AFTER_FUNCTION.split(code.lstrip("\n"), maxsplit=1)[0]
        # Some tokenizers drop a space at the start of a text.
        short = len(code) - len(code.lstrip(" "))
        code = " " * (_INDENT - short) + code if 0 < short < _INDENT else code
        return f"{self.prompt.rstrip()}\n{code}"


Check = Number | Program


def number_of(solution: str) -> Decimal | None:
    """Return the number of a published solution; None: it has no definite one.

    It is the one after `####`, else that of the last sentence "The answer is N", else the only one.
    """
    _, mark, after = solution.rpartition(_MARK)
    if not mark and (stated := _stated(solution)):
        return _value(stated)
    numbers = [*_NUMBER.finditer(after if mark else solution)]
    return _value(numbers[0]) if len(numbers) == 1 else None


def fenced_code(answer: str) -> str | None:
    """Return the first fenced block of an answer, also an unfinished one; None: it has none.

    The code between MBPP's marks [BEGIN] and [DONE] is a block too.
    """
    if block := _FENCE.search(answer):
        return block[1]
    _, begun, rest = answer.partition("[BEGIN]")
    return rest.partition("[DONE]")[0] if begun else None


def _stated(text: str) -> re.Match[str] | None:
    """Return the number of the last sentence "The answer is N", behind an equals sign if any."""
    for sentence in reversed([*_STATED.finditer(text)]):
        if number := _NUMBER.search(sentence["rest"].rpartition("=")[2]):
            return number
    return None


def _value(number: re.Match[str]) -> Decimal:
    whole = re.sub(r"\D", "", number["grouped"] or number["plain"])
    return Decimal(f"{'-' if number['sign'] else ''}{whole}.{number['decimals'] or 0}")

"""Worked examples before a question, read from a file of solved problems."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from decoding.errors import UserError
from eval.tasks.forms import Problem, read_problems
from jobs.paths import resolve

TURN = "{turn}"


@dataclass(frozen=True)
class Shots:
    """Worked examples: questions that no prompt may repeat, and the text before a question."""

    questions: frozenset[str] = frozenset()
    text: str = ""

    @property
    def hash(self) -> str:
        """Hash of the text; empty without examples."""
        return sha256(self.text.encode()).hexdigest() if self.text else ""

    def before(self, turn: str) -> str:
        """Return a framed question after the worked examples."""
        return self.text + turn


def read_shots(form: str, path: str, count: int, template: str) -> Shots:
    """Return the first `count` solved problems of a file as text, each in the question's frame.

    form: the published form of the file, with solutions. path: the file, or embedded:NAME.
    template: text around {turn}; an example is the framed question, a space and its solution, as it
    is in the file. Raises UserError for a file with fewer solved problems, and for a count of 0.
    """
    if count < 1:
        raise UserError(
            f"benchmark.num_shots is {count}, expected the number of worked examples of "
            f"benchmark.shots={path}, such as 8."
        )
    solved = [
        one
        for one in read_problems(form, str(resolve(path)))
        if isinstance(one, Problem) and one.solution
    ][:count]
    if len(solved) < count:
        raise UserError(
            f"{path} holds {len(solved)} solved problems of format {form}, expected at least "
            f"benchmark.num_shots={count}. Set benchmark.format to a form with solutions, such as "
            f"gsm8k, or lower benchmark.num_shots."
        )
    examples = [f"{template.replace(TURN, one.turns[0])} {one.solution}" for one in solved]
    return Shots(
        frozenset(one.turns[0] for one in solved),
        "".join(f"{example}\n\n" for example in examples),
    )

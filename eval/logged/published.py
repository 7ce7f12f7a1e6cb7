"""The text formats of "Decoding Speculative Decoding" (Yan et al. 2024, arXiv 2402.01528).

Its log of a target holds the ids of each output as PyTorch prints a tensor, `tensor([[518, 799]])`,
over several lines if it is long. Its output file holds, for each round, the number of tokens that
the text has then, the target's own included, as `tensor([4], dtype=torch.int32)`; a batch has a
number for each row. The next prompt starts again from 0, and nothing else separates the prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from decoding.errors import UserError
from eval.logged.entries import Entry, wrong

OPEN = "tensor("
_TENSOR = re.compile(r"tensor\(\s*(\[[^)]*\])[^)]*\)")
_SPARSE = "..."
EXPECTED = "token ids as tensor([[1, 2, 3]])"
TOTALS_EXPECTED = "the running totals of a round as tensor([4])"


def read_tensors(path: Path, content: str) -> list[Entry]:
    """Return the outputs in a log of tensors, without prompts.

    Rows of a tensor of several rows are separate outputs. Raises UserError, with the line, for text
    outside of tensors, an unfinished or empty tensor, and values that are not ids.
    """
    entries = []
    for line, body in _tensors(path, content, EXPECTED):
        place = f"{path}:{line}"
        inner = body.strip()
        if not (inner.startswith("[[") and inner.endswith("]]")):
            raise wrong(place, repr(body[:40]), EXPECTED)
        for row in re.split(r"\]\s*,\s*\[", inner[2:-2]):
            entries.append(Entry(place, _numbers(row, place, EXPECTED)))
    return entries


def read_totals(path: Path, content: str) -> list[tuple[int, list[int]]]:
    """Return (line, running totals of the batch's rows) of each round of an output file.

    Raises UserError, with the line, for anything but tensors of equal numbers of totals.
    """
    rounds: list[tuple[int, list[int]]] = []
    for line, body in _tensors(path, content, TOTALS_EXPECTED):
        place = f"{path}:{line}"
        totals = _numbers(body.strip().removeprefix("[").removesuffix("]"), place, TOTALS_EXPECTED)
        if rounds and len(totals) != len(rounds[0][1]):
            first = f"{len(rounds[0][1])}, as in the first round"
            raise wrong(place, f"{len(totals)} totals", first)
        rounds.append((line, totals))
    return rounds


def write_totals(path: Path, emitted_by_prompt: Iterable[Sequence[int]]) -> None:
    """Write an output file in the published format.

    emitted_by_prompt: for each prompt, the tokens that each round emitted, the target's included.
    """
    lines = []
    for emitted in emitted_by_prompt:
        total = 0
        for tokens in emitted:
            total += tokens
            lines.append(f"tensor([{total}], dtype=torch.int32)\n")
    path.write_text("".join(lines), encoding="utf-8")


def _tensors(path: Path, content: str, expected: str) -> Iterable[tuple[int, str]]:
    """Yield the line and the body, `[...]`, of each tensor; between them may be blank lines.

    Raises UserError for a file without tensors, and for other text, with its line.
    """
    at = line = 0
    for match in _TENSOR.finditer(content):
        line += _refuse_text(path, content[at : match.start()], line, expected)
        yield line + 1, match[1]
        line += match[0].count("\n")
        at = match.end()
    _refuse_text(path, content[at:], line, expected)
    if not at:
        raise UserError(f"{path} holds no tensors, expected {expected}.")


def _refuse_text(path: Path, between: str, line: int, expected: str) -> int:
    """Return the number of line breaks in the text between two tensors, which must be blank."""
    text = between.lstrip()
    if text:
        before = between[: len(between) - len(text)].count("\n")
        raise wrong(f"{path}:{line + before + 1}", repr(text.splitlines()[0][:40]), expected)
    return between.count("\n")


def _numbers(row: str, place: str, expected: str) -> list[int]:
    values = [value.strip() for value in row.split(",")]
    if values[-1] == "":
        values.pop()
    if _SPARSE in row:
        raise wrong(
            place,
            "a tensor that PyTorch has abbreviated with ...",
            "all ids (torch.set_printoptions(threshold=10**9) before it is printed)",
        )
    if not values or not all(value.isdecimal() for value in values):
        odd = next((value for value in values if not value.isdecimal()), "no numbers")
        raise wrong(place, repr(odd[:40]), expected)
    return list(map(int, values))

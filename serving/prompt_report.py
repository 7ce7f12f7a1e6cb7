"""What a run over prompts found: a line for every answer, the whole beside plain decoding, and
whether the outputs are the target's own.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decoding.errors import UserError
from decoding.rounds.stats import Generation
from decoding.rounds.ties import TIE_GAP
from serving.config import GenerateConfig
from serving.prompts import PromptAnswer, PromptRun, is_compared
from serving.setup import ChatModels

HALF = ("bfloat16", "float16")
SHOWN = 3  # ids named behind a count


def rate(generation: Generation) -> float:
    """Tokens/s of one row while it ran, the prefill excluded."""
    return len(generation.tokens) / max(generation.decode_seconds, 1e-9)


def total_rate(answers: Sequence[PromptAnswer], of: Callable[[PromptAnswer], Generation]) -> float:
    """Tokens/s of all rows together: a batch takes as long as its longest row."""
    seconds: dict[tuple[int, int], float] = defaultdict(float)
    for answer in answers:
        unit = (answer.batch, answer.turn)
        seconds[unit] = max(seconds[unit], of(answer).decode_seconds)
    return sum(len(of(answer).tokens) for answer in answers) / max(sum(seconds.values()), 1e-9)


@contextmanager
def answers_file(output: str) -> Iterator[Callable[[Sequence[PromptAnswer]], None]]:
    """What writes answers to `output`, one JSON object each, at once: a run that is stopped leaves
    all that it answered. Nothing for no name.
    """
    if not output:
        yield lambda answers: None
        return
    with Path(output).open("w", encoding="utf-8") as file:

        def write(answers: Sequence[PromptAnswer]) -> None:
            file.writelines(
                json.dumps(_record(answer), ensure_ascii=False) + "\n" for answer in answers
            )
            file.flush()

        yield write


def _record(answer: PromptAnswer) -> dict[str, Any]:
    drafted, plain = answer.drafted, answer.plain
    record: dict[str, Any] = {
        "id": answer.prompt.id,
        "category": answer.prompt.category,
        "turn": answer.turn,
        "prompt": answer.prompt.turns[answer.turn - 1],
        "answer": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "tokens": drafted.tokens,
        "finish": drafted.finish,
        "tau": drafted.block_efficiency,
        "tokens_per_second": rate(drafted),
        "prefill_seconds": drafted.prefill_seconds,
    }
    if plain is not None:
        record |= {
            "plain_tokens_per_second": rate(plain),
            "speedup": rate(drafted) / rate(plain),
            "differs_at": answer.differs_at,
        }
    return record


def print_report(
    cfg: GenerateConfig, loaded: ChatModels, done: PromptRun, console: Console
) -> None:
    """Print all of it. Raises UserError, after everything, for an output that differs from the
    target's own beyond rounding.
    """
    console.print(_by_answer(done.answers))
    console.print()
    console.print(_overall(cfg, done.answers))
    for reason, places in done.left_out.items():
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        console.print(
            f"left out: {len(places)} {reason} ({'; '.join(places[:SHOWN])}{more})", soft_wrap=True
        )
    if cfg.output:
        console.print(f"answers: {cfg.output}", soft_wrap=True)
    broken = False
    if done.answers[0].plain is not None:
        words, broken = equality(loaded, done.answers)
        console.print(words, soft_wrap=True)
    if broken:
        raise UserError(
            f"the drafted output is not the target's own: {words}. This is a fault of the "
            f"decoding, not of the drafter: please report it."
        )


def _by_answer(answers: Sequence[PromptAnswer]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("prompt", "turn", "tokens", "tau", "tokens/s", "plain", "speedup", "finish"):
        table.add_column(title, justify="left" if title in ("prompt", "finish") else "right")
    for answer in answers:
        drafted, plain = answer.drafted, answer.plain
        beside = (
            ["", ""]
            if plain is None
            else [f"{rate(plain):.1f}", f"{rate(drafted) / rate(plain):.2f}x"]
        )
        tau = f"{drafted.block_efficiency:.2f}"
        counts = [str(answer.turn), str(len(drafted.tokens)), tau, f"{rate(drafted):.1f}"]
        finish = (
            drafted.finish
            if answer.differs_at is None
            else f"{drafted.finish}; differs at token {answer.differs_at + 1}"
        )
        table.add_row(answer.prompt.id, *counts, *beside, finish)
    return table


def _overall(cfg: GenerateConfig, answers: Sequence[PromptAnswer]) -> Table:
    """Sums over all answers, the way that was asked for beside the plain one."""
    ways: dict[str, Callable[[PromptAnswer], Generation]] = {"": lambda answer: answer.drafted}
    if answers[0].plain is not None:
        ways = {"drafted": ways[""], "plain": _plain}
    last = len({answer.prompt.id for answer in answers if answer.batch == answers[-1].batch})
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    smaller = f" (the last one {last})" if last != cfg.batch_size else ""
    table.add_column(f"{len(answers)} answers, batch {cfg.batch_size}{smaller}")
    for name in ways:
        table.add_column(name, justify="right")
    rows: dict[str, Callable[[Callable[[PromptAnswer], Generation]], str]] = {
        "tokens": lambda of: f"{sum(len(of(answer).tokens) for answer in answers):,}",
        "tokens/s, all rows together": lambda of: f"{total_rate(answers, of):.1f}",
        "tokens/s a row": lambda of: f"{_pooled(answers, of):.1f}",
        "block efficiency (tau)": lambda of: f"{_tau(answers, of):.2f}",
        "speedup": lambda of: (
            f"{total_rate(answers, of) / total_rate(answers, _plain):.2f}x"
            if len(ways) > 1
            else "not measured"
        ),
        "prefill seconds": lambda of: f"{_prefill(answers, of):.2f}",
        "ended by a stop token": lambda of: str(
            sum(of(answer).finish == "stop" for answer in answers)
        ),
    }
    for title, value in rows.items():
        table.add_row(title, *(value(of) for of in ways.values()))
    return table


def _plain(answer: PromptAnswer) -> Generation:
    assert answer.plain is not None
    return answer.plain


def _pooled(answers: Sequence[PromptAnswer], of: Callable[[PromptAnswer], Generation]) -> float:
    seconds = sum(of(answer).decode_seconds for answer in answers)
    return sum(len(of(answer).tokens) for answer in answers) / max(seconds, 1e-9)


def _tau(answers: Sequence[PromptAnswer], of: Callable[[PromptAnswer], Generation]) -> float:
    return sum(len(of(answer).tokens) for answer in answers) / sum(
        of(answer).rounds for answer in answers
    )


def _prefill(answers: Sequence[PromptAnswer], of: Callable[[PromptAnswer], Generation]) -> float:
    """Seconds of all prefills: a batch's rows carry the same number."""
    return sum(
        {(answer.batch, answer.turn): of(answer).prefill_seconds for answer in answers}.values()
    )


def equality(loaded: ChatModels, answers: Sequence[PromptAnswer]) -> tuple[str, bool]:
    """Whether the drafted outputs are plain decoding's, in words, and whether they break what is
    promised.
    """
    settings, dtype = loaded.settings, loaded.engine.target.dtype
    if not is_compared(settings):
        return (
            f"outputs: draws of the target's distribution (verify={settings.verify}), so they are "
            f"not compared token by token",
            False,
        )
    different = [answer for answer in answers if answer.differs_at is not None]
    if not different:
        half = f"; {dtype} rounds too coarsely to promise that" if dtype in HALF else ""
        return f"outputs: all {len(answers)} equal plain decoding's, token by token{half}", False
    gaps = [answer.gap for answer in different if answer.gap is not None]
    first = different[0]
    words = (
        f"outputs: {len(answers) - len(different)} of {len(answers)} equal plain decoding's; the "
        f"first other one: {first.prompt.id}, turn {first.turn}, token "
        f"{(first.differs_at or 0) + 1}; gap between the target's two best tokens there: "
        f"{min(gaps):.1e} to {max(gaps):.1e}"
    )
    if dtype in HALF:
        return f"{words} ({dtype} rounds too coarsely to promise equality)", False
    broken = max(gaps) >= TIE_GAP
    return (words if broken else f"{words}, which is rounding"), broken

"""Report of a run over prompts: every answer, the totals, and whether the outputs are equal."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from decoding.errors import UserError
from decoding.interfaces import EXACT, precision
from decoding.rounds.stats import Generation
from decoding.rounds.ties import TIE_GAP
from decoding.sampling.rule_names import is_lossy
from serving.config import GenerateConfig
from serving.prompts import PromptAnswer, PromptRun
from serving.setup import ChatModels, is_compared

SHOWN = 3  # ids after a count
# row of the table of totals -> its format, with the names of `_totals`
ROWS = {
    "tokens": "{tokens:,}",
    "tokens/s, all rows together": "{rate:.1f}",
    "tokens/s a row": "{row_rate:.1f}",
    "block efficiency (tau)": "{tau:.2f}",
    "speedup": "{speedup}",
    "prefill seconds": "{prefill:.2f}",
    "ended by a stop token": "{stopped}",
}


def print_report(
    cfg: GenerateConfig, loaded: ChatModels, done: PromptRun, console: Console
) -> None:
    """Print the report, and then raise UserError if an output is not the target's.

    A difference within the rounding of the dtype raises no error.
    """
    console.print(_answer_table(done.answers))
    console.print()
    console.print(_total_table(cfg, done.answers))
    for reason, places in done.left_out.items():
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        console.print(
            f"left out: {len(places)} {reason} ({'; '.join(places[:SHOWN])}{more})", soft_wrap=True
        )
    if cfg.output:
        console.print(f"answers: {cfg.output}", soft_wrap=True)
    if done.answers[0].plain is None:
        return
    words, broken = compare_outputs(loaded, done.answers)
    console.print(words, soft_wrap=True)
    if broken:
        raise UserError(
            f"the drafted output is not the target's: {words}. This is an error in decoding, not "
            f"in the drafter: please report it."
        )


def _answer_table(answers: Sequence[PromptAnswer]) -> Table:
    """Return a table with one row per answer."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("prompt", "turn", "tokens", "tau", "tokens/s", "plain", "speedup", "finish"):
        table.add_column(title, justify="left" if title in ("prompt", "finish") else "right")
    for answer in answers:
        drafted, plain = answer.drafted, answer.plain
        at = answer.differs_at
        table.add_row(
            answer.prompt.id,
            str(answer.turn),
            str(len(drafted.tokens)),
            f"{drafted.block_efficiency:.2f}",
            f"{drafted.tokens_per_second:.1f}",
            f"{plain.tokens_per_second:.1f}" if plain else "",
            f"{drafted.tokens_per_second / plain.tokens_per_second:.2f}x" if plain else "",
            drafted.finish if at is None else f"{drafted.finish}; differs at token {at + 1}",
        )
    return table


def _total_table(cfg: GenerateConfig, answers: Sequence[PromptAnswer]) -> Table:
    """Return a table of totals, with a column for plain decoding if it was measured."""
    plain = [answer.plain for answer in answers if answer.plain is not None]
    columns = {"drafted" if plain else "": _totals(answers, [one.drafted for one in answers])}
    if plain:
        columns["plain"] = _totals(answers, plain)
    for column in columns.values():
        column["speedup"] = (
            f"{column['rate'] / columns['plain']['rate']:.2f}x" if plain else "not measured"
        )
    last = len({answer.prompt.id for answer in answers if answer.batch == answers[-1].batch})
    smaller = f" (the last one {last})" if last != cfg.batch_size else ""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(f"{len(answers)} answers, batch {cfg.batch_size}{smaller}")
    for name in columns:
        table.add_column(name, justify="right")
    for title, form in ROWS.items():
        table.add_row(title, *(form.format(**column) for column in columns.values()))
    return table


def _totals(answers: Sequence[PromptAnswer], generations: Sequence[Generation]) -> dict[str, Any]:
    """Return the totals over all answers of one way of decoding, drafted or plain.

    A batch takes as long as its slowest row, and its rows share one prefill.
    """
    seconds: dict[tuple[int, int], float] = {}
    prefill: dict[tuple[int, int], float] = {}
    for answer, generation in zip(answers, generations, strict=True):
        batch = (answer.batch, answer.turn)
        seconds[batch] = max(seconds.get(batch, 1e-9), generation.decode_seconds)
        prefill[batch] = generation.prefill_seconds
    tokens = sum(len(one.tokens) for one in generations)
    return {
        "tokens": tokens,
        "rate": tokens / sum(seconds.values()),
        "row_rate": tokens / max(sum(one.decode_seconds for one in generations), 1e-9),
        "tau": tokens / sum(one.rounds for one in generations),
        "prefill": sum(prefill.values()),
        "stopped": sum(one.finish == "stop" for one in generations),
    }


def compare_outputs(loaded: ChatModels, answers: Sequence[PromptAnswer]) -> tuple[str, bool]:
    """Compare the outputs of drafted and plain decoding.

    Returns a description of the result, and whether a difference is larger than rounding can
    explain.
    """
    settings, dtype = loaded.settings, precision(loaded.engine.target)
    if not is_compared(settings):
        of = "another distribution than the target's: lossy"
        if not is_lossy(settings.verify):
            of = "the target's distribution"
        return (
            f"outputs: samples of {of} (verify={settings.verify}), so they are not compared token "
            f"by token",
            False,
        )
    different = [answer for answer in answers if answer.differs_at is not None]
    if not different:
        half = f"; with {dtype}'s rounding this is not guaranteed" if dtype not in EXACT else ""
        return f"outputs: all {len(answers)} equal plain decoding's, token by token{half}", False
    gaps = [answer.gap for answer in different if answer.gap is not None]
    first = different[0]
    words = (
        f"outputs: {len(answers) - len(different)} of {len(answers)} equal plain decoding's; the "
        f"first difference is in {first.prompt.id}, turn {first.turn}, token "
        f"{(first.differs_at or 0) + 1}; the gap between the target's two best tokens is "
        f"{min(gaps):.1e} to {max(gaps):.1e} where outputs differ"
    )
    if dtype not in EXACT:
        return f"{words} (with {dtype}'s rounding, equality is not guaranteed)", False
    broken = max(gaps) >= TIE_GAP
    return (words if broken else f"{words}, which is rounding"), broken

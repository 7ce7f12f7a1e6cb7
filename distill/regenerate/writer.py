"""Writer of regenerated chats: chats.json in training's input format, and the figures of a run.

Training tokenizes the text again, possibly into other tokens than the target generated. Every chat
is therefore rendered once as training will render it. A chat that training cannot read counts as
failed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from decoding.errors import UserError
from decoding.rounds.stats import LOOPING_BELOW
from distill.regenerate.dialogues import REFUSED, Account, Answer, Dialogue
from training.data.chat import Rendered, render_chat
from training.data.counts import Counts

FILE = "chats.json"
# A note is printed if a larger share of the answers loops.
_MANY_LOOPS = 0.1


@dataclass(frozen=True)
class RegeneratedChats:
    """Regenerated chats before they are written."""

    # ShareGPT form, in input order
    records: list[dict[str, Any]]
    account: Account
    kept: list[Answer]
    # number of answers that training tokenizes into the generated tokens
    retokenized: int


def collect_chats(
    dialogues: Sequence[Dialogue], counts: Counts, samples: int, tokenizer: Any, template: str
) -> RegeneratedChats:
    """Collect the regenerated chats of ended dialogues, and account for all others.

    counts: counts of the input records. samples: number of samples of every chat. Raises UserError,
    which lists the reasons, if no chat is left.
    """
    account = Account(counts.read * samples, skipped=list_broken_records(counts, samples))
    records: list[dict[str, Any]] = []
    kept: list[Answer] = []
    retokenized = 0
    for dialogue in dialogues:
        unreadable, same = "", 0
        if dialogue.kept:
            try:
                rendered = render_chat(tokenizer, dialogue.messages, template=template)
                same = count_same_tokens(rendered, dialogue.answers)
            except UserError as error:
                unreadable = f"training cannot read it: {error}"
        if account.add(dialogue, unreadable):
            records.append(dialogue.record(samples))
            kept += dialogue.answers
            retokenized += same
    account.check()
    if not records:
        raise UserError(
            "no usable chat is left, expected at least one. Check the input files, or the server, "
            "for the reasons below.\n" + "\n".join(account.lines())
        )
    return RegeneratedChats(records, account, kept, retokenized)


def list_broken_records(counts: Counts, samples: int) -> dict[str, list[str]]:
    """Return reason -> places of the broken records, each place once per sample."""
    return {f"broken record, {reason}": places * samples for reason, places in counts.bad.items()}


def count_same_tokens(rendered: Rendered, answers: Sequence[Answer]) -> int:
    """Return the number of answers whose rendered tokens equal the generated ones.

    Stop tokens are not compared, nor answers whose generated tokens are unknown.

    Returns 0 if the rendered chat has another number of answers.
    """
    tokens = zip(rendered.ids, rendered.mask, strict=True)
    runs = [
        [token for token, _ in run]
        for supervised, run in groupby(tokens, key=itemgetter(1))
        if supervised
    ]
    if len(runs) != len(answers):
        return 0
    pairs = zip(runs, answers, strict=True)
    return sum(answer.generated and run[: len(answer.body)] == answer.body for run, answer in pairs)


def format_chats(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of chats.json: a JSON array with one chat per line."""
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    return f"[\n{lines}\n]\n"


def compute_figures(
    found: RegeneratedChats, by_rank: Mapping[Path, Sequence[Answer]]
) -> dict[str, Any]:
    """Return the figures of a run for the manifest.

    distinct_4, loop_share, block_efficiency and tokens_per_second include discarded answers; all
    other figures count kept answers. tokens_per_second is the sum over ranks, which work at the
    same time. as_drawn_share and block_efficiency are None if a server does not return token ids
    and rounds. by_rank: journal -> its answers.
    """
    generated = [
        answer for answers in by_rank.values() for answer in answers if answer.finish != REFUSED
    ]
    rates = [
        sum(len(answer.tokens) for answer in answers) / sum(answer.seconds for answer in answers)
        for answers in by_rank.values()
        if answers
    ]
    kept = found.kept
    rounds = sum(answer.rounds for answer in generated)
    with_tokens = sum(answer.generated for answer in kept)
    return {
        **found.account.figures(),
        "answers": len(kept),
        "answer_tokens": sum(len(answer.tokens) for answer in kept),
        "prompt_tokens": sum(answer.prompt_tokens for answer in kept),
        "read_tokens": sum(answer.read_tokens for answer in kept),
        "finish": {how: sum(answer.finish == how for answer in kept) for how in ("stop", "length")},
        "as_drawn_share": found.retokenized / with_tokens if with_tokens else None,
        "distinct_4": fmean(answer.distinct_4 for answer in generated),
        "loop_share": fmean(answer.loops for answer in generated),
        "block_efficiency": (
            sum(len(answer.tokens) for answer in generated) / rounds if rounds else None
        ),
        "tokens_per_second": round(sum(rates), 1),
    }


def print_figures(
    found: RegeneratedChats, metrics: Mapping[str, Any], temperature: float, drop_loops: bool
) -> None:
    """Print the account of the chats and the figures of their answers."""
    share, efficiency = metrics["as_drawn_share"], metrics["block_efficiency"]
    drawn = (
        "the server returns no token ids"
        if share is None
        else f"{share:.1%} are tokenized back into the generated tokens, the others into other "
        f"tokens of the same text"
    )
    per_forward = "" if efficiency is None else f"{efficiency:.2f} tokens per target forward; "
    print("\n".join(found.account.lines()))
    print(
        f"answers: {metrics['answers']:,} with {metrics['answer_tokens']:,} tokens, "
        f"{metrics['finish']['length']:,} cut at max_new_tokens; {drawn}"
    )
    print(
        f"distinct-4 {metrics['distinct_4']:.2f}, {metrics['loop_share']:.1%} of the answers loop "
        f"(below {LOOPING_BELOW}); {metrics['tokens_per_second']:,.0f} tokens/s, {per_forward}"
        f"{metrics['read_tokens']:,} of {metrics['prompt_tokens']:,} prompt tokens were read, the "
        f"others were cached"
    )
    if metrics["loop_share"] > _MANY_LOOPS and not drop_loops:
        advice = " or a temperature above 0" if temperature == 0 else ""
        print(
            f"note: many answers loop, and a drafter trained on them loops too. Try "
            f"drop_loops=true{advice}"
        )

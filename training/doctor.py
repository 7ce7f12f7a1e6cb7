"""The doctor before a training: one page that shows what will be learned, before the first step.

A wrong mask, a template that the tokenizer does not know, and answers without their end lower the
acceptance of a drafter, and the loss does not show it. So every training prints a sample with its
mask and what it found, and writes all of it, with the counts and the texts' likelihoods that were
printed before, to doctor.html in the run folder. eval.doctor examines the finished drafter.
"""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.text import Text

from decoding.errors import UserError
from decoding.models.text.tokenizer_repair import PROBES
from jobs.amounts import operations, size
from jobs.files import write_text
from training.config import DataConfig, LoopConfig
from training.data.chat import render_chat
from training.data.packing import PackedData, Sample
from training.plan import describe_work, plan_tokens

PAGE = "doctor.html"
WIDTH = 120  # characters of a line without a terminal
SHOWN = 600  # characters of the sample
MOST_SAMPLES = 4096  # whose ends are counted
OPEN, CLOSE = "[[", "]]"  # around supervised text, where there are no colours
# what templates write around turns: <|im_start|>, </s>, [INST]
_MARKS = re.compile(r"<[|/]?[A-Za-z][\w:|-]*[|]?>|\[/?[A-Z_]+\]")
# float32, beside the weights
MOMENTS, MASTER = 8, 4  # bytes of a parameter: AdamW's two moments; the master of 16 bits


class TrainingFields(Protocol):
    """Configuration of a job that trains on data."""

    job: str
    doctor: bool
    assumed_tflops: float
    data: DataConfig
    loop: LoopConfig


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a sample that are all supervised, or none."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class Page:
    """What a training shows before its first step."""

    title: str
    sample: str  # which one, and how many of its tokens are supervised
    pieces: list[Piece]
    checks: dict[str, str]  # subject -> what was found
    warnings: list[str]
    printed: list[str] = field(default_factory=list)  # lines of counts, texts and costs


def begin(
    config: TrainingFields,
    tokenizer: Any,
    data: PackedData,
    model: Any,
    stops: Sequence[int],
    folder: Path,
    flops_per_token: float,
    printed: Sequence[str],
) -> None:
    """Examine a training before its first step, print what was found, and write doctor.html.

    Nothing is done with doctor=false. The arguments are those of `examine`.
    """
    if not config.doctor:
        return
    page = examine(config, tokenizer, data, model, stops, folder, flops_per_token, printed)
    show(page)
    write(page, folder)


def examine(
    config: TrainingFields,
    tokenizer: Any,
    data: PackedData,
    model: Any,
    stops: Sequence[int],
    folder: Path,
    flops_per_token: float,
    printed: Sequence[str] = (),
) -> Page:
    """Examine the data and the tokenizer of a training.

    model: what is trained, whose checkpoints need disk space. stops: token ids that end an answer
    of the target; empty if no drafter is trained. folder: the run folder. flops_per_token: of a
    training step, the target's included. printed: lines that were printed before, for the page.
    """
    number = _typical(data.samples)
    sample = data.samples[number]
    supervised = int(np.count_nonzero(sample.mask))
    checks, warnings = {}, []
    for subject, (found, wrong) in (
        ("mask", _check_mask(data, config.data, bool(stops))),
        ("ends", _check_ends(data.samples, tokenizer, stops)),
        ("tokenizer", _check_tokenizer(tokenizer)),
        ("template", _check_template(tokenizer, config.data)),
        ("cost", _describe_cost(config, data, flops_per_token)),
        ("disk", _check_disk(model, config.loop, folder)),
    ):
        if found:
            checks[subject] = found
        if wrong:
            warnings.append(wrong)
    return Page(
        f"{config.job}: before the first step",
        f"sample {number + 1:,} of {len(data.samples):,}, {supervised:,} of {len(sample.ids):,} "
        f"tokens supervised",
        pieces_of(tokenizer, sample),
        checks,
        warnings,
        list(printed),
    )


def pieces_of(tokenizer: Any, sample: Sample) -> list[Piece]:
    """Return the text of a sample, special tokens included, cut where its mask changes."""
    ends = [*(np.flatnonzero(np.diff(sample.mask)) + 1).tolist(), len(sample.ids)]
    pieces, start = [], 0
    for end in ends:
        text = tokenizer.decode(sample.ids[start:end].tolist(), clean_up_tokenization_spaces=False)
        pieces.append(Piece(str(text), bool(sample.mask[start])))
        start = end
    return pieces


def show(page: Page, console: Console | None = None) -> None:
    """Print the page, without the lines that were printed before."""
    console = console or Console()
    if not console.is_terminal:
        console.width = WIDTH
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    how = "in green" if coloured else f"in {OPEN} {CLOSE}"
    console.print(Text(f"doctor: {page.sample} ({how})", "bold"))
    text, room = Text(), SHOWN
    for piece in page.pieces:
        shown = _in_a_line(piece.text)[:room]
        room -= len(shown)
        if coloured:
            text.append(shown, "green" if piece.supervised else "dim")
        else:
            text.append(f"{OPEN}{shown}{CLOSE}" if piece.supervised else shown)
        if room <= 0:
            text.append(" ...")
            break
    for line in text.wrap(console, console.width - 2):
        line.rstrip()
        console.print(Text("  ") + line, soft_wrap=True)
    for subject, found in page.checks.items():
        console.print(Text(f"  {subject:<10}{found}"))
    for warning in page.warnings:
        console.print(Text(f"warning: {warning}", "bold yellow"))


def _in_a_line(text: str) -> str:
    """Return a text with its line ends spelled out, and without other control characters."""
    spelled = text.replace("\n", "\\n").replace("\t", "\\t")
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in spelled)


def write(page: Page, folder: Path) -> Path:
    """Write doctor.html to the run folder and return its path. Raises UserError for a full disk."""
    path = folder / PAGE
    write_text(path, _page(page))
    return path


def _page(page: Page) -> str:
    """Return the content of doctor.html, which loads nothing from elsewhere."""
    marked = "".join(
        f"<mark>{html.escape(one.text)}</mark>" if one.supervised else html.escape(one.text)
        for one in page.pieces
    )
    warnings = "".join(f"<p class=bad>{html.escape(one)}</p>" for one in page.warnings)
    checks = "".join(
        f"<dt>{html.escape(subject)}</dt><dd>{html.escape(found)}</dd>"
        for subject, found in page.checks.items()
    )
    # tables keep their columns, and single lines wrap
    printed = "\n".join(
        f"<pre>{html.escape(one)}</pre>" if "\n" in one else f"<p>{html.escape(one)}</p>"
        for one in page.printed
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(page.title)}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }}
h1, p, dd {{ overflow-wrap: anywhere; }}
pre {{ background: #f4f4f2; font-size: .85rem; overflow-x: auto; padding: 1rem; }}
.sample {{ overflow-wrap: anywhere; white-space: pre-wrap; }}
mark {{ background: #b9e4c9; }}
dl {{ display: grid; gap: .4rem 1.5rem; grid-template-columns: max-content 1fr; }}
dt {{ font-weight: 600; }}
dd {{ margin: 0; }}
.bad {{ background: #fbe3d6; padding: .5rem 1rem; }}
@media (max-width: 34rem) {{ dl {{ gap: 0; grid-template-columns: 1fr; }} dd {{ margin-bottom: .6rem; }} }}
@media (prefers-color-scheme: dark) {{
body {{ background: #1b1b1b; color: #ddd; }} pre {{ background: #262626; }}
mark {{ background: #1f5c3a; color: #eee; }} .bad {{ background: #5a2d17; }}
}}
</style>
</head>
<body>
<h1>{html.escape(page.title)}</h1>
{warnings}
<h2>What is learned</h2>
<p>{html.escape(page.sample)}, marked:</p>
<pre class=sample>{marked}</pre>
<h2>Checked</h2>
<dl>{checks}</dl>
<h2>Data, texts and plan</h2>
{printed}
</body>
</html>
"""  # noqa: E501


# ------------------------------------------------------------------------------------------- checks


def _typical(samples: Sequence[Sample]) -> int:
    """Return the number of a sample of median length among the first ones."""
    lengths = [len(samples[number].ids) for number in range(min(len(samples), MOST_SAMPLES))]
    return int(np.argsort(lengths, kind="stable")[len(lengths) // 2])


def _check_mask(data: PackedData, config: DataConfig, drafts: bool) -> tuple[str, str]:
    share = data.supervised / max(data.tokens, 1)
    found = f"{share:.0%} of {data.tokens:,} tokens supervised"
    if drafts and config.train_on == "all" and config.chats:
        return found, (
            "data.train_on=all supervises the user's turns too, which a drafter never drafts. Set "
            "data.train_on=answers"
        )
    return found, ""


def _check_ends(samples: Sequence[Sample], tokenizer: Any, stops: Sequence[int]) -> tuple[str, str]:
    """Count the answers that end with a supervised end token."""
    known = {*stops, tokenizer.eos_token_id} - {None}
    answers = ended = 0
    for number in range(min(len(samples), MOST_SAMPLES)):
        sample = samples[number]
        if sample.mask.all() or sample.mask[1:].all():
            continue  # plain text has no answers
        last_N = np.flatnonzero(sample.mask & ~np.append(sample.mask[1:], False))
        answers += len(last_N)
        # a template may write a line end after the end token
        ends_N = np.isin(sample.ids[last_N], [*known])
        before_N = np.isin(sample.ids[np.maximum(last_N - 1, 0)], [*known])
        ended += int((ends_N | before_N).sum())
    if not answers:
        return "", ""
    found = f"{ended:,} of {answers:,} answers end with an end token that is supervised"
    if not ended:
        return found, (
            "no answer keeps its end token, so the drafter never learns where the target stops. "
            "Check the end of the chat template, and data.max_length"
        )
    return found, ""


def _check_tokenizer(tokenizer: Any) -> tuple[str, str]:
    """Check that texts, their spaces included, and special tokens survive encoding."""
    lost = [text for text in PROBES if not _survives(tokenizer, text)]
    special = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    split = [text for text, i in special.items() if _encode(tokenizer, text) != [i]]
    found = (
        f"{len(PROBES) - len(lost)} of {len(PROBES)} probe texts come back unchanged, "
        f"{len(special) - len(split)} of {len(special)} added tokens are one token each"
    )
    # an unknown token stands for what a small vocabulary lacks, which is no fault of the tokenizer
    spaces = [text for text in lost if not text.strip(" x\n\tone")]
    wrong = ""
    if split:
        wrong = f"the added token {split[0]!r} is not encoded as itself: the tokenizer is damaged"
    elif spaces and tokenizer.unk_token_id not in _encode(tokenizer, spaces[0]):
        wrong = f"spaces or line ends of {spaces[0]!r} are lost in the tokenizer"
    return found, wrong


def _survives(tokenizer: Any, text: str) -> bool:
    ids = _encode(tokenizer, text)
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)).lstrip() == text.lstrip()


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _check_template(tokenizer: Any, config: DataConfig) -> tuple[str, str]:
    """Check that the marks of the template are tokens, and that the text begins once."""
    if not config.chats and not config.domains:
        return "", ""
    words = "question", "answer"
    chat = [{"role": role, "content": word} for role, word in zip(("user", "assistant"), words)]
    try:
        ids = render_chat(tokenizer, chat, template=config.template).ids
    except UserError:
        return "", ""  # the data's own chats were rendered, and their errors counted
    text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    marks = list(dict.fromkeys(_MARKS.findall(text)))
    split = [mark for mark in marks if len(_encode(tokenizer, mark)) > 1]
    found = f"{len(marks) - len(split)} of {len(marks)} marks are one token each"
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        return found, "the chat begins with two start tokens. Remove one from the template"
    if split and any(mark in tokenizer.get_vocab() for mark in split):
        return found, f"the template's mark {split[0]!r} is split although it is a token"
    if split:
        found += f"; {', '.join(split[:3])} are plain text to this tokenizer"
    return found, ""


def _describe_cost(
    config: TrainingFields, data: PackedData, flops_per_token: float
) -> tuple[str, str]:
    """Describe the work of all steps, and the time that it takes."""
    tflops = config.assumed_tflops
    if config.loop.max_seconds:
        at_most = f"at most {config.loop.max_seconds:g} s"
        return f"{operations(flops_per_token)} a token, {at_most}", ""
    plan = plan_tokens(config.loop, flops_per_token, tflops, data.tokens)
    return describe_work(plan.words, flops_per_token * plan.tokens, tflops), ""


def _check_disk(model: Any, loop: LoopConfig, folder: Path) -> tuple[str, str]:
    """Compare the size of the checkpoints that are kept with the free space of the disk."""
    needed = 0
    for one in model.parameters():
        width = one.element_size()
        optimizer = MOMENTS + (MASTER if width < MASTER else 0) if one.requires_grad else 0
        needed += one.numel() * (width + optimizer)
    kept = needed * (loop.keep + 2)  # the best one, and one that is being written
    free = shutil.disk_usage(folder if folder.exists() else Path.cwd()).free
    found = f"{size(needed)} a checkpoint, {size(kept)} for all that are kept, {size(free)} free"
    if kept > free:
        return found, f"checkpoints need up to {size(kept)}, but {size(free)} are free in {folder}"
    return found, ""

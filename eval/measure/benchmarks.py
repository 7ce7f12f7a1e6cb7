"""Prompts of an evaluation: reading, selection, rendering to token ids and splitting.

A prompt has one or several user turns. With `turns: all`, later turns follow the target's answers
to the earlier ones, so all drafters continue the same text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from decoding.errors import UserError, without_stop
from decoding.values import check_choice
from eval.config import BenchmarkConfig
from eval.tasks.answers import Number
from eval.tasks.forms import Problem, read_problems
from eval.tasks.shots import TURN, Shots, read_shots
from training.data.chat import choose_rendering, render_prompt, render_text, template_names
from training.data.counts import Counts
from training.data.readers import MAX_BAD, Prompt

GOLDEN = (5**0.5 - 1) / 2
Item = TypeVar("Item")


@dataclass(frozen=True)
class Benchmark:
    """Prompts in the order of the file, and how many were left out for each reason."""

    name: str
    prompts: list[Prompt]
    render: str  # chat | text
    chat_template: str  # for render=chat: auto (the tokenizer's) or a name
    # read, bad_records_skipped if there are any, other_category, too_long, over_limit, kept, and
    # bad_sweep_records_skipped if the sweep's file has any
    counts: dict[str, int]
    # prompts of the sweep's file; empty: the sweep takes some of `prompts`
    for_sweep: list[Prompt] = field(default_factory=list)
    examples_hash: str = ""  # of the worked examples before each prompt; empty: none


def load_benchmark(
    cfg: BenchmarkConfig, tokenizer: Any, *, max_length: int, max_new_tokens: int, limit: int
) -> Benchmark:
    """Read the prompt file, and the sweep's file if cfg names one; keep the prompts that fit.

    max_length: tokens in the target's context. limit: number of prompts to keep, the first ones or,
    with cfg.spread, some from all over the file; 0 keeps all. Raises UserError for an invalid
    option, ids that the file lacks, a category without prompts, a first turn that leaves no room
    for max_new_tokens (with too_long=error), a sweep file without other prompts, and if no prompt
    is left.
    """
    _check_options(cfg)
    render = choose_rendering(
        tokenizer, cfg.render, cfg.chat_template, ("benchmark.render", "benchmark.chat_template")
    )
    cfg = replace(cfg, render=render)
    records = Counts()
    everything = select_prompts(cfg, counts=records)
    chosen = [prompt for prompt in everything if cfg.category in ("", prompt.category)]
    if not chosen:
        categories = ", ".join(sorted({prompt.category for prompt in everything}))
        raise UserError(
            f"{cfg.path} has no prompt of category {cfg.category!r}. Found: "
            f"{categories or 'no prompt at all'}. Set benchmark.category to one of them, or leave "
            f"it empty for all."
        )
    kept, too_long = _keep_fitting(
        chosen, cfg, tokenizer, max_length, max_new_tokens, 0 if cfg.spread else limit
    )
    if cfg.spread and limit:
        kept = spread_over_categories(kept, limit)
    counts = {
        "read": len(everything),
        **({"bad_records_skipped": records.skipped} if records.skipped else {}),
        "other_category": len(everything) - len(chosen),
        "too_long": too_long,
        "over_limit": len(chosen) - too_long - len(kept),
        "kept": len(kept),
    }
    for_sweep, bad = _read_for_sweep(cfg, kept, tokenizer, max_length, max_new_tokens)
    if bad:
        counts["bad_sweep_records_skipped"] = bad
    name, examples = cfg.name or Path(cfg.path).stem, _examples(cfg).hash
    return Benchmark(name, kept, render, cfg.chat_template, counts, for_sweep, examples)


def _read_for_sweep(
    cfg: BenchmarkConfig,
    measured: Sequence[Prompt],
    tokenizer: Any,
    max_length: int,
    max_new_tokens: int,
) -> tuple[list[Prompt], int]:
    """Return the prompts of the sweep's file that are not measured, and its number of bad records.

    Without such a file there are none. Raises UserError if it holds no other prompt.
    """
    if not cfg.sweep_path:
        return [], 0
    records, texts = Counts(), [prompt.turns for prompt in measured]
    form = cfg.sweep_format or cfg.format
    apart = replace(cfg, path=cfg.sweep_path, format=form, ids="", first=0)
    swept = select_prompts(apart, counts=records)
    others = [prompt for prompt in swept if prompt.turns not in texts]
    if not others:
        raise UserError(
            f"benchmark.sweep_path={cfg.sweep_path} holds no prompt besides the {len(measured)} "
            f"that are measured. Set it to a file with other prompts."
        )
    kept, _ = _keep_fitting(others, apart, tokenizer, max_length, max_new_tokens, 0)
    return kept, records.skipped


def spread(prompts: Sequence[Item], count: int) -> tuple[list[Item], list[Item]]:
    """Split prompts into `count` from all over the file and the rest, both in the file's order.

    One prompt is taken from each of `count` equal stretches, so all categories of a sorted file are
    represented. Its place in the stretch varies by multiples of the golden ratio, so alternating
    categories are represented too.
    """
    count = min(count, len(prompts))
    bounds = [step * len(prompts) // count for step in range(count + 1)] if count else []
    chosen = {
        low + int((step * GOLDEN % 1) * (high - low))
        for step, (low, high) in enumerate(pairwise(bounds), 1)
    }
    return (
        [prompt for index, prompt in enumerate(prompts) if index in chosen],
        [prompt for index, prompt in enumerate(prompts) if index not in chosen],
    )


def spread_over_categories(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts from all over the file, in its order, with every category.

    Where an even spread misses a category, as in a file with large and small ones, each category
    gets one prompt, and the others go one by one to the category with the most prompts for each of
    those that it has (Adams' apportionment). Fewer prompts than categories are spread evenly.
    """
    evenly, _ = spread(prompts, count)
    members: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(prompt.category, []).append(index)
    if count < len(members) or len({prompt.category for prompt in evenly}) == len(members):
        return evenly
    shares = dict.fromkeys(members, 1)
    for _ in range(min(count, len(prompts)) - len(members)):
        shares[max(members, key=lambda name: len(members[name]) / shares[name])] += 1
    chosen = [index for name in members for index in spread(members[name], shares[name])[0]]
    return [prompts[index] for index in sorted(chosen)]


def select_prompts(
    cfg: BenchmarkConfig, max_bad: float = MAX_BAD, counts: Counts | None = None
) -> list[Prompt]:
    """Read the prompts that the options select, with their turns ready to be rendered.

    max_bad: largest share of bad records, which are left out. counts: receives their number. Raises
    UserError for an invalid file, for ids that it lacks, and for a prompt that is one of its own
    worked examples.
    """
    prompts = read_problems(cfg.format, cfg.path, max_bad, counts)
    if cfg.ids:
        prompts = _select_ids(prompts, cfg)
    shots = _examples(cfg)
    framed = cfg.render == "text" or bool(cfg.shots)
    selected = []
    for prompt in prompts[: cfg.first or None]:
        turns = prompt.turns[:1] if cfg.turns == "first" else prompt.turns
        if turns[0] in shots.questions:
            raise UserError(
                f"benchmark.shots={cfg.shots} holds the prompt {prompt.id!r} of {cfg.path}, with "
                f"its solution. Take the worked examples from another part of the data."
            )
        if cfg.strip:
            turns = [turn.strip() for turn in turns]
        if framed:
            turns = [cfg.template.replace(TURN, turn) for turn in turns]
        prompt = replace(prompt, turns=[shots.before(turns[0]), *turns[1:]])
        selected.append(_ending_at_the_frame(prompt, cfg.template if framed else TURN))
    return selected


def _examples(cfg: BenchmarkConfig) -> Shots:
    """Return the worked examples before each prompt."""
    if not cfg.shots:
        return Shots()
    return read_shots(cfg.format, cfg.shots, cfg.num_shots, cfg.template)


def _ending_at_the_frame(prompt: Prompt, template: str) -> Prompt:
    """Return the prompt; an answer is checked up to the frame of a further question."""
    start = template.partition(TURN)[0].strip()
    if start and isinstance(prompt, Problem) and isinstance(prompt.check, Number):
        return replace(prompt, check=replace(prompt.check, until=start))
    return prompt


def _keep_fitting(
    prompts: Sequence[Prompt],
    cfg: BenchmarkConfig,
    tokenizer: Any,
    max_length: int,
    max_new_tokens: int,
    limit: int,
) -> tuple[list[Prompt], int]:
    """Return the prompts whose first turn leaves room for an answer, and the number of others.

    limit: maximum number of prompts to return; 0: all. Raises UserError if none fits, or if one
    does not and cfg.too_long is error.
    """
    kept: list[Prompt] = []
    too_long = 0
    for prompt in prompts:
        if limit and len(kept) == limit:
            break
        try:
            ids = render_turns(prompt.turns[:1], [], tokenizer, cfg.render, cfg.chat_template)
        except UserError as error:
            raise rejected(prompt, tokenizer, cfg.chat_template, error) from error
        length = len(ids)
        if length + max_new_tokens <= max_length:
            kept.append(prompt)
        elif cfg.too_long == "skip":
            too_long += 1
        else:
            raise UserError(
                f"{cfg.path}: prompt {prompt.id!r} has {length} tokens; with "
                f"max_new_tokens={max_new_tokens} that exceeds the target's context of "
                f"{max_length}. Lower max_new_tokens, or set benchmark.too_long=skip to leave such "
                f"prompts out (they are counted)."
            )
    if not kept:
        raise UserError(
            f"{cfg.path}: all {too_long} prompts are too long for the target's context of "
            f"{max_length} tokens. Lower max_new_tokens, or use shorter prompts."
        )
    return kept, too_long


def rejected(prompt: Prompt, tokenizer: Any, template: str, reason: UserError) -> UserError:
    """Return the error for a prompt that a chat template rejects. reason: its own error."""
    whose = tokenizer.name_or_path if template == "auto" else f"benchmark.chat_template={template}"
    return UserError(
        f"prompt {prompt.id!r}: {without_stop(reason)}. Correct the template of {whose}, or choose "
        f"one of ours (benchmark.chat_template=)."
    )


def _select_ids(prompts: list[Prompt], cfg: BenchmarkConfig) -> list[Prompt]:
    """Return the prompts listed in benchmark.ids, in the order of that list.

    Raises UserError for a file without such a list, and for ids that no prompt has.
    """
    try:
        listed = json.loads(Path(cfg.ids).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"benchmark.ids={cfg.ids} cannot be read ({error}). Expected a JSON list of prompt ids."
        ) from error
    ids = listed.get("ids") if isinstance(listed, dict) else listed
    if not isinstance(ids, list) or not ids:
        raise UserError(
            f'{cfg.ids}: expected a JSON list of one or more prompt ids, or {{"ids": LIST}}; found '
            f"{ids!r:.40}."
        )
    by_id = {prompt.id: prompt for prompt in prompts}
    missing = [one for one in ids if not isinstance(one, str) or one not in by_id]
    if missing:
        raise UserError(
            f"{cfg.ids}: {len(missing)} of {len(ids)} ids are not in {cfg.path}; the first is "
            f"{missing[0]!r}. Remove them from the list, or set benchmark.path to their file."
        )
    return [by_id[one] for one in ids]


def render_turns(
    turns: list[str], answers: list[str], tokenizer: Any, render: str, chat_template: str = "auto"
) -> list[int]:
    """Render the last of `turns`, after earlier turns and their answers, to token ids.

    render: chat (by chat_template) or text. Raises ValueError unless there is one answer fewer than
    turns.
    """
    context = conversation(turns, answers, render)
    if isinstance(context, str):
        return render_text(tokenizer, context)
    return render_prompt(tokenizer, context, template=chat_template)


def conversation(
    turns: Sequence[str], answers: Sequence[str], render: str
) -> str | list[dict[str, str]]:
    """Return the last of `turns` after earlier turns and their answers: as text, or as messages.

    render: chat or text. Raises ValueError unless there is one answer fewer than turns.
    """
    if len(answers) != len(turns) - 1:
        raise ValueError(f"{len(turns)} turns need {len(turns) - 1} answers, got {len(answers)}")
    if render == "text":
        earlier = (f"{turn}\n{answer}\n" for turn, answer in zip(turns, answers, strict=False))
        return "".join(earlier) + turns[-1]
    messages = [{"role": "user", "content": turns[0]}]
    for turn, answer in zip(turns[1:], answers, strict=True):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": turn})
    return messages


def _check_options(cfg: BenchmarkConfig) -> None:
    for key, found, allowed in (
        ("chat_template", cfg.chat_template, template_names()),
        ("turns", cfg.turns, ("first", "all")),
        ("too_long", cfg.too_long, ("error", "skip")),
    ):
        check_choice(f"benchmark.{key}", found, allowed)
    if cfg.first < 0:
        raise UserError(
            f"benchmark.first is {cfg.first}, expected a number of prompts, or 0 for all."
        )
    if TURN not in cfg.template:
        raise UserError(
            f"benchmark.template={cfg.template!r} has no place for the turn. Expected a string "
            f"that contains {TURN}."
        )
    if cfg.template != TURN and cfg.render != "text" and not cfg.shots:
        raise UserError(
            "benchmark.template needs benchmark.render=text or benchmark.shots: a chat is rendered "
            "by the target's template."
        )
    if cfg.num_shots and not cfg.shots:
        raise UserError(
            f"benchmark.num_shots={cfg.num_shots} needs benchmark.shots, a file of solved problems."
        )

"""Batched answers to prompts with and without the drafter, for speed and token comparisons.

Prompts that are too long are skipped and reported, and the last batch may be smaller. Both ways
continue a conversation with the drafted answers. Speeds exclude the prefill. Whether decoding with
or without the drafter comes first alternates between batches and between turns.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from decoding.engine import text_of
from decoding.errors import UserError
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.rounds.ties import choice_scores, first_difference, top_two_gap
from jobs.paths import resolve
from jobs.progress import ProgressBar
from serving.config import GenerateConfig
from serving.mt_bench import NAME, load_mt_bench
from serving.setup import ChatModels, is_compared, warm_up
from training.data.chat import render_prompt
from training.data.readers import Prompt, read_prompts


@dataclass(frozen=True)
class PromptAnswer:
    """Answer to one turn of a prompt, with the drafter and without it."""

    prompt: Prompt
    turn: int  # from 1
    batch: int  # number of the batch
    prompt_tokens: int
    text: str
    drafted: Generation  # without a drafter: plain decoding, and `plain` is None
    plain: Generation | None  # None: not measured
    # index of the first token that differs from plain decoding, where the two must be equal
    differs_at: int | None = None
    gap: float | None = None  # between the target's two best tokens there

    @property
    def record(self) -> dict[str, Any]:
        """The answer as an object of the output file."""
        drafted, plain = self.drafted, self.plain
        record: dict[str, Any] = {
            "id": self.prompt.id,
            "category": self.prompt.category,
            "turn": self.turn,
            "prompt": self.prompt.turns[self.turn - 1],
            "answer": self.text,
            "prompt_tokens": self.prompt_tokens,
            "tokens": drafted.tokens,
            "finish": drafted.finish,
            "tau": drafted.block_efficiency,
            "tokens_per_second": drafted.tokens_per_second,
            "prefill_seconds": drafted.prefill_seconds,
        }
        if plain is not None:
            record |= {
                "plain_tokens_per_second": plain.tokens_per_second,
                "speedup": drafted.tokens_per_second / plain.tokens_per_second,
                "differs_at": self.differs_at,
            }
        return record


@dataclass
class PromptRun:
    """All answers, and the skipped turns as reason -> places (`ID, turn N`)."""

    answers: list[PromptAnswer] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)


def load_prompts(cfg: GenerateConfig) -> list[Prompt]:
    """Return the prompts to answer. Raises UserError if their file cannot be read."""
    prompts = load_mt_bench() if cfg.prompts == NAME else read_prompts(resolve(cfg.prompts))
    if cfg.turns == "first":
        prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    return prompts[: cfg.max_prompts] if cfg.max_prompts else prompts


def answer_prompts(
    loaded: ChatModels, cfg: GenerateConfig, prompts: Sequence[Prompt], console: Console
) -> PromptRun:
    """Answer all turns of all prompts, and append each batch's answers to the output file.

    Raises UserError if every prompt is too long.
    """
    console.print(loaded.about, soft_wrap=True)
    done = PromptRun()
    batches = [
        list(prompts[start : start + cfg.batch_size])
        for start in range(0, len(prompts), cfg.batch_size)
    ]
    first = _render(loaded, cfg, prompts[0].turns[:1], [])[: loaded.engine.target.max_length // 2]
    sizes = sorted({len(batch) for batch in batches})
    settings = {size: warm_up(loaded.engine, first, loaded.settings, size) for size in sizes}
    with ProgressBar("prompts", len(prompts)) as bar:
        finished = 0
        for number, batch in enumerate(batches):
            for answers in _answer_batch(loaded, cfg, settings[len(batch)], number, batch, done):
                done.answers += answers
                _write(cfg.output, answers)
            finished += len(batch)
            bar.update(
                finished, f"{sum(len(answer.drafted.tokens) for answer in done.answers)} tokens"
            )
    if not done.answers:
        reasons = (
            f"{len(places)} {reason} ({', '.join(places[:3])})"
            for reason, places in done.left_out.items()
        )
        raise UserError(
            f"none of the {len(prompts)} prompts was answered: {'; '.join(reasons)}. Shorten the "
            f"prompts, or raise the limit."
        )
    return done


def _write(output: str, answers: Sequence[PromptAnswer]) -> None:
    """Append answers to a JSONL file, so that an interrupted run keeps them."""
    if output:
        with Path(output).open("a", encoding="utf-8") as file:
            file.writelines(
                json.dumps(answer.record, ensure_ascii=False) + "\n" for answer in answers
            )


def _answer_batch(
    loaded: ChatModels,
    cfg: GenerateConfig,
    settings: Settings,
    number: int,
    batch: Sequence[Prompt],
    done: PromptRun,
) -> Iterator[list[PromptAnswer]]:
    """Yield the answers of one batch turn by turn, and record in `done` the turns that do not fit.

    number: index of the batch, which keys the noise of its requests.
    """
    answered: list[list[str]] = [[] for _ in batch]
    for turn in range(max(len(prompt.turns) for prompt in batch)):
        rows, ids = [], []
        for row, prompt in enumerate(batch):
            if turn < len(prompt.turns) and len(answered[row]) == turn:
                rendered = _render(loaded, cfg, prompt.turns[: turn + 1], answered[row])
                if reason := _refusal(loaded, cfg, len(rendered)):
                    done.left_out.setdefault(reason, []).append(f"{prompt.id}, turn {turn + 1}")
                else:
                    rows.append(row)
                    ids.append(rendered)
        if not rows:
            return
        requests = [(number * cfg.batch_size + row) * 1000 + turn for row in rows]
        drafted, plain = _decode_both(
            loaded, cfg, settings, ids, requests, plain_first=(number + turn) % 2 == 1
        )
        answers = []
        for at, row in enumerate(rows):
            text = text_of(loaded.engine, drafted[at].tokens)
            answered[row].append(text)
            other = plain[at] if plain else None
            answer = PromptAnswer(
                batch[row], turn + 1, number, len(ids[at]), text, drafted[at], other
            )
            answers.append(_compare(loaded, settings, answer, ids[at], requests[at]))
        yield answers


def _decode_both(
    loaded: ChatModels,
    cfg: GenerateConfig,
    settings: Settings,
    ids: list[list[int]],
    requests: list[int],
    plain_first: bool,
) -> tuple[list[Generation], list[Generation] | None]:
    """Return drafted and plain generations; the plain ones are None if they are not measured.

    Without a drafter, the first list holds plain generations. requests: ids that key the noise.
    """
    drafter = loaded.engine.drafter
    ways = [drafter, None] if drafter is not None and cfg.baseline else [drafter]
    found = {
        way: decode(loaded.engine.target, way, ids, settings, request_ids=requests)
        for way in (reversed(ways) if plain_first else ways)
    }
    return found[drafter], found[None] if len(ways) > 1 else None


def _compare(
    loaded: ChatModels, settings: Settings, answer: PromptAnswer, ids: list[int], request: int
) -> PromptAnswer:
    """Return the answer with its first difference from plain decoding, if both must be equal."""
    if answer.plain is None or not is_compared(settings):
        return answer
    at = first_difference(answer.drafted.tokens, answer.plain.tokens)
    if at is None:
        return answer
    scores_V = choice_scores(
        loaded.engine.target, [*ids, *answer.plain.tokens[:at]], settings, request
    )
    return replace(answer, differs_at=at, gap=top_two_gap(scores_V))


def _render(
    loaded: ChatModels, cfg: GenerateConfig, turns: Sequence[str], answers: Sequence[str]
) -> list[int]:
    messages = [{"role": "system", "content": cfg.system}] if cfg.system else []
    for index, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        if index < len(answers):
            messages.append({"role": "assistant", "content": answers[index]})
    return render_prompt(loaded.engine.tokenizer, messages, template=loaded.template)


def _refusal(loaded: ChatModels, cfg: GenerateConfig, length: int) -> str:
    """Return the reason to skip a prompt of `length` tokens; empty if it fits."""
    context = loaded.engine.target.max_length
    if length >= context:
        return f"longer than the target's context of {context} tokens"
    if cfg.max_prompt_tokens and length > cfg.max_prompt_tokens:
        return f"over max_prompt_tokens={cfg.max_prompt_tokens} (--max_prompt_length)"
    return ""

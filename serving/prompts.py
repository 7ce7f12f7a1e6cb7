"""Batched answers to prompts with and without the drafter, for speed and token comparisons.

Every prompt is answered, also in a partial last batch. Both conversations continue with the drafted
answers. Only decoding is timed, and the order of both ways alternates between batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console

from decoding.engine import text_of, with_costs
from decoding.errors import UserError
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.rounds.ties import choice_scores, first_difference, top_two_gap
from jobs.paths import resolve
from jobs.progress import ProgressBar
from serving.config import GenerateConfig
from serving.mt_bench import NAME, load_mt_bench
from serving.setup import ChatModels
from training.data.chat import render_prompt
from training.data.readers import Prompt, read_prompts

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class PromptAnswer:
    """Answer to one turn."""

    prompt: Prompt
    turn: int  # from 1
    batch: int  # prompts that were decoded together with it carry the same number
    prompt_tokens: int
    text: str
    drafted: Generation  # without a drafter: plain decoding, and `plain` is None
    plain: Generation | None  # None: not measured
    # first token that is not plain decoding's, where the two have to be equal
    differs_at: int | None = None
    gap: float | None = None  # between the target's two best tokens there


@dataclass
class PromptRun:
    """All answers, and the places of skipped prompts by reason."""

    answers: list[PromptAnswer] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)


def load_prompts(cfg: GenerateConfig) -> list[Prompt]:
    """Return the configured prompts and turns; raises UserError as the readers do."""
    prompts = load_mt_bench() if cfg.prompts == NAME else read_prompts(resolve(cfg.prompts))
    if cfg.turns == "first":
        prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    return prompts[: cfg.max_prompts] if cfg.max_prompts else prompts


def is_compared(settings: Settings) -> bool:
    """Return whether outputs must be equal: greedy and coupled ones depend on seed and text."""
    return settings.temperature == 0 or settings.verify == "coupled"


def answer_prompts(
    loaded: ChatModels,
    cfg: GenerateConfig,
    prompts: Sequence[Prompt],
    console: Console,
    write: Callable[[Sequence[PromptAnswer]], None] = lambda answers: None,
) -> PromptRun:
    """Answer all turns of all prompts and pass each batch's answers to `write`.

    Raises UserError if no prompt fits.
    """
    console.print(loaded.about, soft_wrap=True)
    done = PromptRun()
    batches = [
        list(prompts[start : start + cfg.batch_size])
        for start in range(0, len(prompts), cfg.batch_size)
    ]
    settings = _warm_up(loaded, cfg, batches)
    with ProgressBar("prompts", len(prompts)) as bar:
        finished = 0
        for number, batch in enumerate(batches):
            for answers in _answer_batch(loaded, cfg, settings[len(batch)], number, batch, done):
                done.answers += answers
                write(answers)
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
            f"none of the {len(prompts)} prompts was answered: {'; '.join(reasons)}. Give shorter "
            f"ones, or raise what limits them."
        )
    return done


def _warm_up(
    loaded: ChatModels, cfg: GenerateConfig, batches: Sequence[Sequence[Prompt]]
) -> dict[int, Settings]:
    """Warm up each batch size; returns its settings, with measured costs if needed."""
    engine, found = loaded.engine, {}
    first = _render(loaded, cfg, batches[0][0].turns[:1], [])[: engine.target.max_length // 2]
    for size in sorted({len(batch) for batch in batches}):
        found[size] = with_costs(engine, first, loaded.settings, size)
        few = replace(found[size], max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
        for drafter in (None, engine.drafter):
            decode(engine.target, drafter, [first] * size, few)
    return found


def _answer_batch(
    loaded: ChatModels,
    cfg: GenerateConfig,
    settings: Settings,
    number: int,
    batch: Sequence[Prompt],
    done: PromptRun,
) -> Iterator[list[PromptAnswer]]:
    """Yield the answers of one batch turn by turn; counts conversations that do not fit."""
    said: list[list[str]] = [[] for _ in batch]
    for turn in range(max(len(prompt.turns) for prompt in batch)):
        rows, ids = [], []
        for row, prompt in enumerate(batch):
            if turn < len(prompt.turns) and len(said[row]) == turn:
                rendered = _render(loaded, cfg, prompt.turns[: turn + 1], said[row])
                reason = _reason_not_to_answer(loaded, cfg, len(rendered))
                if reason:
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
            said[row].append(text)
            answer = PromptAnswer(
                batch[row],
                turn + 1,
                number,
                len(ids[at]),
                text,
                drafted[at],
                plain[at] if plain else None,
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
    """Return drafted and plain generations; plain is None if there is no baseline or no drafter."""
    target, drafter = loaded.engine.target, loaded.engine.drafter
    if drafter is None or not cfg.baseline:
        return decode(target, drafter, ids, settings, request_ids=requests), None
    ways = {
        kind: None if kind == "plain" else drafter
        for kind in (("plain", "drafted") if plain_first else ("drafted", "plain"))
    }
    found = {
        kind: decode(target, way, ids, settings, request_ids=requests) for kind, way in ways.items()
    }
    return found["drafted"], found["plain"]


def _compare(
    loaded: ChatModels, settings: Settings, answer: PromptAnswer, ids: list[int], request: int
) -> PromptAnswer:
    """Add the first difference if the outputs must be equal."""
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


def _reason_not_to_answer(loaded: ChatModels, cfg: GenerateConfig, length: int) -> str:
    """Return the reason that a prompt is too long, or an empty string."""
    holds = loaded.engine.target.max_length
    if length >= holds:
        return f"longer than the target's context of {holds} tokens"
    if cfg.max_prompt_tokens and length > cfg.max_prompt_tokens:
        return f"over max_prompt_tokens={cfg.max_prompt_tokens} (--max_prompt_length)"
    return ""

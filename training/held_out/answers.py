"""The target's answers to held-out prompts, on which every trainer scores its drafter.

The target is frozen, so it answers once, with our own decoding, before the first step.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from decoding.engine import stop_tokens
from decoding.errors import UserError
from decoding.interfaces import Target
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.settings import Settings
from decoding.values import check_choice
from jobs.config import TargetConfig
from jobs.paths import resolve, resolve_model
from training.config import DataConfig, HeldOutConfig
from training.data.chat import choose_rendering, render_prompt, render_text, template_source
from training.data.from_config import each_data
from training.data.packing import Sample
from training.data.readers import read_prompts
from training.data.templates import RENDERINGS
from training.export import refuse_stages
from training.models.build import target_is_here

PROMPTS_PER_BATCH = 16


class HeldOutFields(Protocol):
    """Configuration of a job in which the target answers held-out prompts."""

    target: TargetConfig
    data: DataConfig
    held_out: HeldOutConfig
    seed: int


class StagedFields(HeldOutFields, Protocol):
    """Configuration of an experiment whose later stages decode with its drafter."""

    dry_run: bool
    checkpoint: str
    benchmark_prompts: str
    benchmark_render: str


def check_stages(config: StagedFields) -> None:
    """Raise UserError if later stages of an experiment would fail.

    The benchmark prompts must exist, and the target's tokenizer must have a chat template if one is
    needed; neither is checked in a dry run or without the target's folder. A checkpoint to export
    is refused, as its settings are those of its run.
    """
    refuse_stages(config.checkpoint)
    check_choice("benchmark_render", config.benchmark_render, RENDERINGS)
    if config.dry_run or not target_is_here(config.target):
        return
    tokenizer = load_tokenizer(resolve_model(config.target.path, weights=False))
    template = config.data.template
    if any(one.chats or one.held_out_chats for one in each_data(config.data)):
        template_source(tokenizer, template)
    renders = {"held_out.render": config.held_out.render}
    if config.benchmark_prompts:
        resolve(config.benchmark_prompts)
        renders["benchmark_render"] = config.benchmark_render
    for key, render in renders.items():
        choose_rendering(tokenizer, render, template, (key, "data.template"), show=False)


def target_answers(target_folder: Path, tokenizer: Any, config: HeldOutFields) -> list[Sample]:
    """Decode the target's answers to the held-out prompts; return samples of prompt and answer.

    Only the answers are supervised. Prompts without room for an answer are left out. Raises
    UserError if none is left.
    """
    prompts = fitting_prompts(tokenizer, config)
    target = load_answering_target(target_folder, config)
    return answer_prompts(target, prompts, target_folder, tokenizer, config)


def answer_prompts(
    target: Target,
    prompts: Sequence[list[int]],
    target_folder: Path,
    tokenizer: Any,
    config: HeldOutFields,
) -> list[Sample]:
    """Decode the target's answers to prompts of token ids; return samples of prompt and answer."""
    settings = Settings(
        config.held_out.max_new_tokens,
        config.held_out.temperature,
        seed=config.seed,
        stop_token_ids=stop_tokens(target_folder, tokenizer),
    )
    samples = []
    for start in range(0, len(prompts), PROMPTS_PER_BATCH):
        part = prompts[start : start + PROMPTS_PER_BATCH]
        for ids, answer in zip(part, decode(target, None, part, settings), strict=True):
            mask = np.arange(len(ids) + len(answer.tokens)) >= len(ids)
            samples.append(Sample(np.asarray(ids + answer.tokens, dtype=np.int32), mask))
    return samples


def fitting_prompts(tokenizer: Any, config: HeldOutFields) -> list[list[int]]:
    """Return the ids of the first held_out.max_prompts prompts that leave room for an answer.

    Raises UserError if no prompt does.
    """
    chosen, template = config.held_out, config.data.template
    if chosen.prompts.startswith("embedded:") and not config.target.path.startswith("embedded:"):
        print(
            f"warning: held-out prompts are {chosen.prompts} (Python functions). Set "
            f"held_out.prompts=FILE to prompts that are typical of your target"
        )
    keys = ("held_out.render", "data.template")
    as_text = choose_rendering(tokenizer, chosen.render, template, keys) == "text"
    room = config.data.max_length - chosen.max_new_tokens
    found = [
        render_text(tokenizer, prompt.turns[0])
        if as_text
        else render_prompt(
            tokenizer, [{"role": "user", "content": prompt.turns[0]}], template=template
        )
        for prompt in read_prompts(resolve(chosen.prompts))
    ]
    fitting = [ids for ids in found if len(ids) <= room]
    if not fitting:
        raise UserError(
            f"no prompt of {chosen.prompts} fits into {room} tokens (data.max_length "
            f"{config.data.max_length} less held_out.max_new_tokens {chosen.max_new_tokens}). "
            f"Raise data.max_length or lower held_out.max_new_tokens"
        )
    if len(fitting) < len(found):
        print(
            f"held-out prompts: {len(found) - len(fitting)} of {chosen.prompts} left out, longer "
            f"than {room} tokens, which leaves no room for an answer"
        )
    return fitting[: chosen.max_prompts]


def load_answering_target(folder: Path, config: HeldOutFields) -> Target:
    """Load the target for decoding held-out prompts, in the dtype and on the devices of the job."""
    return load_target(
        folder,
        backend=config.target.backend,
        dtype=config.target.dtype,
        device=config.target.device,
        max_length=config.data.max_length,
        parallel=config.target.parallel,
        processes=config.target.processes,
    )

"""Held-out block efficiency of a trained head by real drafting, trees included."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decoding.engine import stop_tokens
from decoding.interfaces import Drafter, Target
from decoding.loop import decode
from decoding.rounds.settings import Settings
from training.data.packing import Sample
from training.held_out.answers import HeldOutFields, load_answering_target

_BATCH = 16


def block_efficiency(
    make_drafter: Callable[[Target], Drafter],
    config: HeldOutFields,
    num_draft_tokens: int,
    folder: Path,
    tokenizer: Any,
    answers: Sequence[Sample],
) -> float:
    """Decode all held-out prompts with a drafter and return the tokens per target forward.

    The bonus token is included and prefill excluded. Prompts are decoded with the settings of the
    target's answers (training.held_out.answers): greedily, or sampled with token verification.
    folder: the target's folder. make_drafter: returns the drafter on the target's device. answers:
    the target's answers, as samples that begin with their prompts.
    """
    held_out = config.held_out
    prompts = [sample.ids[: int(np.argmax(sample.mask))].tolist() for sample in answers]
    target = load_answering_target(folder, config)
    drafter = make_drafter(target)
    settings = Settings(
        held_out.max_new_tokens,
        held_out.temperature,
        num_draft_tokens=num_draft_tokens,
        seed=config.seed,
        stop_token_ids=stop_tokens(folder, tokenizer),
    )
    tokens = rounds = 0
    for start in range(0, len(prompts), _BATCH):
        for done in decode(target, drafter, prompts[start : start + _BATCH], settings):
            tokens, rounds = tokens + len(done.tokens), rounds + done.rounds
    return tokens / max(1, rounds)

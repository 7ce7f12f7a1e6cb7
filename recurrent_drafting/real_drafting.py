"""What the trained head is worth where it will work: the target decodes the held-out prompts with
it, beams, prefix tree and all.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decoding.engine import stop_tokens
from decoding.loop import decode
from decoding.rounds.settings import Settings
from recurrent_drafting.config import HeadTrainConfig
from recurrent_drafting.drafter import RecurrentDrafter
from recurrent_drafting.head import RecurrentHead
from training.data.packing import Sample
from training.held_out import asked_target

_BATCH = 16


def block_efficiency(
    head: RecurrentHead,
    config: HeadTrainConfig,
    folder: Path,
    tokenizer: Any,
    answers: Sequence[Sample],
) -> float:
    """Tokens a target forward over all held-out prompts, the bonus included and the prefill not.

    Decoded as the target answered (training.held_out): greedy, or drawn, then by beams that are
    drawn and token verification.
    answers: the samples of those answers, of which the prompts are taken.
    """
    asked, length = config.held_out, config.loss.predict_n_tokens
    prompts = [sample.ids[: int(np.argmax(sample.mask))].tolist() for sample in answers]
    target = asked_target(folder, config)
    children = "sampled" if asked.temperature else "top_k"
    drafter = RecurrentDrafter(
        head=head.to(target.device), beam_width=config.beam_width, children=children
    )
    settings = Settings(
        asked.max_new_tokens,
        asked.temperature,
        num_draft_tokens=length,
        seed=config.seed,
        stop_token_ids=stop_tokens(folder, tokenizer),
    )
    tokens = rounds = 0
    for start in range(0, len(prompts), _BATCH):
        for done in decode(target, drafter, prompts[start : start + _BATCH], settings):
            tokens, rounds = tokens + len(done.tokens), rounds + done.rounds
    return tokens / max(1, rounds)

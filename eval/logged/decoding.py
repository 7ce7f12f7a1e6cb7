"""Replay in the decoding loop: all drafters that draft from text alone, with any stopping rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from decoding.interfaces import Drafter
from decoding.loop import build_batch
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from eval.logged.target import LoggedTarget
from eval.logged.texts import LoggedText

ROWS = 16  # texts decoded together


@torch.inference_mode()
def decode_logged(
    drafter: Drafter,
    texts: Sequence[LoggedText],
    *,
    num_draft_tokens: int,
    stop_token_ids: Sequence[int],
    vocab_size: int,
    **settings: Any,
) -> list[Generation]:
    """Return the generations with which the target would have written the texts.

    settings: further fields of decoding.rounds.settings.Settings, such as a stopping policy.
    """
    found = []
    width = drafter.width(num_draft_tokens)
    for start in range(0, len(texts), ROWS):
        part = texts[start : start + ROWS]
        target = LoggedTarget([text.ids for text in part], vocab_size, width)
        longest = max(len(text.tokens) for text in part)
        chosen = Settings(
            max_new_tokens=longest + width + 1,
            num_draft_tokens=num_draft_tokens,
            stop_token_ids=tuple(stop_token_ids),
            **settings,
        )
        batch = build_batch(
            target,
            drafter,
            [text.prompt for text in part],
            chosen,
            request_ids=range(start, start + len(part)),
        )
        generations = [row.generation for row in batch.rows]
        for row, text in zip(batch.rows, part, strict=True):
            # an output that ended by itself may be shorter than its limit
            row.limit = min(len(text.prompt) + text.limit, row.limit)
        batch.open()
        while batch.rows:
            batch.round()
        batch.close()
        found += generations
    return found

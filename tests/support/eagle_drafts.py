"""Drafts of EAGLE heads in training, beside an independent computation of each.

Shapes: R rows, T their tokens, C channels of the target's states, M drafts, J steps, N tokens of a
text, H hidden size.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from heads.eagle.drafts import Drafts
from heads.eagle.model import EagleHead
from training.data.packing import Sample, collate

# from embedded tokens (N, H), states (N - steps, C) and the step to the head's output (H)
Reference = Callable[[Tensor, Tensor, int], Tensor]


def check_drafts(head: EagleHead, channels: int, reference: Reference) -> None:
    """Compare all drafts of two packed texts with a reference of one draft at a time.

    head: in float64, of 11 tokens and width 8. channels: C.
    """
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(11, 8, generator=generator, dtype=torch.float64)
    texts = [[3, 1, 4, 1, 5, 9], [2, 6, 5, 3]]
    samples = [Sample(np.asarray(ids, np.int32), np.ones(len(ids), bool)) for ids in texts]
    batch = collate(samples, [[0, 1]], 12)
    states_RTC = torch.randn(1, 12, channels, generator=generator, dtype=torch.float64)
    tips_M = torch.tensor([1, 3, 7, 8])
    drafted_MJ = torch.randint(11, (4, 3), generator=generator)
    drafts = Drafts(head, batch, embedding[batch.ids_RT], states_RTC, tips_M, 3)
    tokens_MJ = torch.cat((batch.ids_RT[0, tips_M, None], drafted_MJ[:, :2]), 1)
    for step in range(3):
        found_MH = drafts.advance(embedding[tokens_MJ[:, step]])
        for m, tip in enumerate(tips_M.tolist()):
            start = 0 if tip < 6 else 6
            ids = [*batch.ids_RT[0, start + 1 : tip].tolist(), *tokens_MJ[m, : step + 1].tolist()]
            expected_H = reference(embedding[ids], states_RTC[0, start:tip], step)
            # `transformers` rotates by angles in float32
            torch.testing.assert_close(found_MH[m], expected_H, rtol=1e-5, atol=1e-5)

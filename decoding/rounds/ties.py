"""Comparison of two outputs that should be equal: where they differ, and how close the choice was.

A forward over n tokens rounds differently from n forwards over one token, so the choice may change
where the two best tokens are (nearly) tied.
"""

from collections.abc import Sequence

import torch

from decoding.interfaces import Target
from decoding.models.prefill import prefill
from decoding.rounds.claims import Claim
from decoding.rounds.settings import Settings
from decoding.sampling import noise
from decoding.sampling.logits_processors import make_processors

# if the target's two best tokens are closer than this, in float32 or float64, a difference is a tie
TIE_GAP = 1e-4


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the index of the first different or missing token, None for equal sequences."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


@torch.inference_mode()
def choice_scores(
    target: Target, ids: Sequence[int], settings: Settings, request: int
) -> torch.Tensor:
    """Return float64 scores (V,) whose maximum is the target's choice after `ids`.

    They are logits in greedy decoding, and log p + Gumbel noise under the coupled rule. The
    target's cache is overwritten.
    """
    with Claim(target) as claim:
        claim.take()
        target.open(1, len(ids) + 1)
        prefill(target, [list(ids[:-1])])
        last = torch.tensor([[ids[-1]]], device=target.device)
        logits_V = target.forward(last)[0][0, -1].double()
    processors = make_processors(settings.repetition_penalty, settings.allowed)
    if processors is not None:
        logits_V = processors(logits_V[None, None], [ids])[0, 0]
    if settings.temperature == 0:
        return logits_V
    position = torch.tensor(noise.signed(noise.extend(noise.key(settings.seed, request), len(ids))))
    race_V = noise.exponentials(position, noise.scaled_ids(torch.arange(len(logits_V))))
    return settings.warper.probs(logits_V).log() - race_V.to(logits_V.device).log()


def top_two_gap(scores_V: torch.Tensor) -> float:
    """Return the highest score minus the second highest."""
    best, second = scores_V.topk(2).values.tolist()
    return best - second

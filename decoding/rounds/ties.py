"""Two outputs that should be one: where they part, and how near the target's choice was to another
token there.

A forward over n tokens rounds differently from n forwards over one, so where the two best tokens
are (nearly) tied the choice may flip.
"""

from collections.abc import Sequence

import torch

from decoding.interfaces import Target
from decoding.rounds.claims import Claim
from decoding.rounds.settings import Settings
from decoding.sampling import noise
from decoding.sampling.logits_processors import make_processors

# a difference at a smaller gap between the target's two best tokens is a tie, in float32 and
# float64
TIE_GAP = 1e-4


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs (a missing token differs), None when the
    two are equal.
    """
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


@torch.inference_mode()
def choice_scores(
    target: Target, ids: Sequence[int], settings: Settings, request: int
) -> torch.Tensor:
    """Scores (vocabulary,) whose best is the target's choice after `ids`, in float64.

    Logits where decoding is greedy, and log p + Gumbel noise under the coupled rule. It uses the
    target's cache.
    """
    with Claim(target) as claim:
        claim.take()
        target.open(1, len(ids) + 1)
        logits_V = target.lm_head(
            target.features(torch.tensor([list(ids)], device=target.device))[:, -1]
        )[0].double()
    processors = make_processors(settings.repetition_penalty, settings.allowed)
    if processors is not None:
        logits_V = processors(logits_V[None, None], [ids])[0, 0]
    if settings.temperature == 0:
        return logits_V
    position = torch.tensor(noise.signed(noise.extend(noise.key(settings.seed, request), len(ids))))
    race_V = noise.exponentials(position, noise.scaled_ids(torch.arange(len(logits_V))))
    return settings.warper.probs(logits_V).log() - race_V.to(logits_V.device).log()


def top_two_gap(scores_V: torch.Tensor) -> float:
    """The best score minus the second best: how near a choice was to another one."""
    best, second = scores_V.topk(2).values.tolist()
    return best - second

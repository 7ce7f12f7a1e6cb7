"""How good a head is, while it trains: what it would have accepted on the target's own answers."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from training.data.packing import Sample, best_fit, collate
from training.features.states import TargetStates
from training.heads.positions import positions

Look = Callable[[], dict[str, float]]


class Looks:
    """Several looks as one: their figures together."""

    def __init__(self, looks: Sequence[Look]) -> None:
        self.looks = looks

    def __call__(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for look in self.looks:
            figures |= look()
        return figures


class _Fixed:
    """Batches of one row, their positions, and the target's states there, made once: neither
    changes while a head trains.
    """

    def __init__(
        self,
        states: TargetStates,
        samples: Sequence[Sample],
        heads: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        self._states = states
        rows = best_fit([len(sample.ids) for sample in samples], max_length)
        batches = [collate(samples, [row], max_length, device) for row in rows]
        self.batches = [(batch, positions(batch, heads, judged=False)) for batch in batches]
        self._hidden: list[Tensor] = []

    def hidden(self, number: int) -> Tensor:
        """The target's states of batch `number` at its kept positions."""
        if number == len(self._hidden):
            self._hidden.append(self._states.read(*self.batches[number]))
        return self._hidden[number]


def _prompt(answer: Sample) -> int:
    """Tokens of an answer's prompt."""
    return int(np.argmax(answer.mask))


def walk(
    matches_T: np.ndarray, prompt: int, draft_tokens: int, limit: int
) -> tuple[int, int, int, int]:
    """(rounds, emitted, accepted, tested) of decoding one answer, as decoding.rounds.batch counts
    them. All its tokens come from rounds.

    matches_T: tokens that a draft behind a token has right, of a prompt of `prompt` tokens and its
    answer. limit: tokens that the text might have reached; a round leaves the last one of them to
    the target.
    """
    rounds = emitted = accepted = tested = 0
    tip, last = prompt - 1, len(matches_T) - 1
    while tip < last:
        room = min(draft_tokens, limit - tip - 2)
        right = min(int(matches_T[tip]), room)
        gained = min(right + 1, last - tip)  # what comes behind a stop token is not emitted
        rounds, emitted, accepted, tested = (
            rounds + 1,
            emitted + gained,
            accepted + min(right, gained),
            tested + min(right + 1, room, gained),
        )
        tip += gained
    return rounds, emitted, accepted, tested

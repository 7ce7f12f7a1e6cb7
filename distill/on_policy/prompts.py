"""Prompts for the student, from the samples of the training data.

A chat has a prompt for every answer: its tokens up to the answer. A sample that is supervised from
its second token on, such as a plain text, has its first tokens as a prompt.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from decoding.errors import UserError
from training.data.packing import Sample

TEXT_PROMPT_TOKENS = 32
# third word of the key of the order, which differs from those of other random numbers of the data
_ORDER = 2


class Prompts:
    """Prompts in an endless order, which is shuffled in every pass."""

    def __init__(self, samples: Sequence[Sample], room: int, seed: int) -> None:
        """Find the prompts of at most `room` tokens. Raises UserError if there is none."""
        self._samples, self._seed = samples, seed
        pairs = array("q")  # a list of tuples would take ten times the memory
        for index, one in enumerate(samples):
            pairs.extend(number for length in lengths_of(one) for number in (index, length))
        found = np.frombuffer(pairs, np.int64).reshape(-1, 2)
        self._places = found[found[:, 1] <= room]  # sample, length of its prompt in tokens
        self.too_long = len(found) - len(self._places)
        if not len(self._places):
            raise UserError(
                f"on_policy: the student has no prompt to answer. Of {len(found):,} prompts in "
                f"{len(samples):,} samples, none has at most {room} tokens (data.max_length less "
                f"on_policy.max_new_tokens); a plain text has one if it is longer than "
                f"{TEXT_PROMPT_TOKENS} tokens. Raise data.max_length, lower "
                f"on_policy.max_new_tokens, or set on_policy.share=0"
            )
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        """Return the number of different prompts."""
        return len(self._places)

    def __getitem__(self, number: int) -> list[int]:
        """Return the token ids of prompt `number` (from 0) of the endless order."""
        epoch, offset = divmod(number, len(self))
        if self._order[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch, _ORDER])
            self._order = (epoch, generator.permutation(len(self)))
        index, length = self._places[self._order[1][offset]].tolist()
        ids: list[int] = self._samples[index].ids[:length].tolist()
        return ids


def lengths_of(sample: Sample) -> list[int]:
    """Return the length in tokens of each prompt of a sample."""
    starts: list[int] = (np.flatnonzero(sample.mask[1:] & ~sample.mask[:-1]) + 1).tolist()
    # a single token is no prompt: the sample is supervised from its second token on
    if starts[:1] == [1]:
        starts[0] = TEXT_PROMPT_TOKENS
    return [start for start in starts if start < len(sample.ids)]

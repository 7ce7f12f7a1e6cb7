"""Drafters that tap the target's layers and check that they receive the states of committed tokens.

Shapes: B rows, N tokens, X taps, C hidden size.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.trees.multi_candidate import MultiCandidate
from decoding.interfaces import Observation, Proposal, Stopping, Target
from decoding.sampling.token_chooser import TokenChooser

TAPS = (2, 0, 1)  # of two layers: unsorted, with the first and the last


class TapChain(ChainDrafter):
    """Chain whose proposal depends on the taps.

    It is one token shorter if the first channel of the last state is positive.
    """

    def __init__(
        self,
        model: Target,
        twin: Target,
        *,
        taps: tuple[int, ...] = TAPS,
        last_hidden: bool = False,
        expected: tuple[int, ...] | None = None,
        **named: object,
    ) -> None:
        """Create a chain. twin: a copy of the target, which computes the expected states.

        last_hidden: the capability of reading only the last state of each prompt. expected: taps of
        the expected states; None means `taps`, and other taps make a control, which must fail.
        """
        super().__init__(model=model, **named)  # type: ignore[arg-type]
        self.capabilities = replace(
            type(self).capabilities,
            needs_hidden=True,
            taps=taps,
            last_hidden=last_hidden,
            can_overlap=False,
        )
        self.twin, self.expected = twin, taps if expected is None else expected
        self.checked = 0  # number of compared states
        # by row: position of the first known state, and the states from there on
        self.known_B: list[tuple[int, Tensor]] = []

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int
    ) -> None:
        super().open(prompts_B, prefill_hidden_BNC, capacity)
        X = len(self.capabilities.taps)
        hidden_BNC = (
            torch.zeros(len(prompts_B), 0, X * self.twin.hidden_size, dtype=torch.float64)
            if prefill_hidden_BNC is None
            else prefill_hidden_BNC
        )
        self.known_B = []
        for prompt, hidden_NC in zip(prompts_B, hidden_BNC, strict=True):
            read = len(prompt) - 1
            if self.capabilities.last_hidden and len(hidden_NC) < read:
                assert len(hidden_NC) == 1, "only the last state of each prompt"
                self.known_B.append((read - 1, hidden_NC))
            else:
                self.known_B.append((0, hidden_NC[:read]))

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        super().resume(prompt, kept, hidden_NC)
        assert hidden_NC is not None and len(hidden_NC) > 0
        start, (first, states_NC) = len(prompt) - 1 - len(hidden_NC), self.known_B[0]
        if first <= start <= min(first + len(states_NC), kept):
            self.known_B = [(first, torch.cat((states_NC[: start - first], hidden_NC)))]
        else:
            assert self.capabilities.last_hidden, "states of new tokens are missing"
            self.known_B = [(start, hidden_NC)]

    def propose(
        self,
        sequences_B: Sequence[Sequence[int]],
        budgets_B: Sequence[int],
        stopping_B: Sequence[Stopping],
        chooser: TokenChooser,
    ) -> Proposal:
        self.check([list(sequence[:-1]) for sequence in sequences_B])
        made = super().propose(sequences_B, budgets_B, stopping_B, chooser)
        made.counts_B = [
            count - 1 if count > 1 and len(states_NC) and states_NC[-1, 0] > 0 else count
            for count, (_, states_NC) in zip(made.counts_B, self.known_B, strict=True)
        ]
        return made

    def check(self, texts_B: list[list[int]]) -> None:
        """Assert that the known states of each row are the twin's, up to the last of its tokens."""
        longest = max(map(len, texts_B))
        if not longest:
            return
        self.twin.open(len(texts_B), longest)
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts_B])
        expected_BNC = self.twin.features(padded, None, self.expected)
        for text, expected_NC, (first, states_NC) in zip(
            texts_B, expected_BNC, self.known_B, strict=True
        ):
            assert first + len(states_NC) == len(text), "a state for every committed token"
            torch.testing.assert_close(
                states_NC, expected_NC[first : len(text)], rtol=1e-9, atol=1e-9
            )
            self.checked += len(states_NC)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        outcome = observation.outcome
        paths_B = outcome.paths_B or [range(accepted) for accepted in outcome.accepted_B]
        for b, path in enumerate(paths_B):
            first, states_NC = self.known_B[b]
            new_NC = observation.hidden_BNC[b, [0, *(node + 1 for node in path)]]
            self.known_B[b] = first, torch.cat((states_NC, new_NC))

    def rollback(self, lengths_B: Sequence[int]) -> None:
        super().rollback(lengths_B)
        self.known_B = [
            (first, states_NC[: length - first])
            for (first, states_NC), length in zip(self.known_B, lengths_B, strict=True)
        ]

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.known_B = [self.known_B[row] for row in rows]


class TapTree(TapChain, MultiCandidate):
    """Tree with the checks of `TapChain`."""

"""Pools of phrases, and the target's tokens that Ouroboros stores in them."""

import random
from itertools import pairwise

import pytest
import torch

from decoding.drafters.lookahead import PhrasePool
from decoding.drafters.ouroboros import Ouroboros
from decoding.interfaces import Observation
from decoding.loop import decode
from decoding.rounds.settings import Settings
from tests.support.tiny_targets import random_prompts

from .test_session import kit_of


def test_a_pool_holds_the_newest_phrases_without_their_prefixes() -> None:
    draw, pool = random.Random(5), PhrasePool(per_key=4)
    shortened = 0
    for _ in range(500):
        phrase = tuple(draw.choices(range(3), k=draw.randint(1, 4)))
        known = pool.newest(7, 9)
        pool.add(7, phrase)
        held = pool.newest(7, 9)
        assert held[0][: len(phrase)] == phrase, (
            "the newest phrase is the added one, or a stored one that begins with it"
        )
        assert len(held) <= 4
        assert not any(a != b and b[: len(a)] == a for a in held for b in held)
        shortened += held[0] in known and held[0] != phrase
    assert shortened, "no prefix of a stored phrase was added"
    pool.add(7, ())
    assert pool.newest(7, 9) == held and pool.newest(8, 9) == []


class CheckedOuroboros(Ouroboros):
    """Ouroboros that checks its pools for the target's tokens after every round."""

    corrected = continued = 0

    def observe(self, observation: Observation) -> None:
        before, outcome = self._drafted, observation.outcome
        super().observe(observation)
        (choices_BN,) = observation.readback or ([],)
        for drafted, choices, accepted, pool in zip(
            before, choices_BN, outcome.accepted_B, self.inner.pools
        ):
            if drafted is None:
                continue
            accepted = min(accepted, len(drafted.chain))  # the rest belongs to a phrase
            rejected = [node + 1 for node in drafted.chain[accepted:]]
            after = [
                choices[0 if accepted == 0 else drafted.chain[accepted - 1] + 1],
                *(choices[node] for node in rejected),
            ]
            for word, following in pairwise(after):
                assert any(phrase[0] == following for phrase in pool.newest(word, 99))
                self.continued += 1
            for nodes, tokens, phrase in drafted.suffixes:
                words = tuple(choices[node + 1] for node in [drafted.chain[-1], *nodes[:-1]])
                if list(words) != tokens:
                    assert (*words, *phrase[len(words) :]) in [
                        one[: len(phrase)] for one in pool.newest(drafted.tokens[-1], 99)
                    ], "the rest of the phrase follows the corrected tokens"
                    self.corrected += 1


@pytest.mark.parametrize("gamma", [2, 4, 6])
def test_ouroboros_stores_the_targets_tokens_for_all_draft_lengths(gamma: int) -> None:
    kit = kit_of()
    drafter = CheckedOuroboros(model=kit.draft_model, candidates=99)
    settings = Settings(num_draft_tokens=gamma, max_new_tokens=40, stopping="fixed")
    with torch.inference_mode():
        decode(kit.target, drafter, random_prompts(4), settings)
    assert drafter.continued > 10, "nothing was stored after a rejection"
    assert drafter.corrected > 5 or gamma == 2, "no phrase was corrected"

"""Pools of earlier texts: the next row drafts from them, and its text stays the target's."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from decoding.interfaces import Pool
from decoding.rounds.stats import Generation
from decoding.sessions.open_batch import OpenBatch, Request
from tests.support.tiers import tiered
from tests.support.tiny_targets import random_prompts

from .rows import BY_NAME, ROWS, DrafterRow, Kit
from .test_law_of_joining import alone, counts
from .test_laws import models, name, with_rule

MOST = 200  # tokens of a pool
ALONE = {"prompt_lookup", "suffix_lookup", "lookahead", "ouroboros"}  # without lookup before them
KEEPERS = [row for row in ROWS if row.name in ALONE or row.name.endswith("_with_lookup")]
QUICK = ("prompt_lookup", "lookahead", "ouroboros", "chain_with_lookup", "ouroboros_with_lookup")
ASKED = [(row, rule) for row in KEEPERS for rule in ("greedy", "coupled")]


@lru_cache
def kit() -> Kit:
    return Kit(*models(), [])


class Server:
    """A batch that requests join one after another, each with the pool of its key."""

    def __init__(self, row: DrafterRow, rule: str) -> None:
        settings = with_rule(rule, num_draft_tokens=row.gamma or 3, stopping="fixed")
        self.settings = replace(settings, max_new_tokens=40, seed=7)
        # Ouroboros appends phrases to drafts that are accepted whole, so its model is the target
        models_of = replace(kit(), draft_model=kit().twin) if row.name == "ouroboros" else kit()
        self.drafter = row.make(models_of)
        self.batch = OpenBatch(kit().target, self.drafter, self.settings, 2)
        self.pools: dict[int, Pool] = {}  # index of a row -> its pool
        self.batch.on_end = lambda _, row: self.pools[row.index].end(row.sequence)

    def new_pool(self) -> Pool:
        return self.drafter.new_pool(MOST)  # type: ignore[union-attr]

    def request(self, prompt: list[int], pool: Pool) -> Request:
        return Request(prompt, self.settings, pool=pool)

    @torch.inference_mode()
    def ask(self, *requests: Request) -> list[Generation]:
        """Decode requests, of which each joins a round after the one before."""
        rows = []
        for request in requests:
            (row,) = self.batch.join([request])
            assert request.pool is not None
            self.pools[row.index] = request.pool
            rows.append(row)
            self.batch.round()
        while self.batch.rows:
            self.batch.round()
        return [row.generation for row in rows]


def test_the_drafters_with_pools_are_those_of_the_documents() -> None:
    found = {
        row.name
        for row in ROWS
        if not row.name.startswith("oracle")  # it knows the texts of one batch only
        and row.make(kit()).capabilities.keeps_pools
    }
    assert found == {row.name for row in KEEPERS} > {*QUICK}


@pytest.mark.parametrize(
    ("row", "rule"),
    tiered(ASKED, lambda row, rule: row.name in QUICK and rule == "coupled"),
    ids=name,
)
def test_a_second_request_drafts_from_the_first_of_its_key(row: DrafterRow, rule: str) -> None:
    server, prompt = Server(row, rule), random_prompts(1, seed=5)[0]
    mine, theirs = server.new_pool(), server.new_pool()
    (first,) = server.ask(server.request(prompt, mine))
    (again,) = server.ask(server.request(prompt, mine))
    (other,) = server.ask(server.request(prompt, theirs))
    plain = alone(kit().target, None, server.request(prompt, theirs))
    assert first.tokens == again.tokens == other.tokens == plain.tokens
    assert counts(other) == counts(first), "another key's pool was used"
    assert again.rounds < first.rounds and again.accepted > first.accepted


@pytest.mark.parametrize("row", tiered(KEEPERS, lambda row: row.name in QUICK), ids=name)
def test_neighbours_keep_their_pools_apart(row: DrafterRow) -> None:
    """Check a row that joins one with a warm pool, and one that outlives it."""
    server, (one, two) = Server(row, "coupled"), random_prompts(2, seed=6)
    mine = server.new_pool()
    (cold,) = server.ask(server.request(two, server.new_pool()))
    server.ask(server.request(two, mine))
    warm, beside = server.ask(server.request(two, mine), server.request(two, server.new_pool()))
    assert counts(beside) == counts(cold) and warm.rounds < cold.rounds
    assert beside.tokens == warm.tokens == cold.tokens
    (elsewhere,) = server.ask(server.request(one, mine))
    assert elsewhere.tokens == alone(kit().target, None, server.request(one, mine)).tokens


def test_a_pool_is_bounded() -> None:
    pool = BY_NAME["chain_with_lookup"].make(kit()).new_pool(5)  # type: ignore[union-attr]
    for text in ([1, 2, 3], [4, 5, 6, 7]):
        pool.end(text)
    assert pool.tokens == [3, 4, 5, 6, 7]


def test_a_drafter_that_keeps_phrases_has_them_under_a_lookup() -> None:
    server = Server(BY_NAME["ouroboros_with_lookup"], "greedy")
    pool, prompt = server.new_pool(), random_prompts(1, seed=5)[0]
    (done,) = server.ask(server.request(prompt, pool))
    assert pool.tokens == [*prompt, *done.tokens]  # type: ignore[attr-defined]
    assert any(pool.inner.newest(token, 1) for token in done.tokens)  # type: ignore[attr-defined]
    chain = Server(BY_NAME["chain_with_lookup"], "greedy").new_pool()
    assert chain.inner is None  # type: ignore[attr-defined]

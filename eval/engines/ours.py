"""Our own loop behind the interface of an engine, for comparison at a fixed draft length."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Chooser, Drafter, Policies, Proposal, Tokens
from decoding.loop import decode
from decoding.sampling.token_chooser import likeliest_chooser
from eval.engines.plan import Trial
from eval.measure.measurement import Bench
from eval.statistics.metrics import add_by_depth
from serving.engines.interface import Answer, BatchResult, Sampling


class PointMassDrafter(ChainDrafter):
    """A chain drafter that proposes its likeliest tokens without q, at any temperature.

    The target then accepts a token with its own probability, as vLLM does by default.
    """

    capabilities = dataclasses.replace(ChainDrafter.capabilities, has_q=False)

    def propose(
        self, sequences_B: Tokens, budgets_B: Sequence[int], stopping_B: Policies, chooser: Chooser
    ) -> Proposal:
        """Draft a chain of each row's likeliest tokens."""
        return super().propose(sequences_B, budgets_B, stopping_B, likeliest_chooser(chooser))


@runtime_checkable
class HasChains(Protocol):
    """A trained head that drafts trees or chains of several lengths."""

    def as_chain(self, children: str) -> Drafter:
        """Return a drafter of chains of a fixed length with the same head.

        children: `sampled`, or `top_k` for the likeliest tokens at any temperature.
        """


class OurEngine:
    """Our loop with the models of a bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._chains: dict[tuple[str, bool], Drafter | None] = {}

    def decode(
        self,
        trial: Trial,
        prompts_ids: Sequence[list[int]],
        sampling: Sampling,
        request_ids: Sequence[int],
    ) -> BatchResult:
        """Decode one batch. request_ids: noise keys of its rows."""
        settings = dataclasses.replace(
            self.bench.settings,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            num_draft_tokens=max(1, trial.arm.num_draft_tokens),
            verify="token",
            stopping="fixed",
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
        )
        drafter = self._drafter(trial)
        began = time.perf_counter()
        rows = decode(self.bench.target, drafter, prompts_ids, settings, request_ids=request_ids)
        seconds = time.perf_counter() - began
        accepted = add_by_depth([row.accepted_by_depth for row in rows])
        return BatchResult(
            answers=[
                Answer(
                    row.tokens, row.first_token_seconds, row.prefill_seconds + row.decode_seconds
                )
                for row in rows
            ],
            seconds=seconds,
            rounds=sum(row.rounds for row in rows) if drafter else 0,
            drafted=sum(row.drafted for row in rows),
            accepted=sum(accepted),
            accepted_by_depth=accepted,
            tested_by_depth=add_by_depth([row.tested_by_depth for row in rows]),
        )

    def _drafter(self, trial: Trial) -> Drafter | None:
        """Return the drafter of a trial, as a chain of the engine's rule; each is made once."""
        place = (trial.arm.drafter, trial.rule == "point_mass")
        if place not in self._chains:
            self._chains[place] = _chain_of(self.bench.drafters.get(place[0]), place[1])
        return self._chains[place]


def _chain_of(drafter: Drafter | None, likeliest: bool) -> Drafter | None:
    """Return a drafter of chains of a fixed length with another's model.

    likeliest: whether it drafts the likeliest tokens at any temperature. Trees, and lengths chosen
    by costs or by a confidence, are features of our loop alone.
    """
    if isinstance(drafter, HasChains):
        return drafter.as_chain("top_k" if likeliest else "sampled")
    if isinstance(drafter, ChainDrafter) and likeliest:
        return PointMassDrafter(model=drafter.model, name=drafter.name)
    return drafter

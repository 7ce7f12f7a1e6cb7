"""Law 3 under the overlapped schedules, with controls for errors that only they can make.

Under token verification the schedules with a worker process emit the same tokens as these
(test_pearl_wall.py), so the law covers them too.
"""

import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.interfaces import Outcome, Proposal, Readback
from decoding.loop import decode
from decoding.rounds.settings import Settings
from decoding.sampling import noise
from decoding.sampling.token_chooser import TokenChooser
from decoding.schedules.by_name import VIRTUAL
from decoding.schedules.pearl import Pearl
from tests.support.batched_requests import MANY, decode_in_batches
from tests.support.many_requests import replace_uniform
from tests.support.tiers import tiered

from .law_3 import DRAWS, FEW_DRAWS, P_LIMIT, PROMPT, drafter_of, law_holds, target_table
from .rows import COSTS
from .test_laws import models
from .test_pearl import AHEAD
from .test_pearl_plus import REGIMES

SCHEDULES: dict[str, dict] = {
    "pearl": {"schedule": "pearl_virtual"},
    "without_post": {"schedule": "pearl_virtual_wo_post"},
    "without_pre": {"schedule": "pearl_virtual_wo_pre"},
} | {
    f"plus_{name}": {"schedule": "pearl_plus_virtual", "costs": costs}
    for name, costs in REGIMES.items()
}
# PEARL and its ablations have every length and warper; PEARL+, which only reorders their rounds,
# has two.
CASES = [
    (name, gamma, warper)
    for name in ("pearl", "without_post", "without_pre")
    for gamma, warper in ((2, "plain"), (4, "plain"), (3, "hot_top_p"), (3, "cold_top_k"))
]
CASES += [
    (f"plus_{name}", gamma, warper)
    for name in REGIMES
    for gamma, warper in ((4, "plain"), (3, "hot_top_p"))
]


def law_of(
    name: str,
    warper: str = "plain",
    gamma: int = 4,
    seed: int = 0,
    row: str = "chain",
    draws: int = DRAWS,
) -> float:
    """Return the p-value of law 3 under token verification.

    name: key of SCHEDULES. row: that of the drafter.
    """
    more = {"num_draft_tokens": gamma, "seed": seed, "draws": draws, **SCHEDULES[name]}
    return law_holds(drafter_of(row), "token", warper, **more)


QUICK = [("pearl", 3, "hot_top_p"), ("plus_eager", 3, "hot_top_p")]
QUICK += [("without_post", 4, "plain"), ("without_pre", 4, "plain")]


@pytest.mark.parametrize(("name", "gamma", "warper"), tiered(CASES, QUICK))
def test_law_3(name: str, gamma: int, warper: str) -> None:
    """Check every schedule; the choices of PEARL+ depend on verified tokens only."""
    assert law_of(name, warper=warper, gamma=gamma) > P_LIMIT


@pytest.mark.parametrize(
    ("name", "row"),
    tiered(
        [(name, row) for name in SCHEDULES for row in (*AHEAD[1:], "specdiff")],
        [("without_pre", "eagle3_chain")]
        + [("pearl", row) for row in ("eagle3_chain", "recurrent_chain", "specdiff_sampled")],
    ),
)
def test_law_3_of_heads(name: str, row: str) -> None:
    """Check drafts from a head's own outputs, whose q no state of the target has corrected."""
    draws = DRAWS if name == "pearl" else FEW_DRAWS
    assert law_of(name, warper="hot_top_p", gamma=3, row=row, draws=draws) > P_LIMIT


@pytest.mark.parametrize(
    ("name", "warper"),
    tiered(
        [
            (name, warper)
            for name, fields in SCHEDULES.items()
            for warper in ({"temperature": 1.0}, {"temperature": 1.5, "top_p": 0.85})
            if fields["schedule"] in MANY
        ],
        lambda name, warper: name in ("pearl", "plus_eager") and "top_p" in warper,
    ),
)
def test_grouped_requests_equal_single_ones(name: str, warper: dict) -> None:
    """Check that law 3's batches of requests (batched_requests.py) give the tokens of `decode`."""
    settings = Settings(max_new_tokens=12, num_draft_tokens=3, **warper, **SCHEDULES[name])
    target, drafter, ids = target_table(), drafter_of("chain"), range(100, 160)
    together = decode_in_batches(target, drafter, PROMPT, settings, ids, 9)
    alone = [
        decode(target, drafter, [PROMPT], settings, request_ids=[i])[0].tokens[:9] for i in ids
    ]
    assert together == alone


@pytest.mark.parametrize("name", tiered(["pearl", "without_post"], ["pearl"]))
def test_law_3_rejects_the_reused_uniform_of_the_published_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a post-verify whose first test reuses the uniform of the pre-verify test before it."""
    original, last = TokenChooser.uniform, {}

    def reused(
        self: TokenChooser, row: int, depth: int, purpose: int, node: int | None = None
    ) -> float:
        if purpose != noise.ACCEPT or depth:
            return original(self, row, depth, purpose, node)
        request, position = self.begun[0][row], self.begun[2][row]
        last[request, position] = last.get((request, position - 1)) or original(
            self, row, depth, purpose, node
        )
        return last[request, position]

    replace_uniform(monkeypatch, reused)
    assert law_of(name) < P_LIMIT


def accept_fresh_chunks_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept a new chunk's first token untested, as the published ablation `para_sd_wo_1` does.

    The target's row is replaced so that it chooses that token.
    """
    test, assume_whole = Pearl._test, Pearl._assume_whole

    def assume(self: Pearl, chunk: Proposal) -> None:
        assume_whole(self, chunk)
        self.whole = True  # type: ignore[attr-defined]

    def blind(self: Pearl, logits_BNV: torch.Tensor, window: Proposal, read: Readback) -> Outcome:
        whole, self.whole = getattr(self, "whole", False), False  # type: ignore[attr-defined]
        logits_BNV = logits_BNV.clone()
        for b, lane in enumerate(self.lanes):
            if window.counts_B[b] and (whole or not lane.tokens):
                logits_BNV[b, 0] = float("-inf")
                logits_BNV[b, 0, window.tokens_BN[b, 0]] = 0.0
        return test(self, logits_BNV, window, read)

    monkeypatch.setattr(Pearl, "_assume_whole", assume)
    monkeypatch.setattr(Pearl, "_test", blind)


@pytest.mark.parametrize(
    ("name", "row"),
    tiered(
        [*((name, "chain") for name in SCHEDULES), *(("pearl", row) for row in AHEAD[1:])],
        [("pearl", "chain"), ("plus_eager", "chain"), ("pearl", "eagle3_chain")],
    ),
)
def test_law_3_rejects_an_untested_first_token(
    name: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_fresh_chunks_first_token(monkeypatch)
    assert law_of(name, row=row) < P_LIMIT


@pytest.mark.parametrize("schedule", VIRTUAL)
def test_law_1_rejects_an_untested_first_token(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_fresh_chunks_first_token(monkeypatch)
    target, _, draft_model = models()
    settings = Settings(max_new_tokens=40, num_draft_tokens=3, schedule=schedule, costs=COSTS)
    (plain,), (done,) = (
        decode(target, d, [[4, 5]], settings) for d in (None, ChainDrafter(model=draft_model))
    )
    assert done.tokens != plain.tokens


@pytest.mark.parametrize("name", ["plus_eager"])
def test_law_3_rejects_dropping_a_sampled_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a drafter that drops chunks that begin with symbol 0.

    Whether a chunk is tested then depends on its sampled token.
    """
    propose = ChainDrafter.propose

    def choosy(self: ChainDrafter, *asked: object) -> Proposal:
        chunk = propose(self, *asked)  # type: ignore[arg-type]
        if chunk.tokens_BN.shape[1]:
            kept_B = (chunk.tokens_BN[:, 0] != 0).tolist()
            chunk.counts_B = [count * kept for count, kept in zip(chunk.counts_B, kept_B)]
            lengths_B = self.model.lengths_B
            before_B = [len(sequence) - 1 for sequence in asked[0]]  # type: ignore[attr-defined]
            self.model.truncate(
                [now if kept else old for now, old, kept in zip(lengths_B, before_B, kept_B)]
            )
        return chunk

    monkeypatch.setattr(ChainDrafter, "propose", choosy)
    assert law_of(name) < P_LIMIT

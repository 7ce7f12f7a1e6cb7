"""Rows that join and leave a running batch have the text and the drafts of a decode alone."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError
from decoding.interfaces import Drafter, Target
from decoding.loop import decode
from decoding.models.hf import HFTarget
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from decoding.rounds.stats import Generation
from decoding.sessions.open_batch import OpenBatch, Request
from tests.support.tiers import tiered
from tests.support.tiny_targets import hf_model, native_of, random_prompts

from .rows import COSTS, ROWS, DrafterRow, Kit
from .test_law_controls import key_noise_by_place
from .test_laws import models, name, with_rule

MOST = 4
# an oracle knows the texts of one batch only
JOINING = [row for row in ROWS if not row.name.startswith("oracle")]
QUICK = ("chain", "ranked_tree", "recurrent", "recurrent_drawn", "medusa", "eagle3", "dflash")
QUICK += (
    "block_tree",
    "dspark",
    "early_exit",
    "sdsat_one_forward",
    "ouroboros",
    "lookahead",
    "prompt_lookup",
)
PAIRS = [(row, rule) for row in JOINING for rule in ("greedy", row.rules[-1])]
CHAIN = next(row for row in ROWS if row.name == "chain")
SAMPLED = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
]


def requests_of(settings: Settings, count: int = 9, **changes: object) -> list[Request]:
    """Return requests with different prompts, lengths and seeds."""
    prompts = random_prompts(count, seed=3)
    return [
        Request(
            prompt, replace(settings, max_new_tokens=8 + 3 * (i % 4), seed=40 + i, **changes), i
        )  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts)
    ]


def run_staggered(
    target: Target,
    drafter: Drafter | None,
    requests: Sequence[Request],
    leaves: int = -1,
    lengths: Sequence[Sequence[int]] = (),
) -> list[Generation]:
    """Decode requests in a batch that they join one or two at a time, as soon as there is room.

    leaves: index of a request that leaves after its first round. lengths: of drafts, by rows.
    """
    settings = replace(requests[0].settings, seed=0)
    batch = OpenBatch(target, drafter, settings, MOST, lengths=lengths)
    waiting, rows, rounds, together = list(requests), [], 0, 0
    while waiting or batch.rows:
        joining = waiting[: 1 + rounds % 2]
        if joining and batch.takes(joining):
            rows += batch.join(joining)
            del waiting[: len(joining)]
        together = max(together, len(batch.rows))
        with torch.inference_mode():
            batch.round()
        rounds += 1
        if leaves >= 0 and len(rows) > leaves and rows[leaves].generation.rounds == 1:
            batch.leave([rows[leaves].index])
    assert together > 1, "no row ever had a neighbour"
    return [row.generation for row in rows]


def alone(target: Target, drafter: Drafter | None, request: Request) -> Generation:
    (done,) = decode(
        target, drafter, [request.prompt], request.settings, request_ids=[request.request_id]
    )
    return done


def counts(done: Generation) -> tuple[object, ...]:
    return done.rounds, done.drafted, done.tested_by_depth, done.accepted_by_depth, done.finish


@pytest.mark.parametrize(
    ("row", "rule"),
    tiered(PAIRS, lambda row, rule: row.name in QUICK and rule == row.rules[-1]),
    ids=name,
)
def test_a_row_that_joins_has_the_text_and_drafts_of_a_decode_alone(
    row: DrafterRow, rule: str
) -> None:
    settings = with_rule(
        rule, num_draft_tokens=row.gamma or 3, stop_token_ids=(3, 4), stopping="fixed"
    )
    target, twin, draft_model = models()
    requests = requests_of(settings)
    kit = Kit(target, twin, draft_model, [])
    apart = [alone(target, row.make(kit), request) for request in requests]
    longest = max(range(len(apart)), key=lambda number: apart[number].rounds)
    together = run_staggered(target, row.make(kit), requests, leaves=longest)
    for number, (expected, joined) in enumerate(zip(apart, together, strict=True)):
        if number == longest:
            assert 0 < len(joined.tokens) < len(expected.tokens)
            assert joined.tokens == expected.tokens[: len(joined.tokens)]
            continue
        assert joined.tokens == expected.tokens
        assert counts(joined) == counts(expected)
    # sampled random text repeats no two tokens
    if (row.name, rule) != ("suffix_lookup", "coupled"):
        assert any(done.drafted for done in together), "nothing was ever drafted"


@pytest.mark.parametrize("row", tiered(JOINING, lambda row: row.name in QUICK), ids=name)
def test_rows_of_different_sampling_settings_share_a_batch(row: DrafterRow) -> None:
    """Check greedy and coupled rows against autoregressive decoding alone."""
    settings = with_rule("coupled", num_draft_tokens=row.gamma or 3, stopping="fixed")
    target, twin, draft_model = models()
    requests = [
        replace(request, settings=replace(request.settings, **SAMPLED[i % len(SAMPLED)]))  # type: ignore[arg-type]
        for i, request in enumerate(requests_of(settings))
    ]
    drafter = row.make(Kit(target, twin, draft_model, []))
    together = run_staggered(target, drafter, requests)
    for request, joined in zip(requests, together, strict=True):
        assert joined.tokens == alone(target, None, request).tokens


@pytest.mark.parametrize(
    "row", tiered(JOINING, lambda row: row.name in ("chain", "recurrent", "block_tree")), ids=name
)
def test_draft_lengths_by_the_number_of_rows_leave_the_texts(row: DrafterRow) -> None:
    settings = with_rule("coupled", num_draft_tokens=row.gamma or 3, stopping="fixed")
    target, twin, draft_model = models()
    requests = requests_of(settings)
    drafter = row.make(Kit(target, twin, draft_model, []))
    lengths = [[1, 1, row.gamma or 3], [2, 2, 1], [3, MOST, 0]]
    together = run_staggered(target, drafter, requests, lengths=lengths)
    for request, joined in zip(requests, together, strict=True):
        assert joined.tokens == alone(target, None, request).tokens


def test_a_batch_drafts_as_its_table_of_lengths_has_it() -> None:
    target, _, draft_model = models()
    settings = with_rule("coupled", num_draft_tokens=3, stopping="fixed", max_new_tokens=40)
    lengths = [[1, 1, 3], [2, 2, 1], [3, 3, 0]]
    batch = OpenBatch(target, ChainDrafter(model=draft_model), settings, MOST, lengths=lengths)
    drafted = []
    for number in range(MOST):
        (row,) = batch.join([Request([5, 6, 7 + number], settings)])
        with torch.inference_mode():
            batch.round()
        drafted.append(row.generation.drafted)
    assert drafted == [3, 1, 0, 0]


def test_rules_that_test_q_keep_different_sampling_settings_apart() -> None:
    target, _, draft_model = models()
    settings = with_rule("token")
    batch = OpenBatch(target, ChainDrafter(model=draft_model), settings, MOST)
    cool, same, warm = (
        Request([5, 6], replace(settings, temperature=temperature, seed=seed))
        for temperature, seed in ((0.7, 1), (0.7, 2), (1.2, 3))
    )
    batch.join([cool])
    assert batch.takes([same]) and not batch.takes([warm]) and not batch.takes([same] * MOST)
    with pytest.raises(ValueError, match="do not fit"):
        batch.join([warm])
    batch.leave([0])
    assert batch.takes([warm]) and not batch.takes([warm, cool])


@pytest.mark.parametrize("backend", ["hf", "native"])
def test_a_cache_grows_with_the_rows_that_join(backend: str) -> None:
    """Check targets and draft models whose caches were open for one row only."""
    model = hf_model("llama", layers=2)
    target: Target = native_of(model) if backend == "native" else HFTarget(model, "hf")
    small = hf_model("llama", layers=1, seed=1)
    drafter = ChainDrafter(
        model=native_of(small) if backend == "native" else HFTarget(small, "small")
    )
    requests = requests_of(with_rule("greedy"))
    expected = [alone(native_of(model), None, request).tokens for request in requests]
    together = run_staggered(target, drafter, requests)
    assert [done.tokens for done in together] == expected


def test_a_long_prompt_joins_a_padding_target_in_parts_that_fit() -> None:
    model = hf_model("llama", layers=2, max_position_embeddings=64)
    target, settings = HFTarget(model, "hf"), replace(with_rule("greedy"), max_new_tokens=70)
    batch = OpenBatch(target, None, settings, 2)
    (first,) = batch.join([Request([7, 9], settings)])
    with torch.inference_mode():
        for _ in range(55):
            batch.round()
    long = Request([3 + 7 * place % 40 for place in range(60)], settings)
    (second,) = batch.join([long])
    with torch.inference_mode():
        while batch.rows:
            batch.round()
    for row, prompt in ((first, [7, 9]), (second, long.prompt)):
        (plain,) = decode(native_of(model), None, [prompt], settings)
        assert row.generation.tokens == plain.tokens


def test_a_prompt_that_cannot_join_changes_nothing() -> None:
    target, _, draft_model = models()
    settings = with_rule("greedy", max_new_tokens=9)
    batch = OpenBatch(target, ChainDrafter(model=draft_model), settings, MOST)
    (row,) = batch.join([Request([5, 6, 7], settings)])
    for prompt, words in (([], "is empty"), ([3] * 256, "holds at most"), ([48], "token ids")):
        with pytest.raises(UserError, match=words):
            batch.join([Request([4, 4], settings), Request(prompt, settings)])
    with torch.inference_mode():
        while batch.rows:
            batch.round()
    assert row.generation.tokens == alone(target, None, Request([5, 6, 7], settings)).tokens


def test_a_batch_that_another_call_has_overtaken_takes_no_row() -> None:
    target, _, _ = models()
    settings = with_rule("greedy")
    batch = OpenBatch(target, None, settings, MOST)
    decode(target, None, [[5]], settings)
    with pytest.raises(UserError, match="another call has used the target"):
        batch.join([Request([5], settings)])


def test_an_overlapped_schedule_takes_no_row() -> None:
    target, _, draft_model = models()
    settings = with_rule("greedy", schedule="pearl_virtual", costs=COSTS)
    with pytest.raises(UserError, match="schedule=serial"):
        OpenBatch(target, ChainDrafter(model=draft_model), settings, MOST)


def test_the_law_rejects_noise_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    key_noise_by_place(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_row_that_joins_has_the_text_and_drafts_of_a_decode_alone(CHAIN, "coupled")


def test_the_law_rejects_rows_that_join_in_the_wrong_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check a cache in which the rows that join come before the running ones."""
    original = NativeTarget.add_rows

    def add(self: NativeTarget, count: int) -> None:
        running = len(self.lengths_B)
        original(self, count)
        self.select([*range(running, running + count), *range(running)])
        self.slots.lengths_B = [*self.lengths_B[count:], *self.lengths_B[:count]]

    monkeypatch.setattr(NativeTarget, "add_rows", add)
    with pytest.raises(AssertionError):
        test_a_row_that_joins_has_the_text_and_drafts_of_a_decode_alone(CHAIN, "greedy")

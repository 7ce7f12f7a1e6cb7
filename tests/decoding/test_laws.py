"""The laws of every row of `rows.ROWS`: greedy equality, coupled equality and edge cases.

Law 3 is in test_law_of_distribution.py and law 4 in test_law_of_gain.py. Slow rows and repeats of a
row run in the long suite. Law 1 has its full size for a row of each kind of draft in the short
suite; law 5 compares every row with the target's greedy text, on fewer tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.with_lookup import LookupFirst
from decoding.interfaces import Drafter
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.batch import Batch
from decoding.rounds.settings import Settings as AnySettings
from decoding.rounds.stats import Generation
from decoding.sampling.token_chooser import TokenChooser
from decoding.verification.rules import RULES
from tests.support.tiers import tiered
from tests.support.tiny_targets import VOCABULARY, hf_model, native_of, random_prompts

from .rows import COSTS, ROWS, DrafterRow, Kit, of_rows

Settings = partial(AnySettings, costs=COSTS, stopping="fixed")
DISTURBANCE = 0.03  # noise in the draft model's weights, so that it agrees with the target at times
WARPERS = {
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 5},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "all": {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
}
PAIRS = [(row, rule) for row in ROWS for rule in row.rules]


def name(value: DrafterRow | str) -> str:
    return value if isinstance(value, str) else value.name


def is_quick(row: DrafterRow, rule: str) -> bool:
    """Return whether the short suite has a pair: the last rule of a row, and no variants of rows.

    The last rule is coupled, or token in rows whose children are sampled.
    """
    return rule == row.rules[-1] and not row.slow


by_row = pytest.mark.parametrize("row", of_rows())
by_warper = pytest.mark.parametrize("warper", tiered(WARPERS, ["all"]))
by_rule = pytest.mark.parametrize(("row", "rule"), tiered(PAIRS, is_quick), ids=name)
AT_LENGTH = ("chain", "ranked_tree", "prompt_lookup", "recurrent_chain", "medusa")


def with_rule(rule: str, **fields: object) -> AnySettings:
    """Return settings that verify by `rule`."""
    sampled = {} if rule == "greedy" else {"temperature": 1.0, "verify": rule}
    return Settings(**{"num_draft_tokens": 3, "seed": 5, **sampled, **fields})  # type: ignore[arg-type]


@lru_cache
def models(execution: str = "eager") -> tuple[NativeTarget, NativeTarget, NativeTarget]:
    """Return the target, its copy and the draft model, in float64."""
    model = hf_model("llama", layers=2)
    target, twin = (native_of(model, execution=execution) for _ in range(2))
    return target, twin, native_of(model, noise=DISTURBANCE, execution=execution)


@lru_cache
def said(
    prompts: tuple[tuple[int, ...], ...], settings: AnySettings, product: tuple[object, ...]
) -> list[Generation]:
    """Return the target's autoregressive generations, computed once for all rows.

    product: the functions that a control may have replaced; each combination has its own entry.
    """
    return decode(models()[0], None, prompts, settings)


def plain_of(prompts: Sequence[Sequence[int]], settings: AnySettings) -> list[Generation]:
    """Return the autoregressive generations of prompts, computed once for all rows."""
    product = (
        Batch.__init__,
        Batch._commit,
        NativeTarget.commit,
        TokenChooser.begin,
        *RULES.values(),
    )
    return said(tuple(map(tuple, prompts)), settings, product)


def run(
    row: DrafterRow, prompts: Sequence[Sequence[int]], settings: AnySettings
) -> tuple[list[Generation], list[Generation]]:
    """Return the autoregressive generations, and those with the row's drafter."""
    target, twin, draft_model = models()
    plain = plain_of(prompts, settings)
    kit = Kit(target, twin, draft_model, [g.tokens for g in plain])
    return plain, decode(target, row.make(kit), prompts, settings)


@pytest.mark.parametrize("row", tiered(ROWS, lambda row: row.name in AT_LENGTH), ids=name)
def test_law_1_greedy_output_is_the_targets_own(row: DrafterRow) -> None:
    plain, drafted = run(
        row, random_prompts(64), Settings(max_new_tokens=128, num_draft_tokens=row.gamma or 4)
    )
    assert all(len(g.tokens) == 128 for g in plain)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert all(len(g.trace) == 128 and g.trace.count("1") == g.accepted for g in drafted)
    assert all(g.trace.count("0") == g.tested - g.accepted for g in drafted)
    assert len({token for g in plain for token in g.tokens}) > 10, (
        "a target that loops proves nothing"
    )
    assert sum(g.rounds for g in drafted) < sum(g.rounds for g in plain), (
        "no draft was ever accepted"
    )


@by_warper
@by_row
def test_law_2_coupled_output_is_the_targets_own_sample(row: DrafterRow, warper: str) -> None:
    gamma = row.gamma or 4
    settings = Settings(
        max_new_tokens=48, num_draft_tokens=gamma, verify="coupled", seed=11, **WARPERS[warper]
    )
    # equality is exact, so more prompts add no power but what a batch adds
    plain, drafted = run(row, random_prompts(16), settings)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    other = plain_of(random_prompts(16), replace(settings, seed=12))
    assert [g.tokens for g in other] != [g.tokens for g in plain], "the seed has no effect"


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@by_row
def test_laws_1_and_2_hold_over_the_fused_step(row: DrafterRow, rule: str) -> None:
    """Compare with the text of the eager target, in float64."""
    prompts = random_prompts(6)
    settings = with_rule(rule, max_new_tokens=24, num_draft_tokens=row.gamma or 4)
    plain = plain_of(prompts, settings)
    kit = Kit(*models("fused"), [g.tokens for g in plain])
    drafted = decode(models("fused")[0], row.make(kit), prompts, settings)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]


@by_rule
def test_law_5_ragged_batches_equal_single_rows(row: DrafterRow, rule: str) -> None:
    settings = with_rule(
        rule, max_new_tokens=20, num_draft_tokens=row.gamma or 3, stop_token_ids=(3, 4)
    )
    target, twin, draft_model = models()
    prompts = random_prompts(10, seed=3)
    ids = [40 + i for i in range(len(prompts))]
    answers = [g.tokens for g in decode(target, None, prompts, settings, request_ids=ids)]
    together = decode(
        target,
        row.make(Kit(target, twin, draft_model, answers)),
        prompts,
        settings,
        request_ids=ids,
    )
    for prompt, request, answer, expected in zip(prompts, ids, answers, together):
        drafter = row.make(Kit(target, twin, draft_model, [answer]))
        (alone,) = decode(target, drafter, [prompt], settings, request_ids=[request])
        assert alone.tokens == expected.tokens
        assert (
            alone.rounds,
            alone.drafted,
            alone.tested_by_depth,
            alone.accepted_by_depth,
            alone.finish,
        ) == (
            expected.rounds,
            expected.drafted,
            expected.tested_by_depth,
            expected.accepted_by_depth,
            expected.finish,
        )
    assert {g.finish for g in together} == {"stop", "length"}


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_law_5_a_stop_token_inside_the_accepted_span_ends_the_row(rule: str) -> None:
    row = next(row for row in ROWS if row.name == "oracle")
    target, twin, draft_model = models()
    prompts = random_prompts(12)
    free = [g.tokens for g in decode(target, None, prompts, with_rule(rule, max_new_tokens=30))]
    row_0 = free[0]
    stop_token = next(
        token for i, token in enumerate(row_0) if 5 <= i < 9 and token not in row_0[:i]
    )
    settings = with_rule(rule, max_new_tokens=30, num_draft_tokens=4, stop_token_ids=(stop_token,))
    drafted = decode(target, row.make(Kit(target, twin, draft_model, free)), prompts, settings)
    for tokens, generation in zip(free, drafted):
        stop = tokens.index(stop_token) + 1 if stop_token in tokens else 30
        assert generation.tokens == tokens[:stop]
        assert generation.finish == ("stop" if stop_token in tokens else "length")
        assert generation.accepted + generation.rounds >= stop
        assert generation.accepted <= stop, "tokens after the stop were counted"
    assert drafted[0].rounds == 2


@by_row
def test_law_5_one_token_prompts_and_one_token_outputs(row: DrafterRow) -> None:
    plain, drafted = run(row, [[7], [9], [7, 8, 9]], Settings(max_new_tokens=12))
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    plain, drafted = run(row, [[7], [9, 4]], Settings(max_new_tokens=1))
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert [(g.rounds, g.drafted) for g in drafted] == [(1, 0), (1, 0)]


@by_row
def test_law_5_cache_lengths_after_every_round(
    row: DrafterRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = models_seen = 0
    original = Batch._commit

    def checked(self: Batch, *args: object) -> None:
        nonlocal seen, models_seen
        original(self, *args)  # type: ignore[arg-type]
        for running, length in zip(self.rows, self.target.lengths_B):
            # The tip is in no cache; a row cut at a stop token is dropped and may hold tokens
            # after it.
            assert length >= len(running.sequence) - 1
            if running.generation.finish != "stop":
                assert length == len(running.sequence) - 1
        drafter = self.drafter.drafter if isinstance(self.drafter, LookupFirst) else self.drafter
        if isinstance(drafter, ChainDrafter):
            assert all(
                cached <= kept
                for cached, kept in zip(drafter.model.lengths_B, self.target.lengths_B)
            )
            models_seen += 1
        seen += 1

    monkeypatch.setattr(Batch, "_commit", checked)
    plain, drafted = run(
        row, random_prompts(8), Settings(max_new_tokens=24, stop_token_ids=(5, 6, 7))
    )
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert seen > 0
    with_models = (
        "chain",
        "ranked",
        "static_tree",
        "budget_tree",
        "multi_candidate",
        "graph",
        "ouroboros",
    )
    assert models_seen or not row.name.startswith(with_models), "no draft model's cache was checked"


@pytest.mark.parametrize("rule", ["greedy", "token", "coupled"])
def test_counts_add_up(rule: str) -> None:
    row = ROWS[0]
    for generation in run(row, random_prompts(8), with_rule(rule, max_new_tokens=40))[1]:
        assert len(generation.tokens) == 40 == generation.accepted + generation.rounds
        assert all(a <= t for a, t in zip(generation.accepted_by_depth, generation.tested_by_depth))
        deeper = zip(generation.accepted_by_depth, generation.tested_by_depth[1:])
        assert all(tested <= accepted for accepted, tested in deeper), (
            "depth k+1 is tested only where k was accepted"
        )
        assert generation.tested <= generation.drafted
        assert generation.decode_seconds >= generation.draft_seconds > 0
        assert generation.first_token_seconds >= generation.prefill_seconds > 0


def test_tokens_stream_as_they_appear() -> None:
    target, _, _ = models()
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    prompts = random_prompts(3)
    done = decode(
        target,
        None,
        prompts,
        Settings(max_new_tokens=9),
        on_tokens=lambda row, new: streamed[row].extend(new),
    )
    assert [streamed[i] for i in range(3)] == [g.tokens for g in done]


def test_drafts_end_at_the_context_limit() -> None:
    model = hf_model("llama", layers=2)
    target, drafter_model = native_of(model, max_length=20), native_of(model, max_length=14)
    prompts = [random_prompts(1, longest=2)[0], [4] * 15]
    plain = decode(target, None, prompts, Settings(max_new_tokens=100))
    assert [len(p) + len(g.tokens) for p, g in zip(prompts, plain)] == [20, 20]
    drafter: Drafter = ChainDrafter(model=drafter_model)
    drafted = decode(target, drafter, prompts, Settings(max_new_tokens=100))
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert drafted[1].drafted == 0, "a drafter proposes nothing beyond its own context"


MODELLED = (
    "chain",
    "multi_candidate",
    "static_tree",
    "ranked_tree",
    "ouroboros",
    "chain_with_lookup",
)


@pytest.mark.parametrize("larger", ["target", "drafter"])
def test_vocabularies_of_different_size(larger: str) -> None:
    """Check that the output is the target's own if one model has five more tokens.

    Models of one tokenizer may differ in their padding and in added tokens.
    """
    model = hf_model("llama", layers=1)
    state = dict(model.state_dict())
    wide = dict(state)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        wide[name] = torch.cat((state[name], torch.randn(5, 32, dtype=torch.float64)))
    config = model.config.to_dict()
    small = NativeTarget.from_state(config, state, dtype=torch.float64)
    large = NativeTarget.from_state(
        {**config, "vocab_size": VOCABULARY + 5}, wide, dtype=torch.float64
    )
    target, draft_model = (large, small) if larger == "target" else (small, large)
    # one with a token that the smaller model lacks
    prompts = [*random_prompts(4), [7, target.vocab_size - 1, 9]]
    kit = Kit(target, target, draft_model, [])
    for rule in ("greedy", "coupled"):
        settings = with_rule(rule, max_new_tokens=12)
        plain = [row.tokens for row in decode(target, None, prompts, settings)]
        for row in ROWS:
            if row.name in MODELLED:
                assert [
                    done.tokens for done in decode(target, row.make(kit), prompts, settings)
                ] == plain
        overlapped = replace(settings, schedule="pearl_virtual")
        assert [
            done.tokens
            for done in decode(target, ChainDrafter(model=draft_model), prompts, overlapped)
        ] == plain

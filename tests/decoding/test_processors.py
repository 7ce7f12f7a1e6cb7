"""Repetition penalty, allowed tokens and stop strings, under the laws: each drafted position is judged by its own text."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from decoding.chain import ChainDrafter
from decoding.errors import UserError
from decoding.loop import Settings, decode
from decoding.processors import Processors
from decoding.schedules import VIRTUAL

from .rows import COSTS, ROWS, DrafterRow, Kit
from .test_law_of_distribution import P_LIMIT, PROMPT, exact_row, p_value, target_table
from .test_laws import models, with_rule
from .tiny import VOCABULARY, hf_model, native_of, random_prompts

CHOSEN = [
    row for row in ROWS if row.name in ("chain", "ranked_tree", "multi_candidate", "lookahead", "ouroboros", "oracle")
]
by_row = pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.name)


def other_thirds(text: Sequence[int]) -> list[int]:
    """Tokens that leave another rest by three than the last one, and than the one two before it."""
    taken = {token % 3 for token in text[-1:]}
    return [token for token in range(VOCABULARY) if token % 3 not in taken and token != text[len(text) // 2]]


CHANGES = {
    "penalty": {"repetition_penalty": 1.4},
    "reward": {"repetition_penalty": 0.8},
    "allowed": {"allowed": other_thirds},
    "both": {"repetition_penalty": 1.4, "allowed": other_thirds},
}


def both(row: DrafterRow, settings: Settings) -> tuple[list[list[int]], list[list[int]], int]:
    """(autoregressive output, the row's, accepted tokens)."""
    target, twin, draft_model = models()
    prompts = random_prompts(16)
    plain = decode(target, None, prompts, settings)
    drafted = decode(target, row.make(Kit(target, twin, draft_model, [g.tokens for g in plain])), prompts, settings)
    return [g.tokens for g in plain], [g.tokens for g in drafted], sum(g.accepted for g in drafted)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("change", CHANGES)
@by_row
def test_laws_1_and_2(row: DrafterRow, change: str, rule: str) -> None:
    sampled = {"temperature": 1.0, "verify": "coupled"} if rule == "coupled" else {}
    settings = Settings(max_new_tokens=40, costs=COSTS, **sampled, **CHANGES[change])
    plain, drafted, accepted = both(row, settings)
    assert drafted == plain
    assert accepted > 0
    unchanged = replace(settings, repetition_penalty=1.0, allowed=None)
    assert [g.tokens for g in decode(models()[0], None, random_prompts(16), unchanged)] != plain, "nothing was changed"
    if "allowed" in CHANGES[change]:
        for prompt, tokens in zip(random_prompts(16), plain):
            assert all(t in other_thirds([*prompt, *tokens[:i]]) for i, t in enumerate(tokens))


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("schedule", VIRTUAL)
@pytest.mark.parametrize("change", CHANGES)
def test_laws_1_and_2_under_overlapped_schedules(schedule: str, change: str, rule: str) -> None:
    target, _, draft_model = models()
    settings = with_rule(rule, max_new_tokens=40, schedule=schedule, costs=COSTS, **CHANGES[change])
    drafter = ChainDrafter(model=draft_model)
    for number, prompt in enumerate(random_prompts(6)):
        (plain,) = decode(target, None, [prompt], settings, request_ids=[number])
        (drafted,) = decode(target, drafter, [prompt], settings, request_ids=[number])
        assert drafted.tokens == plain.tokens


@pytest.mark.parametrize("change", ["penalty", "allowed"])
@by_row
def test_law_1_rejects_changes_that_leave_the_drafted_tokens_out(
    row: DrafterRow, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Processors.__call__
    monkeypatch.setattr(
        Processors, "__call__", lambda self, logits, sequences, *path: original(self, logits, sequences)
    )
    plain, drafted, _ = both(row, Settings(max_new_tokens=40, costs=COSTS, **CHANGES[change]))
    assert drafted != plain


def test_law_3_with_a_penalty() -> None:
    """The joint distribution of three tokens whose logits change as the text grows."""
    target, penalty = target_table(), 3.0
    law = {}
    for triple in itertools.product(range(5), repeat=3):
        text, probability = list(PROMPT), 1.0
        for token in triple:
            logits = target.table_VVV[text[-2], text[-1]].tolist()
            changed = [(x / penalty if x > 0 else x * penalty) if i in text[1:] else x for i, x in enumerate(logits)]
            probability *= exact_row(changed, temperature=1.0)[token]
            text.append(token)
        law[triple] = probability
    settings = Settings(max_new_tokens=5, num_draft_tokens=4, temperature=1.0, repetition_penalty=penalty)
    counts: dict[tuple[int, ...], int] = {}
    drafter = next(row for row in ROWS if row.name == "chain").table
    assert drafter is not None
    for generation in decode(target, drafter(), [PROMPT[1:]] * 20_000, settings):
        triple = tuple(generation.tokens[:3])
        counts[triple] = counts.get(triple, 0) + 1
    assert p_value(counts, law, 20_000) > P_LIMIT


def test_the_penalty_is_that_of_transformers() -> None:
    model = hf_model("llama")
    prompt = random_prompts(1)[0]
    ours = decode(native_of(model), None, [prompt], Settings(max_new_tokens=30, repetition_penalty=1.3))[0].tokens
    theirs = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=30,
        do_sample=False,
        repetition_penalty=1.3,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert ours == theirs[0, len(prompt) :].tolist()


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(97 + i % 6) for i in ids)


@by_row
def test_a_stop_string_ends_the_row_where_it_is_complete(row: DrafterRow) -> None:
    free = Settings(max_new_tokens=60, num_draft_tokens=4, costs=COSTS)
    texts = [letters(g.tokens) for g in decode(models()[0], None, random_prompts(16), free)]
    stops = (texts[0][20:23], texts[1][7:9])
    plain, drafted, _ = both(row, replace(free, stop_strings=stops, text_of=letters))
    assert drafted == plain
    for text, tokens in zip(texts, plain):
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        assert letters(tokens) == text[: min([60, *ends])]
    assert len(plain[0]) < 60


def test_bad_values_are_named() -> None:
    target = models()[0]
    with pytest.raises(UserError, match="stop_strings needs text_of"):
        Settings(stop_strings=("x",))
    with pytest.raises(UserError, match="an empty text"):
        Settings(stop_strings=("",), text_of=letters)
    with pytest.raises(UserError, match="repetition_penalty is 0, expected more than 0"):
        decode(target, None, [[4]], Settings(repetition_penalty=0))
    with pytest.raises(UserError, match="allowed.. allows no token after 1 tokens"):
        decode(target, None, [[4]], Settings(allowed=lambda text: []))
